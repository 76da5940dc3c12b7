"""`outbox run`: the dispatcher's process."""

import importlib.util
import json
import logging
import signal
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from dispatchers.admin.read.plain_values import instant
from dispatchers.cli.exit_codes import JSON, REFUSED
from dispatchers.cli.references import load_function

if TYPE_CHECKING:
    from dispatchers.process.dispatcher import Dispatcher
    from dispatchers.process.fleet import Fleet

SHOWING_REQUESTS = ("aiosmtplib", "httpcore", "httpx", "stripe", "urllib3")
"""Loggers that show headers, bodies or URLs at DEBUG or INFO. The app's own code may set them otherwise."""


@click.command()
@click.argument("factory", metavar="MODULE:FUNCTION")
@click.option(
    "--log-level",
    default="info",
    type=click.Choice(["debug", "info", "warning", "error"]),
    show_default=True,
    help="Lowest level of the lines to log.",
)
@click.option(
    "--http",
    metavar="HOST:PORT",
    callback=lambda context, option, value: value if value is None else _checked_address(value),
    help="Serve /metrics, /livez and /readyz at this address, for example 127.0.0.1:9464.",
)
@click.option(
    "--databases",
    metavar="FILE",
    envvar="OUTBOX_DATABASES",
    show_envvar=True,
    help="Databases of a Fleet: lines `name = url`. SIGHUP reads the file again.",
)
@click.option("--json", is_flag=True, expose_value=False, help="Log one JSON document per line; startup errors too.")
def run(factory: str, log_level: str, http: str | None, databases: str | None) -> None:
    """Run the dispatcher, or the fleet, that MODULE:FUNCTION makes.

    The dispatcher runs until SIGTERM. Then it claims nothing more, and finishes the sends in flight. A second SIGTERM stops it
    at once: the sends in flight are then in doubt until their leases expire.
    """
    if importlib.util.find_spec("apscheduler") is None:
        raise click.ClickException("APScheduler is not installed: pip install 'sqlalchemy-outbox[dispatcher]'")
    if http is not None and importlib.util.find_spec("prometheus_client") is None:
        raise click.ClickException("prometheus_client is not installed: pip install 'sqlalchemy-outbox[prometheus]'")
    if databases is not None and hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the fleet listens to it
    begin_log(log_level)
    logging.getLogger("apscheduler").setLevel("WARNING")
    for name in SHOWING_REQUESTS:
        logging.getLogger(name).setLevel("WARNING")
    from dispatchers.process.fleet import Fleet, fleet_work_of

    made = make(factory)
    if not isinstance(made, Fleet):
        if databases is not None:
            raise click.UsageError(
                f"--databases needs a function that returns a dispatchers.Fleet: {factory} returns another"
            )
        made.run(http=http)
        return
    if databases is not None:
        fleet_work_of(made).use(databases)
    name_databases()
    made.run(http=http)


def _checked_address(text: str) -> str:
    from dispatchers.telemetry.http_server import address_of
    from outbox.errors import ConfigurationError

    try:
        address_of(text)
    except ConfigurationError as error:
        raise click.BadParameter(str(error)) from error
    return text


def begin_log(level: str) -> None:
    """Log to stderr: lines for people, or with `--json` documents."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if click.get_current_context().meta.get(JSON):
        from dispatchers.telemetry.log_ids import LogIds

        for handler in logging.getLogger().handlers:
            handler.addFilter(LogIds())
            handler.setFormatter(JsonLines())


def name_databases() -> None:
    """Begin each line for people with the name of its database."""
    from dispatchers.telemetry.log_ids import LogIds

    for handler in logging.getLogger().handlers:
        if not isinstance(handler.formatter, JsonLines):
            handler.addFilter(LogIds())
            form = "%(asctime)s %(levelname)s %(name)s [%(database)s]: %(message)s"
            handler.setFormatter(logging.Formatter(form, defaults={"database": "fleet"}))


class JsonLines(logging.Formatter):
    """One JSON document per line: `at`, `level`, `logger`, `message`, the ids, and `trace` for an exception."""

    def format(self, record: logging.LogRecord) -> str:
        from dispatchers.telemetry.log_ids import ids_of

        fields = {
            "at": instant(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **ids_of(record),
        }
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def make(reference: str) -> "Dispatcher | Fleet":
    """What the function that `reference` names returns; it must be a dispatcher or a fleet."""
    from dispatchers.process.dispatcher import Dispatcher
    from dispatchers.process.fleet import Fleet

    made: Dispatcher | Fleet = _made(reference, Dispatcher, Fleet)
    return made


def callbacks_of(reference: str) -> list[str]:
    """The names of the callbacks that this dispatcher, or this fleet, records when it starts."""
    from dispatchers.process.dispatcher import work_of
    from dispatchers.process.fleet import Fleet, fleet_work_of

    made = make(reference)
    work = fleet_work_of(made) if isinstance(made, Fleet) else work_of(made)
    return sorted(work.callbacks)


def _made(reference: str, *kinds: type[Any]) -> Any:
    function = load_function(reference, example="app.effects:make_dispatcher")
    from outbox.errors import OutboxError

    try:
        made = function()
    except OutboxError:
        raise
    except Exception as error:
        # An error in the app's own code needs its traceback, also where `main` would have a text for it.
        sys.excepthook(type(error), error, error.__traceback__)
        click.get_current_context().exit(REFUSED)
    if not isinstance(made, kinds):
        wanted = " or a ".join(f"dispatchers.{kind.__name__}" for kind in kinds)
        raise click.BadParameter(
            f"{reference} must return a {wanted}, but returned {_described(made)}",
            param_hint="'MODULE:FUNCTION'",
        )
    return made


def _described(made: Any) -> str:
    if hasattr(made, "close") and hasattr(made, "cr_code"):
        made.close()
        return "a coroutine: it must not be an `async def`"
    return "None: is its `return` missing?" if made is None else f"{type(made).__name__!r}"
