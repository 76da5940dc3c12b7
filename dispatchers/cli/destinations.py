"""`outbox destinations` and `pause`: show each destination's throttling, and pause one."""

import click

from dispatchers.cli import options, rendering
from dispatchers.cli.connections import deciding, reading
from dispatchers.cli.output import answer, clean
from dispatchers.cli.over_databases import decision_options, over_databases


@click.command()
@options.all_option
@over_databases
def destinations(is_whole: bool, target: options.Target) -> None:
    """Show each destination's backlog and throttling.

    Shows the number of due entries, and any pause, Retry-After cooldown, rate limit, concurrency permits in use or open
    circuit breaker. Of more than 30 destinations it shows those that need attention most.
    """
    from dispatchers.admin.read.destinations import read_destinations

    with reading(target) as (connection, tables):
        found = read_destinations(connection, tables)
    answer(found, lambda: rendering.destinations(found, is_whole=is_whole))


@click.command()
@click.argument("destination")
@decision_options(over_databases)
def pause(destination: str, actor: str, reason: str, target: options.Target) -> None:
    """Stop sending to a destination.

    The destination stays paused until `outbox resume`. Every running dispatcher stops at its next claim, and finishes its
    sends in flight. The age of waiting entries does not grow during the pause.
    """
    from dispatchers.admin.decide import decisions

    with deciding(target) as (connection, tables):
        is_known = decisions.pause(connection, tables, destination, actor=actor, reason=reason)
    addition = "" if is_known else "; no entry waits for it and no running dispatcher serves it: check its name"
    answer(
        {"destination": destination, "decision": "pause", "actor": actor, "is_known": is_known},
        f"destination {clean(destination)} paused{addition}",
    )
