"""Reads requests for operators: lists of the records, and one record with the entries that it caused.

A request that is refused because its key belongs to another request (a mismatch) has no record: it is counted at the record of
the other one (`outbox.sessions.mismatches`).
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Column, ColumnElement, Connection, Row, Select, and_, func, select, true

from dispatchers.admin.read.entries import EntrySummary, read_entries_where
from dispatchers.admin.read.keyset import following
from dispatchers.admin.read.plain_values import Place
from dispatchers.errors import EntryNotFound
from outbox.errors import InvalidValue
from outbox.sql.clock import database_now
from outbox.sql.schema.parent_index import is_under
from outbox.sql.schema.tables import Tables, is_open
from outbox.sql.statements import read_by_index

OPEN_STATES = ("accepted", "leased")
MISMATCHED: Final = "mismatched"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """Which requests. state: one of OPEN_STATES, or MISMATCHED for those with whose key another request came, in any state; None
    for those that are answered. status: the HTTP status of the answer."""

    state: str | None = None
    key: str | None = None
    env: str | None = None
    scope: str | None = None
    source: str | None = None
    status: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSummary:
    """The record of one request, without its answer.

    key: the caller's key, for example an Idempotency-Key. status: that of the answer. completion: the operation that answers an
    accepted request. lease_until: of a claim under a lease. keep_until: when maintenance may delete the record.
    mismatches: how many other requests came with its key, and were refused. mismatched_at: when the last of them came. A process
    that crashes loses the counts of its last second.
    """

    id: UUID
    env: str
    scope: str
    source: str
    key: str
    state: str
    status: int | None
    completion: str | None
    lease_until: datetime | None
    created_at: datetime
    answered_at: datetime | None
    replay_until: datetime
    keep_until: datetime
    mismatches: int
    mismatched_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPage:
    """Requests of a list, and where the next page begins; None at the end. A page may be short, and not the last.

    A list is ordered by when a request began, when its last mismatch came, or until when its record is kept.
    """

    at: datetime
    requests: list[RequestSummary]
    next: Place[UUID] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDetails:
    """One request: its record and its entries, oldest first.

    record: None if it was deleted, and only its tombstone is kept, until `forget_at`, so that no request can use the key again.
    """

    at: datetime
    id: UUID
    record: RequestSummary | None
    forget_at: datetime | None
    entries: list[EntrySummary]


_COLUMNS = (
    *("id", "env", "scope", "source", "state", "status", "completion", "lease_until", "created_at", "answered_at"),
    *("replay_until", "keep_until"),
)


def list_requests(
    connection: Connection,
    tables: Tables,
    wanted: RequestFilter,
    *,
    max_requests: int,
    after: Place[UUID] | None = None,
    max_rows: int,
) -> RequestPage:
    """A page of open requests, the oldest first; of answered ones, those that are kept longest first; or of mismatched ones, the
    latest first.

    max_rows: so many records are compared with the filter at most: the page may then be short, or empty, and not the last.
    Raises `InvalidValue` for a state that has no list.
    """
    states = [*OPEN_STATES, MISMATCHED]
    if wanted.state is not None and wanted.state not in states:
        raise InvalidValue("state", wanted.state, f"must be one of {states}, or None for answered requests")
    read_by_index(connection)
    compared = _compared(wanted)
    limit = max_rows if compared else max_requests + 1
    # With the columns that are compared: a list of records reads each row once, and not again by its id.
    of_list = () if wanted.state == MISMATCHED else compared
    rows = scanned(tables, wanted.state, *(tables.record.c[name] for name in of_list), after=after, limit=limit)
    part = rows.subquery("scanned")
    row = part if of_list else tables.record
    conditions = [row.c[name] == value for name, value in compared.items()]
    found: Any = (
        _summaries(tables).add_columns(part.c.at).join(part, part.c.id == tables.record.c.id).where(*conditions)
    )
    order = (part.c.at, part.c.id) if wanted.state in OPEN_STATES else (part.c.at.desc(), part.c.id.desc())
    page = connection.execute(found.order_by(*order).limit(max_requests + 1)).all()
    if len(page) > max_requests:
        last: Any = page[max_requests - 1]
    else:
        last = connection.execute(rows.offset(max_rows - 1).limit(1)).one_or_none() if compared else None
    return RequestPage(
        at=database_now(connection),
        requests=[summary(row) for row in page[:max_requests]],
        next=None if last is None else Place(last.at, last.id),
    )


def scanned(
    tables: Tables, state: str | None, *columns: Column[Any], after: Place[UUID] | None, limit: int
) -> Select[*tuple[Any, ...]]:
    """The first records of a list, by its index: `at`, `id` and these columns of the list's table."""
    record, mismatch = tables.record, tables.mismatch
    if state in OPEN_STATES:
        at = record.c.created_at
        rows = select(at.label("at"), record.c.id, *columns)
        rows = rows.where(is_open(record, state), *following(after, at, record.c.id))
        return rows.order_by(at, record.c.id).limit(limit)
    at, id = (mismatch.c.last_at, mismatch.c.id) if state == MISMATCHED else (record.c.keep_until, record.c.id)
    rows = select(at.label("at"), id, *columns)
    rows = rows.where(true() if state == MISMATCHED else record.c.answered_at.is_not(None))
    rows = rows.where(*following(after, at, id, is_descending=True, has_ids_descending=True))
    return rows.order_by(at.desc(), id.desc()).limit(limit)


