"""`outbox audit`: the decisions of operators, the newest first."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from dispatchers.admin.read.plain_values import instant
from dispatchers.cli import options
from dispatchers.cli.connections import reading
from dispatchers.cli.output import answer, cell, is_screen, one_of_several, prose, table
from dispatchers.cli.over_databases import over_databases

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dispatchers.admin.decide.audit import AuditPage

ROWS_DEFAULT = 50
MAX_ROWS = 1000


@click.command()
@click.option("--actor", help="Only decisions of this operator.")
@click.option("--action", help="Only this action: retry, cancel, pause, reveal_payload, ...")
@click.option("--target", "about", help="Only decisions about this entry's whole id, destination or ordering key.")
@click.option("--since", type=options.Since(), help="Only decisions since then: 15m, 2h, 7d or an instant.")
@click.option(
    "--limit",
    type=click.IntRange(1, MAX_ROWS),
    default=ROWS_DEFAULT,
    show_default=True,
    help="Maximum number of decisions.",
)
@click.option("--after", type=options.Cursor(int), help="Cursor that the previous page printed.")
@over_databases
def audit(
    actor: str | None,
    action: str | None,
    about: str | None,
    since: Any,
    limit: int,
    after: Any,
    target: options.Target,
) -> None:
    """List the decisions of operators, the newest first.

    Each has the time, the operator, the action, its target, how many it changed, and the reason.
    """
    from dispatchers.admin.decide.audit import AuditFilter, read_audit

    if after is not None and one_of_several():
        raise click.UsageError("--after continues the list of one database: give --database")
    wanted = AuditFilter(actor=actor, action=action, target=about, since=since)
    with reading(target) as (connection, tables):
        page = read_audit(connection, tables, wanted, max_rows=limit, after=after)
    answer({"at": page.at, "decisions": page.rows, "next": page.next}, lambda: _drawn(page))


def _drawn(page: "AuditPage") -> "Iterator[RenderableType]":
    if not page.rows:
        yield prose("none")
        return
    drawn = table("AT", "BY", "ACTION", "COUNT", "TARGET", "REASON", elastic=["TARGET", "REASON"], right=["COUNT"])
    for row in page.rows:
        texts = (instant(row.at), row.actor, row.action, row.count, row.target, row.reason or "")
        drawn.add_row(*map(cell, texts))
    yield drawn
    if page.next and is_screen():
        yield prose("next page: repeat the command with", "dim")
        yield prose(f"--after {page.next}", "dim")  # on its own line, so that it can be copied
