"""What operators can read about entries: lists of entries, and everything that is known about one. `overview` has the state of
the whole outbox.

Every function takes a Connection and reads in its current transaction. Only `read_payload` reads a payload.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, case, func, null, or_, select, true

from dispatchers.store.queries import destination_names, unreadable
from dispatchers.stored_outcome import read_outcome
from dispatchers.time_limits import CENTURY
from outbox.errors import EntryNotFound
from outbox.keys import ParentKey, Tag, encode_native, parent_id
from outbox.sql.dialect import clock, database_now
from outbox.sql.ordering import is_blocked
from outbox.sql.parent_index import is_under
from outbox.sql.schema import Tables
from outbox.status import waiting_reason
from outbox.times import NEVER

WAITING_STATES = ("pending", "sending", "retry", "uncertain")
ENDED_STATES = ("delivered", "failed", "cancelled")
CANDIDATES_MAX = 10

Place: TypeAlias = tuple[datetime, UUID]
"""Where a page of a list ended: the last entry's due time, or when it ended, and its id."""


# --- lists


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrySummary:
    """One entry's present state.

    child_key: of epoch 0, in the native form; None for a role that may not read it.
    due_at: None where no time makes it due: ended, suspended, after another of its group, uncertain without a scheduled lookup,
        waiting for a process that has its callback.
    after: the entry that it waits for, or that blocks its group. reason: why it failed, waits or is uncertain, if it does.
    known: a decision, or an outcome whose callback failed, that a dispatcher has yet to settle.
        The dashboard's role reads neither this nor the reason of an entry that has not ended.
    """

    id: UUID
    state: str
    operation: str
    discriminator: str
    destination: str
    env: str
    scope: str
    source: str
    parent: str
    ordering_key: str | None
    child_key: str | None
    attempts: int
    due_at: datetime | None
    lease_until: datetime | None
    suspended_reason: str | None
    blocked_by: UUID | None
    known: str | None
    reason: str | None
    created_at: datetime
    settled_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Entries of a list, and where the next page begins; None at the end. at: the database's clock."""

    at: datetime
    since: datetime | None
    entries: list[EntrySummary]
    next: Place | None


