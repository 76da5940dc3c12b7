"""Reads for operators: lists of entries, and everything that is known about one. `overview` has the state of the whole outbox.

Every function takes a Connection and reads in its current transaction. None returns a payload: `decide.payloads` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, and_, case, func, null, select

from dispatchers.admin.read.dispatchers import search_of
from dispatchers.admin.read.entry_filter import Filter, ParentWanted, check_filter, instant_of, require_plain
from dispatchers.admin.read.entry_pages import read_places
from dispatchers.admin.read.payload_filter import MemberOrSealed
from dispatchers.admin.read.plain_values import Place, shown_json
from dispatchers.errors import EntryNotFound
from dispatchers.store.records.heartbeats import read_dispatchers
from dispatchers.store.records.queries import unreadable
from dispatchers.stored_outcome import Known, MalformedOutcome, read_outcome
from dispatchers.time_limits import CENTURY
from outbox.configuration import EFFECT_VERSION
from outbox.entries.status import waiting_reason
from outbox.keys import Tag, encode_native
from outbox.sql.clock import clock, database_now
from outbox.sql.ordering import is_blocked
from outbox.sql.schema.tables import Tables
from outbox.times import NEVER

MAX_CANDIDATES = 10
UNREADABLE = "this release cannot read why: see `outbox verify`"


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
    next: Place[UUID] | None


def list_entries(
    connection: Connection,
    tables: Tables,
    wanted: Filter,
    *,
    max_entries: int,
    after: Place[UUID] | None = None,
    max_rows: int | None = None,
) -> Page:
    """A page of entries: waiting ones the longest due first, only uncertain ones the oldest doubt first, ended ones the newest
    first.

    On PostgreSQL a page of waiting entries reads a page of each destination's index, however long the queue is; those without a
    due time it reads all, where it comes to them. A filter reads on until the page is full, in the worst case the whole queue.
    max_rows: so many rows are compared with it at most: the page may then be short, or empty, and not the last.
    Raises `InvalidValue` for a filter that is not possible here, and for payloads where the page has an encrypted one.
    """
    check_filter(connection, tables, wanted)
    now = database_now(connection)
    compared = replace(wanted, payload=[MemberOrSealed(*member) for member in wanted.payload])
    places, following = read_places(
        connection, tables, compared, now, max_entries=max_entries, after=after, max_rows=max_rows
    )
    listed = [place.id for place in places]
    require_plain(connection, tables, wanted, listed)
    entries = {entry.id: entry for entry in read_entries_where(connection, tables, tables.entry.c.id.in_(listed))}
    return Page(
        at=now,
        since=None if wanted.since is None else instant_of(wanted.since, now),
        entries=[entries[id] for id in listed if id in entries],
        next=following,
    )


def read_entries_of_parent(connection: Connection, tables: Tables, parent: ParentWanted) -> list[EntrySummary]:
    """Every entry under one parent, or under all that are like it, oldest first: what `outbox.status` returns to the app."""
    return read_entries_where(connection, tables, and_(*parent.conditions(tables)))


def read_entries_where(connection: Connection, tables: Tables, condition: Any) -> list[EntrySummary]:
    """The entries that meet a condition on the entry's own row, oldest first."""
    statement = _entry_rows(tables, _summary_columns(tables, _withheld(connection, tables))).where(condition)
    rows = connection.execute(statement.order_by(tables.entry.c.created_at, tables.entry.c.id))
    return [EntrySummary(**_summary(row)) for row in rows]


def _entry_rows(tables: Tables, columns: Sequence[Any]) -> Any:
    entry, queue, settlement = tables.entry, tables.queue, tables.settlement
    rows = entry.outerjoin(queue, queue.c.id == entry.c.id).outerjoin(settlement, settlement.c.id == entry.c.id)
    return select(*columns).select_from(rows)


