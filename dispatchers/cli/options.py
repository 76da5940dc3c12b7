"""The options that commands share."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import click

from dispatchers.admin.read.plain_values import Place, parse_since

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def once_option(name: str, **settings: Any) -> Callable[[Decorated], Decorated]:
    """An option that selects, and is refused if it is repeated: the last value alone would count, and select others."""

    def value_of(ctx: click.Context, param: click.Parameter, values: tuple[Any, ...]) -> Any:
        if len(values) > 1:
            raise click.BadParameter(f"was given {len(values)} times: give one value")
        return values[0] if values else None

    return click.option(name, multiple=True, callback=value_of, **settings)


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
all_option = click.option(
    "--all", "is_whole", is_flag=True, help="Print all destinations; else the 30 that need attention most."
)
any_scope_option = once_option("--scope", help="Only parent keys of this scope (the caller).")
any_source_option = once_option("--source", help="Only parent keys of this source: app, http, inbox:...")


database_option = click.option(
    "--database",
    envvar="DATABASE_URL",
    show_envvar=True,
    help="SQLAlchemy URL, e.g. postgresql+psycopg://user@host/name.",
)


class Target(NamedTuple):
    """The outbox that a command uses: its database, and the schema and prefix of its tables."""

    database: str
    schema: str | None
    prefix: str


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--database`, `--schema`, `--prefix` and `--json`, which the command gets one by one."""
    for option in (json_option, prefix_option, schema_option, database_option):
        command = option(command)
    return command


def actor_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    from getpass import getuser

    try:
        return getuser() if value is None else value
    except (KeyError, OSError):  # a container's user without a name; which of the two depends on Python's version
        raise click.UsageError("the system's user has no name: give --actor") from None


# --- values


class Since(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click only
    """A span back from now (`90s`, `15m`, `2h`, `7d`, `4w`) as a timedelta; or an instant in ISO 8601, by default UTC."""

    name = "instant|span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta | datetime:
        try:
            return parse_since(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Cursor(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click only
    """A position in a list, as the previous page printed it: `<instant>,<id>`."""

    name = "cursor"

    def __init__(self, id: Callable[[str], Any] = UUID) -> None:
        self._id = id

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Place[Any]:
        try:
            return Place.parse(value, self._id)
        except ValueError as error:
            self.fail(str(error), param, ctx)
