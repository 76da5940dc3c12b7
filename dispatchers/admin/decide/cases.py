"""What an operator needs for a decision about an entry: its evidence, the window of its key, and the decisions that are safe.

Every function takes a Connection and reads in its current transaction. Neither a payload nor an answer is read.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, func, literal, null, select

from dispatchers.admin.decide.entry_version import events_of, version_text
from dispatchers.admin.decide.key_window import KeyWindow, key_window, memory_of
from dispatchers.admin.decide.safe import Offer, offers
from dispatchers.admin.read.entries import EntryEvent, EntrySummary, read_entries_where
from dispatchers.store.records.heartbeats import DispatcherSeen, read_dispatchers
from dispatchers.store.records.identity import is_suspended
from dispatchers.store.records.queries import unreadable
from dispatchers.stored_outcome import MalformedOutcome
from outbox.sql.schema.tables import Tables

MAX_EVENTS = 200
"""How many events of one entry are read, the latest: an entry that is looked up every hour for a month has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One entry that has not ended.

    version: it changes with each attempt and each event; a decision about another version is refused.
    key_epoch: the epoch of the key under which it was sent last. sent_as: the form of that key.
    payload_bytes: None for a role that may not read payloads.
    offers: the decisions about its state, each safe now or with the reason why not; None for a role that may not read what that
        depends on.
    """

    entry: EntrySummary
    version: str
    key_epoch: int
    sent_as: str | None
    maybe_sent: bool
    in_doubt_since: datetime | None
    payload_bytes: int | None
    window: KeyWindow
    offers: list[Offer] | None
    events: list[EntryEvent]


def read_cases(connection: Connection, tables: Tables, ids: Sequence[UUID], now: datetime) -> list[Case]:
    """The entries of these ids that have not ended, in this order. now: the database's time."""
    entry, queue = tables.entry, tables.queue
    hidden = unreadable(connection, [queue.c.outcome, entry.c.payload])
    size = literal(None) if entry.c.payload in hidden else func.length(entry.c.payload)
    names = ("id", "state", "suspended_reason", "due_at", "deliveries", "maybe_sent", "in_doubt_since", "key_epoch")
    columns = [*(queue.c[name] for name in names), queue.c.sent_as, queue.c.position, size.label("payload_bytes")]
    columns += [queue.c.attempts, events_of(tables).label("events")]
    columns.append(null().label("outcome") if queue.c.outcome in hidden else queue.c.outcome)
    found: Any = select(*columns).join(entry, entry.c.id == queue.c.id).where(queue.c.id.in_(ids))
    rows = {row.id: row for row in connection.execute(found)}
    entries = {each.id: each for each in read_entries_where(connection, tables, entry.c.id.in_(list(rows)))}
    events = read_events(connection, tables, list(rows))
    dispatchers = read_dispatchers(connection, tables, now)
    suspended = is_suspended(connection, tables)
    return [
        _case(
            entries[id],
            rows[id],
            events[id],
            dispatchers,
            now,
            decides=queue.c.outcome not in hidden,
            suspended=suspended,
        )
        for id in ids
        if id in rows
    ]


def _case(
    entry: EntrySummary,
    row: Row[Any],
    events: list[EntryEvent],
    dispatchers: Collection[DispatcherSeen],
    now: datetime,
    *,
    decides: bool,
    suspended: bool,
) -> Case:
    memory = memory_of(entry.operation, dispatchers)
    try:
        offered = offers(row, memory, now, is_suspended=suspended) if decides else None
    except MalformedOutcome:  # `outbox verify` reports it
        offered = []
    return Case(
        entry=entry,
        version=version_text(row.attempts, row.events),
        key_epoch=row.key_epoch,
        sent_as=row.sent_as,
        maybe_sent=row.maybe_sent,
        in_doubt_since=row.in_doubt_since,
        payload_bytes=row.payload_bytes,
        window=key_window(memory, row.in_doubt_since, entry.due_at, now),
        offers=offered,
        events=events,
    )


def read_events(connection: Connection, tables: Tables, ids: Collection[UUID]) -> dict[UUID, list[EntryEvent]]:
    """The history of each entry, oldest first: the latest `MAX_EVENTS` events."""
    event = tables.event
    number = func.row_number().over(partition_by=event.c.entry_id, order_by=event.c.id.desc()).label("number")
    columns = (event.c.entry_id, event.c.id, event.c.at, event.c.kind, event.c.delivery, event.c.actor, event.c.reason)
    latest = select(*columns, number).where(event.c.entry_id.in_(list(ids))).subquery()
    rows = connection.execute(select(latest).where(latest.c.number <= MAX_EVENTS).order_by(latest.c.id))
    found: dict[UUID, list[EntryEvent]] = defaultdict(list)
    for row in rows:
        found[row.entry_id].append(
            EntryEvent(at=row.at, kind=row.kind, delivery=row.delivery, actor=row.actor, reason=row.reason)
        )
    return found
