"""Reads beside the claims: destinations and their oldest entries, accepted requests, uncertain entries."""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import CTE, Column, ColumnElement, Connection, ScalarSelect, func, or_, select, tuple_, update

from dispatchers.stored_outcome import KEY_CONFLICT, LookupState, MalformedOutcome, read_outcome, write_outcome
from outbox.requests.accepted import is_waiting
from outbox.sql.dialect import database_now, read_by_index
from outbox.sql.identifiers import quoted_table
from outbox.sql.schema import Tables, is_open
from outbox.times import NEVER

# --- what this role may read


def unreadable(connection: Connection, columns: Sequence[Column[Any]]) -> frozenset[Column[Any]]:
    """Those of the columns that this role may not read: the dashboard's may not read what services answered, and more."""
    if connection.dialect.name != "postgresql":
        return frozenset()
    may_read = (func.has_column_privilege(quoted_table(column.table), column.name, "SELECT") for column in columns)
    readable = connection.execute(select(*may_read)).one()
    return frozenset(column for column, may in zip(columns, readable, strict=True) if not may)


# --- destinations


def destination_names(tables: Tables) -> CTE:
    """A query of one column, `name`, whose last row is NULL: a skip scan, one probe of the queue's index for each name,
    however many rows each has.
    """
    queue = tables.queue.alias()
    names = select(func.min(queue.c.destination).label("name")).cte("names", recursive=True)
    following = select(func.min(queue.c.destination)).where(queue.c.destination > names.c.name).scalar_subquery()
    return names.union_all(select(following).where(names.c.name.is_not(None)))


# --- how long entries have been due

DUE_ROWS_MAX = 100  # of each destination's first entries: after a released one there may be an older one
RELEASED_WITHIN = timedelta(seconds=5)  # what no dispatcher serves is due again within


def read_lags(connection: Connection, tables: Tables, now: datetime) -> dict[str, timedelta]:
    """How long the oldest due entry of each destination has waited; not of those where nothing waits.

    What a dispatcher released, because it does not serve it, counts as waiting. One probe of the index for
    each destination.
    """
    read_by_index(connection)
    names = destination_names(tables)
    rows = connection.execute(select(names.c.name, _oldest_due(tables, names, now)).where(names.c.name.is_not(None)))
    return {name: now - since for name, since in rows if since is not None and since <= now}


def _oldest_due(tables: Tables, names: CTE, now: datetime) -> ScalarSelect[Any]:
    queue = tables.queue
    first = (
        select(func.coalesce(queue.c.waiting_since, queue.c.due_at).label("since"))
        .where(queue.c.destination == names.c.name, queue.c.due_at <= now + RELEASED_WITHIN, is_claimable(tables, now))
        .order_by(queue.c.due_at)
        .limit(DUE_ROWS_MAX)
        .correlate(names)
        .subquery()
    )
    return select(func.min(first.c.since)).scalar_subquery()


def is_claimable(tables: Tables, now: datetime) -> ColumnElement[bool]:
    """That no dispatcher holds a lease on the entry."""
    return or_(tables.queue.c.lease_until.is_(None), tables.queue.c.lease_until < now)


# --- accepted requests


ACCEPTED_MAX = 500  # read in one statement: about 3 ms


class Accepted(NamedTuple):
    """An accepted request. waits: whether an entry of it has not ended."""

    created_at: datetime
    id: UUID
    completion: str
    waits: bool


def next_accepted(connection: Connection, tables: Tables, after: Accepted | None) -> list[Accepted]:
    """The next `ACCEPTED_MAX` accepted requests, oldest first, from the first one or after `after`."""
    record = tables.record
    page = select(record.c.created_at, record.c.id, record.c.completion).where(is_open(record, "accepted"))
    if after is not None:
        behind = tuple_(record.c.created_at, record.c.id) > (after.created_at, after.id)
        page = page.where(behind)
    rows = page.order_by(record.c.created_at, record.c.id).limit(ACCEPTED_MAX).subquery()
    found = select(*rows.c, is_waiting(tables, rows.c.id)).order_by(rows.c.created_at, rows.c.id)
    return [Accepted._make(row) for row in connection.execute(found)]


# --- uncertain entries that were never looked up


ROWS_MAX = 200  # at a time, once a minute: a service must not be flooded with lookups of old entries
PAGE_MAX = 10_000  # of the queue are read for them at a time: most of a long queue is not uncertain

Wanted = Callable[[str, str | None], bool]
"""Whether an entry of this operation, which was sent in this form, needs a lookup."""


def request_lookups(
    connection: Connection, tables: Tables, wanted: Wanted, fencing_delay: timedelta, after: UUID | None
) -> UUID | None:
    """Request lookups for a page of them, due when no sender can be running any more; returns where the next page begins. Skipped
    are entries that are suspended, decided by an operator or looked up before, and keys that the service has for another request,
    whose effect a lookup would mistake for this one's.
    """
    read_by_index(connection)
    queue, entry = tables.queue, tables.entry
    end = _page_end(connection, tables, after)
    operation = (
        select(entry.c.operation).where(entry.c.id == queue.c.id).scalar_subquery()
    )  # a join might read all of them
    never_looked_up = (
        select(queue.c.id, queue.c.outcome, queue.c.deliveries, queue.c.sent_as, operation.label("operation"))
        .where(queue.c.due_at == NEVER, queue.c.state == "uncertain", queue.c.suspended_reason.is_(None))
        .order_by(queue.c.id)
        .limit(ROWS_MAX)
        .with_for_update(of=queue, skip_locked=True)
    )
    if after is not None:
        never_looked_up = never_looked_up.where(queue.c.id > after)
    if end is not None:
        never_looked_up = never_looked_up.where(queue.c.id <= end)
    rows = connection.execute(never_looked_up).all()
    now = database_now(connection)
    for row in rows:
        try:
            outcome = read_outcome(row.outcome)
        except MalformedOutcome:  # `outbox verify` reports it
            continue
        why = outcome.reason or "uncertain"
        is_left_alone = outcome.lookup or outcome.known or why.startswith(KEY_CONFLICT)
        if row.operation is not None and not is_left_alone and wanted(row.operation, row.sent_as):
            lookup = LookupState(why, 1, now + fencing_delay, row.deliveries, outcome.stored)
            values = {"outcome": write_outcome(why, lookup=lookup), "due_at": now + fencing_delay}
            connection.execute(update(queue).where(queue.c.id == row.id).values(values))  # locked by now
    return rows[-1].id if len(rows) == ROWS_MAX else end


def _page_end(connection: Connection, tables: Tables, after: UUID | None) -> UUID | None:
    """The last id of a page of the queue; None at its end."""
    id = tables.queue.c.id
    page = select(id).order_by(id).offset(PAGE_MAX - 1).limit(1)
    if after is not None:
        page = page.where(id > after)
    end: UUID | None = connection.execute(page).scalar_one_or_none()
    return end
