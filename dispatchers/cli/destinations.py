"""`outbox destinations` and `pause`: what weighs on each destination, and to have nothing more sent to one."""

import click

from dispatchers.cli import options, rendering
from dispatchers.cli.connections import deciding, reading
from dispatchers.cli.decisions import decision_options
from dispatchers.cli.output import answer, clean


@click.command()
@options.database_options
def destinations(database: str, schema: str | None, prefix: str) -> None:
    """How each destination is, and what weighs on it.

    What is due, and whether it is paused, cools, or its circuit breaker is open.
    """
    from dispatchers.admin.destinations import read_destinations

    with reading(database, schema, prefix) as (connection, tables):
        found = read_destinations(connection, tables)
    answer(found, lambda: rendering.destinations(found))


@click.command()
@click.argument("destination")
@decision_options()
def pause(destination: str, actor: str, reason: str | None, database: str, schema: str | None, prefix: str) -> None:
    """Send nothing more to a destination.

    Until it is resumed. Every running dispatcher obeys at its next claim; what is being sent comes to its end. What waits does
    not age meanwhile.
    """
    from dispatchers.admin import decisions

    with deciding(database, schema, prefix) as (connection, tables):
        waits = decisions.pause(connection, tables, destination, actor=actor, reason=reason)
    told = "" if waits else "; nothing waits for it now: is that its name?"
    answer(
        {"destination": destination, "decision": "pause", "actor": actor, "waits": waits},
        f"{clean(destination)} is paused{told}",
    )
