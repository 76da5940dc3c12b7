"""The accepted requests, in order of age, and whether each still waits for an entry."""

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection, select, tuple_

from outbox.requests.accepted import is_waiting
from outbox.sql.schema import Tables, is_open

ACCEPTED_MAX = 500  # looked at in one statement: some 3 ms


class Accepted(NamedTuple):
    """An accepted request. waits: whether an entry of it has not ended."""

    created_at: datetime
    id: UUID
    completion: str
    waits: bool


def next_accepted(connection: Connection, tables: Tables, after: Accepted | None) -> list[Accepted]:
    """The next `ACCEPTED_MAX` accepted requests, oldest first, from the first one or from behind `after`."""
    record = tables.record
    page = select(record.c.created_at, record.c.id, record.c.completion).where(is_open(record, "accepted"))
    if after is not None:
        behind = tuple_(record.c.created_at, record.c.id) > (after.created_at, after.id)
        page = page.where(behind)
    rows = page.order_by(record.c.created_at, record.c.id).limit(ACCEPTED_MAX).subquery()
    found = select(*rows.c, is_waiting(tables, rows.c.id)).order_by(rows.c.created_at, rows.c.id)
    return [Accepted._make(row) for row in connection.execute(found)]