def _compared(wanted: RequestFilter) -> dict[str, Any]:
    """The columns of a record that are compared, with their values."""
    given = {
        "parent": wanted.key,
        "env": wanted.env,
        "scope": wanted.scope,
        "source": wanted.source,
        "status": wanted.status,
    }
    return {name: value for name, value in given.items() if value is not None}


def _summaries(tables: Tables) -> Select[Any]:
    record, mismatch = tables.record, tables.mismatch
    counts = func.coalesce(mismatch.c.requests, 0).label("mismatches"), mismatch.c.last_at.label("mismatched_at")
    selected = select(record.c.parent.label("key"), *(record.c[name] for name in _COLUMNS), *counts)
    return selected.select_from(record.outerjoin(mismatch, mismatch.c.id == record.c.id))


def summary(row: Row[Any]) -> RequestSummary:
    return RequestSummary(**{name: getattr(row, name) for name in ("key", *_COLUMNS, "mismatches", "mismatched_at")})


def read_records(connection: Connection, tables: Tables, condition: ColumnElement[bool]) -> list[RequestSummary]:
    """The records that meet the condition, oldest first."""
    found: Any = _summaries(tables).where(condition).order_by(tables.record.c.created_at, tables.record.c.id)
    return [summary(row) for row in connection.execute(found)]


def read_request(connection: Connection, tables: Tables, id: UUID) -> RequestDetails:
    """Raises EntryNotFound."""
    entry, tombstone = tables.entry, tables.tombstone
    records = read_records(connection, tables, tables.record.c.id == id)
    forget = select(tombstone.c.forget_at).where(tombstone.c.id == id)
    forget_at = None if records else connection.execute(forget).scalar_one_or_none()
    own = read_entries_where(connection, tables, is_under(entry, id))
    if not records and forget_at is None and not own:
        raise EntryNotFound(f"request {id} does not exist: it was never made here, or its record was deleted")
    elsewhere = and_(entry.c.record_id == id, entry.c.record_id != entry.c.parent_id)
    entries = [*own, *read_entries_where(connection, tables, elsewhere)]
    return RequestDetails(
        at=database_now(connection),
        id=id,
        record=records[0] if records else None,
        forget_at=forget_at,
        entries=sorted(entries, key=lambda each: (each.created_at, each.id)),
    )
