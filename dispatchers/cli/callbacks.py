"""`outbox callbacks`: list, record and forget the callbacks that settlements must run."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from dispatchers.admin.read.plain_values import instant
from dispatchers.cli import options
from dispatchers.cli.connections import deciding, reading
from dispatchers.cli.exit_codes import NothingFound
from dispatchers.cli.output import answer, clean, table
from dispatchers.cli.over_databases import over_databases

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dispatchers.store.app_code.callback_registry import CallbackOnRecord


@click.group()
def callbacks() -> None:
    """Manage the recorded callbacks.

    A dispatcher records its callbacks when it starts. From then on an entry is settled only together with its callback. A
    dispatcher without this callback, for example one of an older release, leaves the settlement to a dispatcher that has it.
    """


@callbacks.command("list")
@over_databases
def list_callbacks(target: options.Target) -> None:
    """List the recorded callbacks and the entries waiting for each."""
    from dispatchers.store.app_code.callback_registry import list_all

    with reading(target) as (connection, tables):
        found = list_all(connection, tables)
    answer({"callbacks": found}, lambda: _drawn(found))


def _named_once(command: Callable[..., Any]) -> Callable[..., Any]:
    """Call the app's function once, however many databases there are."""

    @wraps(command)
    def with_names(factory: str, **rest: Any) -> None:
        from dispatchers.cli.run import callbacks_of

        command(names=callbacks_of(factory), **rest)

    return with_names


@callbacks.command()
@click.argument("factory", metavar="MODULE:FUNCTION")
@_named_once
@over_databases
def record(names: list[str], target: options.Target) -> None:
    """Record the callbacks of the dispatcher that MODULE:FUNCTION makes.

    The function may also make a fleet. Run this command before a deploy, after `outbox db upgrade`. Then you can deploy app
    and dispatcher in any order: no running dispatcher settles an entry of the new app without its callback.
    """
    from dispatchers.store.app_code.callback_registry import register

    with deciding(target) as (connection, tables):
        register(connection, tables, names)
    answer(
        {"callbacks": names},
        f"{len(names)} recorded: {', '.join(map(clean, names))}" if names else "there are none",
    )


@callbacks.command()
@click.argument("name")
@over_databases
def forget(name: str, target: options.Target) -> None:
    """Forget a callback that was removed from the code.

    NAME is its name in `outbox callbacks list`: 'on_settled bank.charge'. Entries waiting for it settle without it.
    """
    from dispatchers.names import did_you_mean
    from dispatchers.store.app_code.callback_registry import forget as take_off
    from dispatchers.store.app_code.callback_registry import read

    with deciding(target) as (connection, tables):
        waited = take_off(connection, tables, name)
        on_record = read(connection, tables)
    if waited is None:
        without_kind = next((each for each in sorted(on_record) if each.endswith(f" {name}")), None)
        meant = did_you_mean(name, sorted(on_record), without_kind)
        raise NothingFound(f"no callback {clean(name)!r} is recorded: `outbox callbacks list` shows them{clean(meant)}")
    answer(
        {"callback": name, "waited": waited},
        f"{clean(name)} forgotten; {waited} entries waited for it and will settle without it",
    )


def _drawn(found: "list[CallbackOnRecord]") -> "Iterator[RenderableType]":
    drawn = table("CALLBACK", "WAITING", "SINCE", "LAST START", right=["WAITING"])
    for each in found:
        drawn.add_row(clean(each.name), str(each.waiting), instant(each.recorded_at), instant(each.started_at))
    yield drawn
