"""`outbox verify`: check the stored history against the invariants."""

import os
from functools import partial
from typing import TYPE_CHECKING

import click

from dispatchers.cli import options
from dispatchers.cli.connections import reading
from dispatchers.cli.exit_codes import VIOLATED
from dispatchers.cli.keys import ring_of
from dispatchers.cli.output import answer, cell, prose, table
from dispatchers.cli.over_databases import over_databases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from dispatchers.admin.check.verify import Verification


@click.command()
@partial(over_databases, is_long=True)
def verify(target: options.Target) -> None:
    """Check the stored history against the invariants.

    Checks every stored row. For example: no entry is lost, no entry has ended twice, and no two entries share a key. If
    OUTBOX_SECRET is set, also derives each key again and compares it. Only reads, in one snapshot of the database. If a row
    violates a rule, other software has changed the row, or this library has a bug. The command then exits with status 6.
    """
    from dispatchers.admin.check import verify as admin_verify

    secret = os.environ.get("OUTBOX_SECRET")
    keyring = ring_of(secret) if secret else None
    with reading(target) as (connection, tables):
        found = admin_verify.verify(connection, tables, keyring)
    counts = {"entries": found.entries, "without_secret": found.without_secret}
    answer({"is_clean": found.is_clean, **counts, "verdicts": found.verdicts}, lambda: _drawn(found))
    if not found.is_clean:
        click.get_current_context().exit(VIOLATED)


def _drawn(found: "Verification") -> "Iterator[RenderableType]":
    drawn = table("RULE", "INVARIANT", "RESULT", elastic=["INVARIANT"])
    for verdict in found.verdicts:
        many = f"{len(verdict.violations)}{'+' if verdict.has_more else ''}"
        result = cell(f"{many} violated", "bold red") if verdict.violations else cell("ok", "green")
        drawn.add_row(cell(verdict.rule), prose(verdict.invariant), result)
    yield drawn
    for verdict in found.verdicts:
        for violation in verdict.violations:
            yield prose(f"{verdict.rule}: {violation.text}", "red")
    if not found.is_clean:
        yield prose("To see the fields, the state and the history of an entry, run `outbox show ID`.")
    yield prose(f"{found.entries} entries" + _unchecked(found))


def _unchecked(found: "Verification") -> str:
    if not found.without_secret:
        return ""
    return f"; the keys of {found.without_secret} were not checked: their secrets are not in OUTBOX_SECRET"
