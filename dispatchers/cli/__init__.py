"""The command `outbox`: run the dispatcher, and keep its tables."""

import base64
import importlib
import logging
import os
import secrets
import sys
from typing import Any

import click

from outbox.errors import OutboxError
from outbox.keys import SECRET_BYTES_MIN, Keyring

# Exit statuses: 0 done, 1 refused by the outbox (the text says why), 2 the command line itself is wrong.
REFUSED = 1


class Commands(click.Group):
    """Shows the outbox's own errors as they are, without a trace."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OutboxError as error:
            click.echo(f"outbox: {error}", err=True)
            ctx.exit(REFUSED)


@click.group(cls=Commands)
@click.version_option(package_name="sqlalchemy-outbox", prog_name="outbox")
def main() -> None:
    """Commit the intent with the data, and let every retry carry the same key."""


@main.command()
@click.argument("factory", metavar="MODULE:FUNCTION")
@click.option(
    "--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]), show_default=True
)
def run(factory: str, log_level: str) -> None:
    """Run the dispatcher that MODULE:FUNCTION makes, until SIGTERM; then drain.

    A second SIGTERM stops at once: what was in flight is then in doubt until its lease ends.
    """
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("apscheduler").setLevel("WARNING")
    _load(factory)().run()


def _load(reference: str) -> Any:
    """The object that `module:name` stands for; modules of the working directory are found too."""
    module_name, colon, name = reference.partition(":")
    if not (module_name and colon and name):
        raise click.BadParameter(f"{reference!r} is not MODULE:FUNCTION, e.g. app.effects:make_dispatcher")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise click.BadParameter(f"there is no module {module_name!r} here or among the installed ones") from error
    if not callable(getattr(module, name, None)):
        raise click.BadParameter(f"module {module_name!r} has no function {name!r}")
    return getattr(module, name)


@main.group()
def db() -> None:
    """The outbox's tables."""


def database_options(command: Any) -> Any:
    for option in (
        click.option("--prefix", default="outbox_", show_default=True, help="How the tables' names begin."),
        click.option("--schema", default=None, help="The schema they are in; the connection's own by default."),
        click.option(
            "--database",
            envvar="DATABASE_URL",
            required=True,
            show_envvar=True,
            help="SQLAlchemy URL, e.g. postgresql+psycopg://user@host/name.",
        ),
    ):
        command = option(command)
    return command


@db.command()
@database_options
def upgrade(database: str, schema: str | None, prefix: str) -> None:
    """Create the tables, or bring them up to this release."""
    from outbox import migrations  # alembic is an extra, and slow to load

    before = migrations.current(database, schema=schema, prefix=prefix)
    migrations.upgrade(database, schema=schema, prefix=prefix)
    head = migrations.head()
    click.echo(f"at {head} already" if before == head else f"upgraded from {before or 'nothing'} to {head}")


@db.command()
@database_options
def check(database: str, schema: str | None, prefix: str) -> None:
    """Say whether the tables are those of this release; exit status 1 if not."""
    from outbox import migrations

    migrations.check(database, schema=schema, prefix=prefix)
    click.echo(f"the tables are at {migrations.head()}")


@db.command()
@click.option("--dialect", default="postgresql", type=click.Choice(["postgresql", "sqlite"]), show_default=True)
@click.option("--schema", default=None, help="The schema they are to be in.")
@click.option("--prefix", default="outbox_", show_default=True, help="How the tables' names begin.")
def sql(dialect: str, schema: str | None, prefix: str) -> None:
    """Print the SQL of all migrations, to be reviewed and run by hand."""
    from outbox import migrations

    click.echo(migrations.sql(dialect, schema=schema, prefix=prefix))


@main.group()
def keys() -> None:
    """The key ring."""


@keys.command()
@click.option("--kid", default="k1", show_default=True, help="The new secret's name; a new one at each rotation.")
def generate(kid: str) -> None:
    """Make a secret, as OUTBOX_SECRET takes it. At a rotation put it in front of the older ones."""
    secret = secrets.token_bytes(SECRET_BYTES_MIN)
    Keyring({kid: secret})
    click.echo(f"{kid}:{base64.b64encode(secret).decode()}")
