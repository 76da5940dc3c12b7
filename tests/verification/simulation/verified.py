"""`outbox verify` at the end of a run: the tables of the reference store, in a database in memory, must break no rule."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import sqlalchemy as sa

from dispatchers.admin.check.verify import verify
from outbox.keys import parent_id
from simulation.app import OUTBOX
from simulation.database import ENV, parent_of
from simulation.reference_history import is_suspended
from simulation.reference_rows import Entry, Tables

TABLES = OUTBOX.configuration.tables
NOT_SIMULATED = {"derived key"}  # the ids of a run are drawn


@cache
def _engine() -> sa.Engine:
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    TABLES.metadata.create_all(engine)
    return engine


def violations(tables: Tables) -> list[str]:
    """What `outbox verify` finds in these tables."""
    with _engine().connect() as connection, connection.begin() as transaction:
        for table, rows in _rows(tables):
            if rows:
                connection.execute(table.insert(), rows)
        found = verify(connection, TABLES)
        transaction.rollback()
    return [
        violation.text
        for verdict in found.verdicts
        if verdict.rule not in NOT_SIMULATED
        for violation in verdict.violations
    ]


def _rows(tables: Tables) -> Iterator[tuple[sa.Table, list[dict[str, Any]]]]:
    now, meta = tables.clock(), tables.meta
    resumed_at = meta.identity.resumed_at if meta.identity else None
    suspended = meta.suspended or ("another timeline" if is_suspended(tables) else None)
    yield TABLES.meta, [{"id": 1, "suspended_reason": suspended, "resumed_at": resumed_at}]
    yield TABLES.entry, [_as_row(TABLES.entry, entry, **_of_key(entry)) for entry in tables.entries.values()]
    yield (
        TABLES.queue,
        [
            _as_row(TABLES.queue, row, id=id, destination=tables.entries[id].destination)
            for id, row in tables.queue.items()
        ],
    )
    yield (
        TABLES.settlement,
        [_as_row(TABLES.settlement, row, id=id, settled_at=now, result=None) for id, row in tables.settlements.items()],
    )
    yield TABLES.event, [_as_row(TABLES.event, event, at=now) for event in tables.events]
    yield (
        TABLES.blocked_group,
        [
            _as_row(TABLES.blocked_group, block, ordering_key=key, since=now)
            for key, block in tables.blocked_group.items()
        ],
    )


def _as_row(table: sa.Table, kept: Any, **given: Any) -> dict[str, Any]:
    """The columns that the reference store keeps, and the given ones."""
    return {column.name: getattr(kept, column.name) for column in table.columns if hasattr(kept, column.name)} | given


def _of_key(entry: Entry) -> dict[str, Any]:
    return {"discriminator": "", "parent_id": parent_id(ENV, parent_of(entry)), "due_at": entry.created_at}