def _withheld(connection: Connection, tables: Tables) -> frozenset[Any]:
    of_entry = (tables.entry.c[name] for name in ("tag", "payload", "headers"))
    return unreadable(connection, [*of_entry, tables.queue.c.outcome, tables.settlement.c.result])


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
    known, reason = _known_and_reason(values["state"], outcome)
    waits_for_callback = known is not None and due_at - values["created_at"] > CENTURY / 2  # of another process
    return values | {
        "child_key": None if tag is None else encode_native(Tag(bytes(tag))),
        "due_at": None if waits_for_callback or due_at == NEVER else due_at,
        "known": known.state if known else None,
        "reason": values["reason"] if values["settled_at"] else reason,
    }


def _known_and_reason(state: str, outcome: str | None) -> tuple[Known | None, str | None]:
    try:
        return read_outcome(outcome).known, waiting_reason(state, outcome)
    except MalformedOutcome:  # one row of another release must not keep an operator from all others
        return None, UNREADABLE


# --- one entry


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryEvent:
    """What happened to an entry: an attempt that did not deliver, a status lookup, or an operator's decision."""

    at: datetime
    kind: str
    delivery: int | None
    actor: str | None
    reason: str | None


@dataclass(frozen=True, kw_only=True)  # only one base of `EntryDetails` may have __slots__
class EntryFacts:
    """What is known about one entry beyond its summary, except what was sent and answered.

    at: the database's clock. deliveries: how often it was claimed.
    key_epoch: the epoch of the key under which it is sent now. The summary's `child_key` is the key of epoch 0.
    options: those that the app gave. payload_version: of the payload of a typed effect, if it is not the first.
    search: of an entry in doubt, where at the service its effect is found, if its adapter declares that.
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
    payload_version: int | None
    payload_bytes: int | None
    schema_version: int
    events: list[EntryEvent]
    search: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryDetails(EntryFacts, EntrySummary):
    """Everything that is known about one entry, except its payload.

    headers: as they were enqueued. result: the part of the service's answer that the adapter kept. Each None for a role that may
        not read it.
    """

    headers: Any
    result: Any


def find_ids(connection: Connection, tables: Tables, beginning: str) -> list[UUID]:
    """The first ids that begin with these hexadecimal digits, MAX_CANDIDATES and one at most."""
    return ids_beginning_with(connection, tables.entry.c.id, beginning)


def ids_beginning_with(connection: Connection, id: Any, beginning: str) -> list[UUID]:
    """The ids in any column that begin so, as `find_ids` returns those of entries."""
    lowest, highest = UUID(beginning.ljust(32, "0")), UUID(beginning.ljust(32, "f"))
    found = select(id).where(id.between(lowest, highest)).order_by(id).limit(MAX_CANDIDATES + 1)
    return list(connection.execute(found).scalars())


def read_entry(connection: Connection, tables: Tables, id: UUID) -> EntryDetails:
    """Raises EntryNotFound."""
    entry, queue, settlement, event = tables.entry, tables.queue, tables.settlement, tables.event
    withheld = _withheld(connection, tables)
    columns = [
        *_summary_columns(tables, withheld),
        *(entry.c[name] for name in ("kid", "record_id", "options", "schema_version")),
        _readable(entry.c.headers, withheld),
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
    parsed: dict[str, Any] = {name: None if text is None else shown_json(text) for name, text in texts.items()}
    parsed["payload_version"] = (
        parsed["options"].pop(EFFECT_VERSION, None) if isinstance(parsed["options"], dict) else None
    )
    summary = _summary(row)
    search = _search(connection, tables, row, summary["child_key"]) if row.maybe_sent else None
    return EntryDetails(**summary | parsed, events=[EntryEvent(**event._mapping) for event in events], search=search)


def _search(connection: Connection, tables: Tables, row: Any, child_key: str | None) -> str | None:
    """What an operator looks up at the service. A key of a later epoch is not shown, so it is described."""
    search = search_of(row.operation, read_dispatchers(connection, tables, row.at))
    key = child_key if row.key_epoch == 0 and child_key else f"the key of epoch {row.key_epoch}"
    return None if search is None else search.replace("{key}", key)


def no_entry(id: UUID | str) -> EntryNotFound:
    return EntryNotFound(
        f"entry {id} does not exist: it was never enqueued in these tables, or was deleted after it ended"
    )
