"""The options that commands share."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any, ClassVar, NamedTuple, TypeVar
from uuid import UUID

import click

SPAN_MAX = timedelta(days=36525)  # a century: no instant that it leads to is before the first year

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

schema_option = click.option("--schema", default=None, help="Schema of the tables; by default the connection's own.")
prefix_option = click.option("--prefix", default="outbox_", show_default=True, help="Prefix of the tables' names.")
# The group reads whether it was given, before anything else can fail.
json_option = click.option(
    "--json", is_flag=True, expose_value=False, help="Print one JSON document; errors too, on stderr."
)
env_option = click.option(
    "--env",
    envvar="OUTBOX_ENV",
    show_envvar=True,
    default=None,
    help="Name of the deployment; it is part of every key.",
)
scope_option = click.option("--scope", default="", help="Scope of the parent key: the authenticated caller.")
source_option = click.option(
    "--source", default="app", show_default=True, help="Source of the parent key: app, http, inbox:..."
)
any_scope_option = click.option("--scope", default=None, help="Only parent keys of this scope (the caller).")
any_source_option = click.option("--source", default=None, help="Only parent keys of this source: app, http, inbox:...")


def database_option(*, required: bool = True) -> Callable[[Decorated], Decorated]:
    return click.option(
        "--database",
        envvar="DATABASE_URL",
        required=required,
        show_envvar=True,
        help="SQLAlchemy URL, e.g. postgresql+psycopg://user@host/name.",
    )


class Target(NamedTuple):
    """The outbox that a command uses: its database, and the schema and prefix of its tables."""

    database: str
    schema: str | None
    prefix: str


def database_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--database`, `--schema`, `--prefix` and `--json`: the options of every command that uses a database.

    The command gets the first three as one `target`.
    """

    @wraps(command)
    def with_target(*, database: str, schema: str | None, prefix: str, **rest: Any) -> Any:
        return command(target=Target(database, schema, prefix), **rest)

    for option in (json_option, prefix_option, schema_option, database_option()):
        with_target = option(with_target)
    return with_target


# --- values


class Since(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click only
    """A span back from now (`90s`, `15m`, `2h`, `7d`, `4w`) as a timedelta; or an instant in ISO 8601, by default UTC."""

    name = "instant|span"
    _span = re.compile(r"(\d{1,6})([smhdw])")
    _units: ClassVar = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta | datetime:
        try:
            if found := self._span.fullmatch(value):
                span = timedelta(**{self._units[found[2]]: int(found[1])})
                if span > SPAN_MAX:
                    raise ValueError("too long")
                return span
            instant = datetime.fromisoformat(value)
            return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(
                f"{value!r} is neither a span such as 15m, 2h or 7d nor an instant such as 2026-01-31T12:00Z",
                param,
                ctx,
            )


class Cursor(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click only
    """A position in a list, as the previous page printed it: `<instant>,<id>`."""

    name = "cursor"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[datetime, UUID]:
        at, _, id = value.partition(",")
        try:
            return datetime.fromisoformat(at).astimezone(UTC), UUID(id)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a cursor: pass the one that the previous page printed", param, ctx)
