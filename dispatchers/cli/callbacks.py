"""`outbox callbacks`: those on record, without which no dispatcher settles an entry of theirs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from dispatchers.cli import options
from dispatchers.cli.connections import deciding, reading
from dispatchers.cli.exit_codes import NothingFound
from dispatchers.cli.output import answer, clean, instant, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dispatchers.store.callback_registry import CallbackOnRecord


@click.group()
def callbacks() -> None:
    """The callbacks on record, without which nothing settles.

    A dispatcher puts its callbacks on record when it starts. From then on an entry settles only with its callback: a dispatcher
    that does not have it, one of an older deploy for example, hands the outcome over to one that has it.
    """


@callbacks.command("list")
@options.database_options
def list_callbacks(database: str, schema: str | None, prefix: str) -> None:
    """List them, with how many entries wait for each."""
    from dispatchers.store.callback_registry import list_all

    with reading(database, schema, prefix) as (connection, tables):
        found = list_all(connection, tables)
    answer({"callbacks": found}, lambda: _drawn(found))


@callbacks.command()
@click.argument("factory", metavar="MODULE:FUNCTION")
@options.database_options
def record(factory: str, database: str, schema: str | None, prefix: str) -> None:
    """Put those of the dispatcher that MODULE:FUNCTION makes on record.

    Before a deploy, beside `outbox db upgrade`: then no running dispatcher settles an entry of the new app without its callback,
    whichever of app and dispatcher is deployed first.
    """
    from dispatchers.cli.run import make_dispatcher
    from dispatchers.store.callback_registry import register

    names = sorted(make_dispatcher(factory).callbacks)
    with deciding(database, schema, prefix) as (connection, tables):
        register(connection, tables, names)
    answer(
        {"callbacks": names}, f"{len(names)} on record: {', '.join(map(clean, names))}" if names else "there are none"
    )


@callbacks.command()
@click.argument("name")
@options.database_options
def forget(name: str, database: str, schema: str | None, prefix: str) -> None:
    """Take one off the record that was removed from the code for good.

    NAME is as `outbox callbacks list` shows it: 'on_settled bank.charge'. What waits for it settles without it.
    """
    from dispatchers.store.callback_registry import forget as take_off
    from dispatchers.store.callback_registry import read
    from dispatchers.suggestions import did_you_mean

    with deciding(database, schema, prefix) as (connection, tables):
        waited = take_off(connection, tables, name)
        on_record = read(connection, tables)
    if waited is None:
        without_kind = next((each for each in sorted(on_record) if each.endswith(f" {name}")), None)
        meant = did_you_mean(name, sorted(on_record), without_kind)
        raise NothingFound(
            f"no callback {clean(name)!r} is on record: `outbox callbacks list` shows them{clean(meant)}"
        )
    answer(
        {"callback": name, "waited": waited},
        f"{clean(name)} is forgotten; {waited} entries waited for it, and settle without it",
    )


def _drawn(found: "list[CallbackOnRecord]") -> "Iterator[RenderableType]":
    drawn = table("CALLBACK", "WAITING", "SINCE", "LAST START", right=["WAITING"])
    for each in found:
        drawn.add_row(clean(each.name), str(each.waiting), instant(each.recorded_at), instant(each.started_at))
    yield drawn
