"""The other queries of a dispatcher: destinations and their oldest entries, accepted requests, uncertain entries."""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import (
    CTE,
    BindParameter,
    Column,
    ColumnElement,
    Connection,
    ScalarSelect,
    Select,
    bindparam,
    func,
    literal,
    or_,
    select,
    true,
    tuple_,
    update,
)

from dispatchers.stored_outcome import KEY_CONFLICT, LookupState, MalformedOutcome, read_outcome, write_outcome
from outbox.requests.accepted import is_waiting
from outbox.sql.clock import clock, database_now
from outbox.sql.dialect import dialect_of
from outbox.sql.schema.tables import MAX_STATEMENTS, Tables, is_open
from outbox.sql.statements import read_by_index
from outbox.times import NEVER


def unreadable(connection: Connection, columns: Sequence[Column[Any]]) -> frozenset[Column[Any]]:
    """The columns that this role may not read. The dashboard's role may not read services' answers, for example."""
    return dialect_of(connection).unreadable(connection, columns)


# --- destinations


def destination_names(tables: Tables) -> CTE:
    """A query of the column `name`, whose last row is NULL. It is a skip scan: each name costs one probe of the queue's
    index, however many rows it has.
    """
    queue = tables.queue.alias()
    names = select(func.min(queue.c.destination).label("name")).cte("names", recursive=True)
    following = select(func.min(queue.c.destination)).where(queue.c.destination > names.c.name).scalar_subquery()
    return names.union_all(select(following).where(names.c.name.is_not(None)))


def ordering_keys(tables: Tables, after: str | BindParameter[str] | None, max_keys: int) -> CTE:
    """A query of the columns `key` and `number`: the next ordering keys with entries in the queue, numbered from 1. If there are
    fewer, its last row is NULL. It is a skip scan too.
    """
    queue = tables.queue.alias()
    first = select(func.min(queue.c.ordering_key).label("key"), literal(1).label("number"))
    first = first.where(queue.c.ordering_key.is_not(None) if after is None else queue.c.ordering_key > after)
    keys = first.cte("keys", recursive=True)
    following = select(func.min(queue.c.ordering_key)).where(queue.c.ordering_key > keys.c.key).scalar_subquery()
    return keys.union_all(select(following, keys.c.number + 1).where(keys.c.key.is_not(None), keys.c.number < max_keys))


def found_destinations(connection: Connection, tables: Tables) -> Sequence[str]:
    """The names of the destinations with unsettled entries, in their order."""
    name = destination_names(tables).c.name
    return connection.execute(select(name).where(name.is_not(None))).scalars().all()


Value = Callable[[Any, CTE], ScalarSelect[Any]]
"""A subquery for a name, which is a parameter, or the column of a CTE, whose rows it then refers to."""


def of_each_destination(connection: Connection, tables: Tables, value: Value) -> list[Any]:
    """Each destination's name, and the subquery's value for it."""
    names = destination_names(tables)
    return of_each(connection, names.c.name, names, value)


def of_each(
    connection: Connection, name: ColumnElement[Any], names: CTE, *values: Value, known: Sequence[str] | None = None
) -> list[Any]:
    """Each name of the CTE, and the subqueries' values for it.

    known: the names, if the CTE has them from the caller. One statement, but on MariaDB one for each name: there a subquery in
    FROM cannot refer to a row outside of it.
    """
    if dialect_of(connection).correlates_ctes:
        asked = select(name, *(value(name, names) for value in values)).where(name.is_not(None))
        return list(connection.execute(asked))
    if known is None:
        known = connection.execute(select(name).where(name.is_not(None))).scalars().all()
    given = bindparam("name", type_=name.type)
    asked = select(given, *(value(given, names) for value in values))
    return [connection.execute(asked, {"name": each}).one() for each in known]


Rows = Callable[[Any, CTE], Select[*tuple[Any, ...]]]
"""A query with a limit for a name, as of `Value`."""


def rows_of_each(connection: Connection, tables: Tables, found: Sequence[str], rows: Rows) -> list[tuple[Any, ...]]:
    """Each destination's name, with each row of its query.

    found: the names of all destinations. One statement, but on a database without LATERAL one for each of them.
    """
    names = destination_names(tables)
    name = names.c.name
    if dialect_of(connection).has_lateral:
        each: Any = rows(name, names).lateral("each")
        return [tuple(row) for row in connection.execute(select(name, *each.c).select_from(names.join(each, true())))]
    asked = rows(bindparam("name", type_=name.type), names)
    return [(one, *row) for one in found for row in connection.execute(asked, {"name": one})]


def known_destinations(connection: Connection, tables: Tables) -> list[str]:
    """The destinations that have due entries whose end is stored: an operator's decisions, and callbacks that are due."""
    return [name for name in connection.execute(_known_destinations(tables)).scalars() if name is not None]


