"""`outbox lookup` and `resend`: decisions about an uncertain entry that are refused unless they are safe now."""

from typing import TYPE_CHECKING

import click

from dispatchers.cli import options
from dispatchers.cli.connections import deciding
from dispatchers.cli.named_entries import find
from dispatchers.cli.output import answer
from dispatchers.cli.over_databases import decision_options

if TYPE_CHECKING:
    from typing import Literal


@click.command()
@click.argument("id")
@decision_options()
def lookup(id: str, actor: str, reason: str, target: options.Target) -> None:
    """Look an uncertain entry up at the service again.

    A running dispatcher makes the lookup at once. It sends the entry again only if the service proves that it did not happen.
    """
    from dispatchers.admin.decide import uncertain as uncertain_decisions

    with deciding(target) as (connection, tables):
        entry_id = find(connection, tables, id)
        uncertain_decisions.look_up(connection, tables, entry_id, actor=actor, reason=reason)
    text = f"entry {entry_id}: a running dispatcher will look it up at the service now"
    answer({"id": entry_id, "decision": "lookup", "actor": actor}, text)


@click.command()
@click.argument("id")
@click.option(
    "--key",
    required=True,
    type=click.Choice(["same", "new"]),
    help="The same key while the service remembers it; a new key after that.",
)
@decision_options()
def resend(id: str, key: 'Literal["same", "new"]', actor: str, reason: str, target: options.Target) -> None:
    """Send an uncertain entry again, if that is safe now.

    The command is refused if the live dispatchers' settings show that this key is not safe, or if no dispatcher is live. If it is
    no longer safe when a dispatcher claims the entry, the entry stays uncertain. `outbox resolve --send-again` leaves the
    choice of the key to the dispatcher.
    """
    from dispatchers.admin.decide import uncertain as uncertain_decisions

    with deciding(target) as (connection, tables):
        entry_id = find(connection, tables, id)
        uncertain_decisions.send_again(connection, tables, entry_id, key, actor=actor, reason=reason)
    which = "the same key" if key == "same" else "a new key"
    text = (
        f"entry {entry_id}: a running dispatcher will send it under {which}, when no earlier send is in flight any more"
    )
    answer({"id": entry_id, "decision": "resend", "key": key, "actor": actor}, text)
