"""Reads the entries of a lease token, for a process that has not read the answer to its own claim."""

from collections.abc import Collection
from types import MappingProxyType
from uuid import UUID

from sqlalchemy import Connection, select

from dispatchers.stored_outcome import read_outcome
from dispatchers.transitions import ClaimedEntry
from outbox.sql.schema.tables import Tables


def read_leased(connection: Connection, tables: Tables, tokens: Collection[UUID]) -> list[ClaimedEntry]:
    """The entries under these tokens, as their claims left them; without what is sent, as nothing is sent. Reads the queue."""
    if not tokens:
        return []
    queue, entry = tables.queue, tables.entry
    columns = select(queue, entry.c.env, entry.c.operation, entry.c.created_at).join(entry, entry.c.id == queue.c.id)
    rows = connection.execute(columns.where(queue.c.state == "sending", queue.c.lease_token.in_(tokens)))
    blank = ClaimedEntry._make([None] * len(ClaimedEntry._fields))
    return [
        blank._replace(
            **{name: value for name, value in row._mapping.items() if name in ClaimedEntry._fields},
            queued_at=row.due_at,
            payload=b"",
            options=MappingProxyType({}),
            headers=MappingProxyType({}),
        )._replace(outcome=read_outcome(row.outcome))
        for row in rows
    ]
