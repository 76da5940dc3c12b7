"""The options that commands share."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, TypeVar
from uuid import UUID

import click

SPAN_MAX = timedelta(days=36525)  # a century: no instant that it leads to is before the first year

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

schema_option = click.option(
    "--schema", default=None, help="The schema that the tables are in; the connection's own by default."
)
prefix_option = click.option("--prefix", default="outbox_", show_default=True, help="How the tables' names begin.")
# Whether it was given is read by the group, before anything else can fail.
json_option = click.option(
    "--json", is_flag=True, expose_value=False, help="Print one JSON document; errors too, on stderr."
)
env_option = click.option(
    "--env",
    envvar="OUTBOX_ENV",
    show_envvar=True,
    default=None,
    help="The deployment's name, which is part of every key.",
)
scope_option = click.option("--scope", default="", help="The parent key's scope: the authenticated caller.")
source_option = click.option(
    "--source", default="app", show_default=True, help="Where the parent key comes from: app, http, inbox:..."
)
any_scope_option = click.option("--scope", default=None, help="Only this scope of the parent key: the caller.")
any_source_option = click.option(
    "--source", default=None, help="Only parent keys from there: app, http, inbox:... (by default from anywhere)."
)


def database_option(*, required: bool = True) -> Callable[[Decorated], Decorated]:
    return click.option(
        "--database",
        envvar="DATABASE_URL",
        required=required,
        show_envvar=True,
        help="SQLAlchemy URL, e.g. postgresql+psycopg://user@host/name.",
    )


def database_options(command: Decorated) -> Decorated:
    """`--database`, `--schema`, `--prefix` and `--json`: what every command that asks a database takes."""
    for option in (json_option, prefix_option, schema_option, database_option()):
        command = option(command)
    return command


# --- values. (ParamType is generic in newer releases of click, and cannot be subscripted in older ones.)


class Since(click.ParamType):  # type: ignore[type-arg]
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


class Cursor(click.ParamType):  # type: ignore[type-arg]
    """A place in a list, as the page before printed it: `<instant>,<id>`."""

    name = "cursor"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[datetime, UUID]:
        at, _, id = value.partition(",")
        try:
            return datetime.fromisoformat(at).astimezone(UTC), UUID(id)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no place in a list: take what the page before printed", param, ctx)