@lru_cache(MAX_STATEMENTS)
def _known_destinations(tables: Tables) -> Select[str | None]:
    queue = tables.queue
    return select(queue.c.known).where(queue.c.known.is_not(None), queue.c.due_at <= clock()).distinct()


# --- how long entries have been due

MAX_DUE_ROWS = 100  # entries to read of each destination, because a release moves the due time of the oldest one
RELEASED_WITHIN = timedelta(minutes=1)
"""An entry that no dispatcher serves, or whose payload none can read, is due again after this time at most."""


def read_lags(connection: Connection, tables: Tables, now: datetime) -> dict[str, timedelta]:
    """How long the oldest due entry of each destination has waited. Destinations without waiting entries are left out.

    An entry that a dispatcher released, because it does not serve it, counts as waiting. Each destination costs one probe of
    the index.
    """
    read_by_index(connection)
    rows = of_each_destination(connection, tables, lambda name, names: _oldest_due(tables, name, names, now))
    return {name: now - since for name, since in rows if since is not None and since <= now}


def _oldest_due(tables: Tables, name: Any, names: CTE, now: datetime) -> ScalarSelect[Any]:
    queue = tables.queue
    first = (
        select(func.coalesce(queue.c.waiting_since, queue.c.due_at).label("since"))
        .where(queue.c.destination == name, queue.c.due_at <= now + RELEASED_WITHIN, is_claimable(tables, now))
        .order_by(queue.c.due_at)
        .limit(MAX_DUE_ROWS)
        .correlate(names)
        .subquery()
    )
    return select(func.min(first.c.since)).scalar_subquery()


def is_claimable(tables: Tables, now: datetime) -> ColumnElement[bool]:
    """The condition that no dispatcher holds a lease on the entry."""
    return or_(tables.queue.c.lease_until.is_(None), tables.queue.c.lease_until < now)


# --- accepted requests


MAX_ACCEPTED = 500  # read in one statement: about 3 ms


class Accepted(NamedTuple):
    """An accepted request. waits: whether one of its entries has not ended."""

    created_at: datetime
    id: UUID
    completion: str
    waits: bool


def next_accepted(connection: Connection, tables: Tables, after: Accepted | None) -> list[Accepted]:
    """At most `MAX_ACCEPTED` accepted requests, oldest first. after: the last one of the page before."""
    record = tables.record
    page = select(record.c.created_at, record.c.id, record.c.completion).where(is_open(record, "accepted"))
    if after is not None:
        behind = tuple_(record.c.created_at, record.c.id) > (after.created_at, after.id)
        page = page.where(behind)
    rows = page.order_by(record.c.created_at, record.c.id).limit(MAX_ACCEPTED).subquery()
    found = select(*rows.c, is_waiting(tables, rows.c.id)).order_by(rows.c.created_at, rows.c.id)
    return [Accepted._make(row) for row in connection.execute(found)]


# --- uncertain entries that were never looked up


MAX_ROWS = 200  # entries a minute: lookups of many old entries must not flood a service
MAX_PAGE = 10_000  # queue rows to read in one search: most entries of a long queue are not uncertain

Wanted = Callable[[str, str | None], bool]
"""Whether an entry of this operation, which was sent in this form, needs a lookup."""


def request_lookups(
    connection: Connection, tables: Tables, wanted: Wanted, fencing_delay: timedelta, after: UUID | None
) -> UUID | None:
    """Request lookups for a page of entries; returns where the next page begins, None after the last page.

    A lookup is due when no sender of the entry can be running any more. Entries are skipped that are suspended, decided by an
    operator, or looked up before. Key conflicts are skipped too: a lookup would take another request's effect for this one's.
    """
    read_by_index(connection)
    queue, entry = tables.queue, tables.entry
    end = _page_end(connection, tables, after)
    # Not a join: with wrong statistics, the planner would read all entries for it.
    operation = select(entry.c.operation).where(entry.c.id == queue.c.id).scalar_subquery()
    never_looked_up = (
        select(queue.c.id, queue.c.outcome, queue.c.deliveries, queue.c.sent_as, operation.label("operation"))
        .where(queue.c.due_at == NEVER, queue.c.state == "uncertain", queue.c.suspended_reason.is_(None))
        .order_by(queue.c.id)
        .limit(MAX_ROWS)
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
            connection.execute(
                update(queue).where(queue.c.id == row.id).values(values)
            )  # the SELECT has locked the row
    return rows[-1].id if len(rows) == MAX_ROWS else end


def _page_end(connection: Connection, tables: Tables, after: UUID | None) -> UUID | None:
    """The last id of a full page of the queue; None if less than a page is left."""
    id = tables.queue.c.id
    page = select(id).order_by(id).offset(MAX_PAGE - 1).limit(1)
    if after is not None:
        page = page.where(id > after)
    end: UUID | None = connection.execute(page).scalar_one_or_none()
    return end