@dataclass(frozen=True, slots=True)
class ParentWanted:
    """The key of a business request; None for any. env, scope, source: only those of it; None for all.

    With all four an index finds its entries.
    """

    key: str | None
    env: str | None = None
    scope: str | None = None
    source: str | None = None

    def conditions(self, tables: Tables) -> list[ColumnElement[bool]]:
        entry = tables.entry
        key, env, scope, source = self.key, self.env, self.scope, self.source
        if key is not None and env is not None and scope is not None and source is not None:
            return [is_under(entry, parent_id(env, ParentKey(key, scope=scope, source=source)))]
        given = {"parent": key, "env": env, "scope": scope, "source": source}
        return [entry.c[name] == value for name, value in given.items() if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which entries. Those that wait are listed by their due time, those that ended by when they did.

    states: all of WAITING_STATES or all of ENDED_STATES. operation: itself, or all below it: "stripe.refunds".
    since: only what was due, or ended, by then or later; a timedelta counts back from the database's clock.
    """

    states: Sequence[str] = WAITING_STATES
    operation: str | None = None
    destination: str | None = None
    parent: ParentWanted | None = None
    suspended: bool = False
    since: datetime | timedelta | None = None


def list_entries(
    connection: Connection, tables: Tables, wanted: Filter, *, entries_max: int, after: Place | None = None
) -> Page:
    """A page of waiting entries, the longest due first, or of ended entries, the newest first.

    On PostgreSQL a page of waiting entries reads a page of each destination's index, however long the queue is; those without a
    due time it reads all, where it comes to them. With a filter by state or operation it reads on until the page is full, in the
    worst case the whole queue.
    """
    now = database_now(connection)
    since = now - wanted.since if isinstance(wanted.since, timedelta) else wanted.since
    if set(wanted.states) <= set(ENDED_STATES):
        found = _ended(tables, wanted, since, after, entries_max + 1)
    else:
        found = _waiting(connection, tables, wanted, since, after, entries_max + 1)
    places = [(row.at, row.id) for row in connection.execute(found)]
    listed = [id for _, id in places[:entries_max]]
    entries = {entry.id: entry for entry in _summaries(connection, tables, tables.entry.c.id.in_(listed))}
    return Page(
        at=now,
        since=since,
        entries=[entries[id] for id in listed if id in entries],
        next=places[entries_max - 1] if len(places) > entries_max else None,
    )


def read_entries_of_parent(connection: Connection, tables: Tables, parent: ParentWanted) -> list[EntrySummary]:
    """Every entry under one parent, or under all that are like it, oldest first: what `outbox.status` returns to the app."""
    return _summaries(connection, tables, and_(*parent.conditions(tables)))


def _ended(
    tables: Tables, wanted: Filter, since: datetime | None, after: Place | None, limit: int
) -> Select[datetime, UUID]:
    settlement = tables.settlement
    at, id = settlement.c.settled_at, settlement.c.id
    found = select(at.label("at"), id).where(settlement.c.state.in_(wanted.states))
    found = _narrowed(found, tables, wanted, id, destination=wanted.destination)
    if since is not None:
        found = found.where(at >= since)
    if after is not None:
        found = found.where(at <= after[0], or_(at < after[0], id > after[1]))
    return found.order_by(at.desc(), id).limit(limit)


def _waiting(
    connection: Connection, tables: Tables, wanted: Filter, since: datetime | None, after: Place | None, limit: int
) -> Select[datetime, UUID]:
    queue = tables.queue
    at, id = queue.c.due_at, queue.c.id
    found = _narrowed(select(at.label("at"), id), tables, wanted, id)
    if set(wanted.states) < set(WAITING_STATES):
        found = found.where(queue.c.state.in_(wanted.states))
    if wanted.suspended:
        found = found.where(queue.c.suspended_reason.is_not(None), at == NEVER)  # NEVER: uses the index
    if since is not None:
        found = found.where(at >= since)
    if after is not None:
        found = found.where(at >= after[0], or_(at > after[0], id > after[1]))
    found = found.order_by(at, id).limit(limit)
    if wanted.destination is not None:
        return found.where(queue.c.destination == wanted.destination)
    if (wanted.parent is not None and wanted.parent.key is not None) or connection.dialect.name != "postgresql":
        return found
    return _of_each_destination(tables, found, limit)


def _of_each_destination(tables: Tables, found: Select[datetime, UUID], limit: int) -> Select[datetime, UUID]:
    """The first of all, from the first of each: the queue's index begins with the destination."""
    names = destination_names(tables)
    each = found.where(tables.queue.c.destination == names.c.name).correlate(names).lateral("each")
    return (
        select(each.c.at, each.c.id).select_from(names.join(each, true())).order_by(each.c.at, each.c.id).limit(limit)
    )


def _narrowed(
    found: Select[datetime, UUID], tables: Tables, wanted: Filter, id: Any, *, destination: str | None = None
) -> Select[datetime, UUID]:
    """With the conditions that the entry's own row decides; without any, that row is not read."""
    entry = tables.entry
    conditions: list[Any] = []
    if wanted.operation is not None:
        below = entry.c.operation.startswith(f"{wanted.operation}.", autoescape=True)
        conditions.append(or_(entry.c.operation == wanted.operation, below))
    if wanted.parent is not None:
        conditions += wanted.parent.conditions(tables)
    if destination is not None:
        conditions.append(entry.c.destination == destination)
    return found.join(entry, entry.c.id == id).where(*conditions) if conditions else found


def _summaries(connection: Connection, tables: Tables, condition: Any) -> list[EntrySummary]:
    statement = _entry_rows(tables, _summary_columns(tables, _withheld(connection, tables))).where(condition)
    rows = connection.execute(statement.order_by(tables.entry.c.created_at, tables.entry.c.id))
    return [EntrySummary(**_summary(row)) for row in rows]


def _entry_rows(tables: Tables, columns: Sequence[Any]) -> Any:
    entry, queue, settlement = tables.entry, tables.queue, tables.settlement
    rows = entry.outerjoin(queue, queue.c.id == entry.c.id).outerjoin(settlement, settlement.c.id == entry.c.id)
    return select(*columns).select_from(rows)


def _withheld(connection: Connection, tables: Tables) -> frozenset[Any]:
    columns = (tables.entry.c.tag, tables.entry.c.payload, tables.queue.c.outcome, tables.settlement.c.result)
    return unreadable(connection, columns)


def _readable(column: Any, withheld: frozenset[Any], value: Any = None) -> Any:
    """The column, or the value that is made of it; NULL where the column is withheld."""
    value = column if value is None else value
    return null().label(value.name) if column in withheld else value


def _summary_columns(tables: Tables, withheld: frozenset[Any]) -> list[Any]:
    entry, queue, settlement = tables.entry, tables.queue, tables.settlement
    written = ("id", "operation", "discriminator", "destination", "env", "scope", "source", "parent", "ordering_key")
    return [
        *(entry.c[name] for name in (*written, "created_at")),
        _readable(entry.c.tag, withheld),
        func.coalesce(settlement.c.state, queue.c.state).label("state"),
        func.coalesce(settlement.c.attempts, queue.c.attempts).label("attempts"),
        queue.c.due_at,
        queue.c.lease_until,
        queue.c.suspended_reason,
        case((is_blocked(queue), func.coalesce(_blocked_by(tables), _head(tables)))).label("blocked_by"),
        _readable(queue.c.outcome, withheld),
        settlement.c.reason,
        settlement.c.settled_at,
    ]


def _blocked_by(tables: Tables) -> Any:
    queue, blocked = tables.queue, tables.blocked_group
    return select(blocked.c.entry_id).where(blocked.c.ordering_key == queue.c.ordering_key).scalar_subquery()


def _head(tables: Tables) -> Any:
    queue, first = tables.queue, tables.queue.alias("first")
    of_group = first.c.ordering_key == queue.c.ordering_key
    before = select(first.c.id).where(of_group, first.c.position < queue.c.position, first.c.state != "uncertain")
    return before.order_by(first.c.position).limit(1).scalar_subquery()


def _summary(row: Row[Any]) -> dict[str, Any]:
    values = dict(row._mapping)
    outcome, tag, due_at = values.pop("outcome"), values.pop("tag"), values.pop("due_at")
    known = read_outcome(outcome).known
    waits_for_callback = known is not None and due_at - values["created_at"] > CENTURY / 2  # of another process
    return values | {
        "child_key": None if tag is None else encode_native(Tag(bytes(tag))),
        "due_at": None if waits_for_callback or due_at == NEVER else due_at,
        "known": known.state if known else None,
        "reason": values["reason"] if values["settled_at"] else waiting_reason(values["state"], outcome),
    }


# --- one entry


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryEvent:
    """What happened to an entry: an attempt that did not deliver, a status lookup, or an operator's decision."""

    at: datetime
    kind: str
    delivery: int | None
    actor: str | None
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryDetails(EntrySummary):
    """Everything that is known about one entry, except its payload.

    deliveries: how often it was claimed.
    key_epoch: the epoch of the key under which it is sent now. `child_key` is the key of epoch 0.
    result: the part of the service's answer that the adapter kept.
    """

    at: datetime
    kid: str
    key_epoch: int
    deliveries: int
    maybe_sent: bool | None
    in_doubt_since: datetime | None
    leased_at: datetime | None
    first_leased_at: datetime | None
    sent_as: str | None
    position: int | None
    record_id: UUID | None
    options: Any
    headers: Any
    payload_bytes: int | None
    schema_version: int
    result: Any
    events: list[EntryEvent]


def find_ids(connection: Connection, tables: Tables, beginning: str) -> list[UUID]:
    """The first ids that begin with these hexadecimal digits, CANDIDATES_MAX and one at most."""
    id = tables.entry.c.id
    lowest, highest = UUID(beginning.ljust(32, "0")), UUID(beginning.ljust(32, "f"))
    found = select(id).where(id.between(lowest, highest)).order_by(id).limit(CANDIDATES_MAX + 1)
    return list(connection.execute(found).scalars())


def read_entry(connection: Connection, tables: Tables, id: UUID) -> EntryDetails:
    """Raises EntryNotFound."""
    entry, queue, settlement, event = tables.entry, tables.queue, tables.settlement, tables.event
    withheld = _withheld(connection, tables)
    columns = [
        *_summary_columns(tables, withheld),
        *(entry.c[name] for name in ("kid", "record_id", "options", "headers", "schema_version")),
        *(queue.c[name] for name in ("maybe_sent", "in_doubt_since", "sent_as", "position")),
        *(queue.c[name] for name in ("leased_at", "first_leased_at")),
        func.coalesce(settlement.c.deliveries, queue.c.deliveries).label("deliveries"),
        func.coalesce(settlement.c.key_epoch, queue.c.key_epoch).label("key_epoch"),
        _readable(entry.c.payload, withheld, func.length(entry.c.payload).label("payload_bytes")),
        _readable(settlement.c.result, withheld),
        clock().label("at"),
    ]
    row = connection.execute(_entry_rows(tables, columns).where(entry.c.id == id)).one_or_none()
    if row is None:
        raise no_entry(id)
    happened = select(event.c.at, event.c.kind, event.c.delivery, event.c.actor, event.c.reason)
    events = connection.execute(happened.where(event.c.entry_id == id).order_by(event.c.id))
    texts = {name: getattr(row, name) for name in ("options", "headers", "result")}
    parsed: dict[str, Any] = {name: None if text is None else json.loads(text) for name, text in texts.items()}
    return EntryDetails(**_summary(row) | parsed, events=[EntryEvent(**event._mapping) for event in events])


def read_payload(connection: Connection, tables: Tables, id: UUID) -> Any:
    """The payload of an entry. Raises EntryNotFound."""
    payload = connection.execute(select(tables.entry.c.payload).where(tables.entry.c.id == id)).scalar_one_or_none()
    if payload is None:
        raise no_entry(id)
    return json.loads(bytes(payload))


def no_entry(id: UUID | str) -> EntryNotFound:
    return EntryNotFound(
        f"entry {id} does not exist: it was never enqueued in these tables, or was deleted after it ended"
    )
