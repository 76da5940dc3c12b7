"""The read side for operators: queue health by destination, and entries that make no progress.

Every function takes a Connection and reads with it, in its current transaction.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import CTE, ColumnElement, Connection, FromClause, Select, Table, case, func, or_, select, union

from dispatchers.admin.read.counts import count_uncertain
from dispatchers.admin.read.dispatchers import Difference, differences, is_served, live
from dispatchers.store.records.heartbeats import DispatcherSeen, read_dispatchers
from dispatchers.store.records.queries import RELEASED_WITHIN, found_destinations, read_lags, rows_of_each, unreadable
from dispatchers.stored_outcome import UNREAD, UNSERVED, MalformedOutcome, read_outcome
from outbox.sql.clock import database_now
from outbox.sql.ordering import is_blocked
from outbox.sql.schema.tables import Tables
from outbox.sql.statements import read_by_index

MAX_BLOCKED_GROUPS = 100
MAX_OVERDUE_LEASES = 100
MAX_UNSERVED = 1000
"""How many of the entries that were released as unserved are read, and how many due ones of each of their destinations."""
MAX_MARKED_READ = 1000
"""How many due entries at each end of a destination's queue are searched for those; with many destinations fewer."""
MARKED_READ_IN_ALL = 20_000
MARKED_READ_MIN = 10
MAX_UNSERVED_OPERATIONS = 10
MAX_COUNTED_ROWS = 20_000
"""How many entries of all destinations together are counted: 50 to 100 ms."""
COUNTED_OF_ONE_MIN = 10
MAX_LEASES_READ = 20_000
"""How many due entries, the oldest of each destination, are searched for leases that are over."""
MAX_COUNTED_DESTINATIONS = 20
"""For how many destinations, those with most such entries or the longest waiting first, the operations are counted."""

LONG_OVER = timedelta(minutes=1)
"""After its end a lease is taken over within a second or two, if a dispatcher serves the entry and can lock its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationOverview:
    """What waits for one destination.

    is_whole: whether all of its entries were counted; otherwise the `counted` ones due last, which are first those without a due
        time.
    states: how many entries are in each state, without the decided ones. decided: how many are not sent any more, because their
        end is stored; a dispatcher has yet to settle them. suspended: how many an operator or a check suspended. blocked: how
        many wait for an earlier entry of their ordering group.
    oldest_due_seconds: for how long the oldest one has waited that could be claimed now; None if there is none.
    """

    name: str
    is_whole: bool
    counted: int
    states: dict[str, int]
    decided: int
    suspended: int
    blocked: int
    oldest_due_seconds: float | None
    paused: bool
    paused_reason: str | None
    cooldown_until: datetime | None
    breaker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedGroup:
    """An ordering group that is blocked until an operator releases it."""

    ordering_key: str
    entry_id: UUID
    reason: str
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class OverdueLease:
    """An entry whose lease expired long ago and that no dispatcher has claimed since.

    No dispatcher serves it, or none is running; or a transaction that does not end has locked its row. over_seconds: for how
    long its lease has been over.
    """

    id: UUID
    destination: str
    over_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unserved:
    """An operation whose entries wait because no dispatcher that claimed them serves it, or because none can read their payload.

    entries: how many of them are due. has_more: whether there may be more of them, as no more than the first `MAX_UNSERVED` due
    entries of a destination are counted. reason: why a dispatcher has released one of them. unread: whether it serves the
    operation, and cannot read the payload. Of those only entries with this reason count, because others may be sent.
    """

    operation: str
    destination: str
    entries: int
    has_more: bool
    reason: str
    unread: bool = False

    @property
    def text(self) -> str:
        """One line for an operator."""
        entries = f"{self.entries:,}{' or more' if self.has_more else ''}"
        why = "cannot be read by any dispatcher" if self.unread else "not served by any dispatcher"
        return f"{entries} of {self.operation} {why}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unregistered:
    """An operation of due entries that no live dispatcher has registered. entries, has_more: as of `Unserved`."""

    operation: str
    destination: str
    entries: int
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LastResume:
    """Who resumed sending after a failover or a restore, and why."""

    at: datetime
    by: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The outbox at one moment of the database's clock.

    is_whole: whether all entries of all destinations were counted; otherwise there are more than the numbers say.
    overdue: leases that are long over, the oldest first. unserved: the operations that no one has served for a while; None
    for a role that may not read why entries wait. dispatchers: the live ones, and those that died within the last hour.
    unregistered: the operations that no live dispatcher has registered; empty if none is live. suspended_reason: why sending is
    suspended, if it is.
    """

    at: datetime
    is_whole: bool
    destinations: list[DestinationOverview]
    uncertain: int
    decided: int
    suspended: int
    blocked: int
    blocked_groups: list[BlockedGroup]
    overdue: list[OverdueLease]
    unserved: list[Unserved] | None
    dispatchers: list[DispatcherSeen]
    differences: list[Difference]
    unregistered: list[Unregistered]
    suspended_reason: str | None
    resumed: LastResume | None


def most_urgent(found: Overview, max_shown: int) -> list[DestinationOverview]:
    """The destinations by name; if there are more than `max_shown`, those that are throttled, then those with entries that wait
    for an operator, and then those whose oldest due entry has waited longest.
    """

    def need(each: DestinationOverview) -> tuple[bool, bool, float, str]:
        is_cooling = each.cooldown_until is not None and each.cooldown_until > found.at
        is_throttled = each.paused or each.breaker != "closed" or is_cooling
        waits = each.states.get("uncertain", 0) + each.suspended + each.blocked > 0
        return not is_throttled, not waits, -(each.oldest_due_seconds or 0), each.name

    if len(found.destinations) <= max_shown:
        return found.destinations
    return sorted(sorted(found.destinations, key=need)[:max_shown], key=lambda each: each.name)


def read_overview(connection: Connection, tables: Tables) -> Overview:
    """Count what has not ended, for each destination: at most `MAX_COUNTED_ROWS` entries, by an index."""
    read_by_index(connection)
    now = database_now(connection)
    found = found_destinations(connection, tables)
    destinations = _destinations(connection, tables, found, now)
    is_whole = all(destination.is_whole for destination in destinations)
    uncertain = sum(destination.states.get("uncertain", 0) for destination in destinations)
    dispatchers = read_dispatchers(connection, tables, now)
    blocked = select(tables.blocked_group).order_by(tables.blocked_group.c.since).limit(MAX_BLOCKED_GROUPS)
    meta = connection.execute(select(tables.meta)).one_or_none()
    return Overview(
        at=now,
        is_whole=is_whole,
        destinations=destinations,
        uncertain=uncertain if is_whole else max(uncertain, count_uncertain(connection, tables).value),
        decided=sum(destination.decided for destination in destinations),
        suspended=sum(destination.suspended for destination in destinations),
        blocked=sum(destination.blocked for destination in destinations),
        blocked_groups=[BlockedGroup(**row._mapping) for row in connection.execute(blocked)],
        overdue=_overdue(connection, tables, found, now),
        unserved=read_unserved(connection, tables, now),
        dispatchers=dispatchers,
        differences=differences(dispatchers),
        unregistered=read_unregistered(connection, tables, now, dispatchers, _lags(destinations)),
        suspended_reason=meta.suspended_reason if meta is not None else None,
        resumed=None
        if meta is None or meta.resumed_at is None
        else LastResume(at=meta.resumed_at, by=meta.resumed_by, reason=meta.resumed_reason),
    )


def _overdue(connection: Connection, tables: Tables, found: Sequence[str], now: datetime) -> list[OverdueLease]:
    """A claim takes the oldest due entries, so a lease that no one has taken over is among the oldest of its destination."""
    queue = tables.queue
    most = max(MAX_LEASES_READ // max(len(found), 1), COUNTED_OF_ONE_MIN)

    def over(name: Any, names: CTE) -> Select[*tuple[Any, ...]]:
        due = select(queue.c.id, queue.c.lease_until).where(queue.c.destination == name, queue.c.due_at <= now)
        oldest = due.order_by(queue.c.due_at).limit(most).correlate(names).subquery("oldest")
        return (
            select(oldest.c.id, oldest.c.lease_until)
            .where(oldest.c.lease_until < now - LONG_OVER)
            .order_by(oldest.c.lease_until)
            .limit(MAX_OVERDUE_LEASES)
        )

    rows = rows_of_each(connection, tables, found, over)
    leases = [
        OverdueLease(id=id, destination=name, over_seconds=(now - until).total_seconds()) for name, id, until in rows
    ]
    return sorted(leases, key=lambda lease: -lease.over_seconds)[:MAX_OVERDUE_LEASES]


def read_unserved(connection: Connection, tables: Tables, now: datetime) -> list[Unserved] | None:
    """Only some of an operation's entries are marked, by which each dispatcher learns that it does not serve it."""
    if unreadable(connection, [tables.queue.c.outcome]):
        return None
    found, taken = _marked(connection, tables, now)
    marked = {row.id: row for row in found}
    of_each = Counter(row.destination for row in found)
    kinds: dict[UUID, tuple[Any, ...]] = {
        id: (*kind, _is_unread(marked[id].outcome)) for id, kind in _kinds(connection, tables, marked).items()
    }
    reasons = {(marked[id].destination, *kind): _reason(marked[id].outcome) for id, kind in kinds.items()}
    waiting = Counter((marked[id].destination, *kind) for id, kind in kinds.items())
    counted = _most_common(destination for destination, *_, unread in waiting.elements() if not unread)
    whole = set()
    for destination in counted:
        first = _first_due(connection, tables, destination, now)
        waiting |= Counter((destination, *kind, False) for kind in _kinds(connection, tables, first).values())
        whole |= {destination} if len(first) < MAX_UNSERVED else set()
    operations = [
        Unserved(
            destination=kind[0],
            operation=kind[1],
            entries=waiting[kind],
            has_more=of_each[kind[0]] >= taken if kind[-1] else kind[0] not in whole,
            reason=reason,
            unread=kind[-1],
        )
        for kind, reason in reasons.items()
    ]
    return sorted(operations, key=lambda one: (-one.entries, one.operation))[:MAX_UNSERVED_OPERATIONS]


def _most_common(destinations: Iterable[str]) -> list[str]:
    return [name for name, _ in Counter(sorted(destinations)).most_common(MAX_COUNTED_DESTINATIONS)]


def _reason(outcome: str) -> str:
    try:
        return read_outcome(outcome).reason or ""
    except MalformedOutcome:  # `outbox verify` reports it
        return ""


def _is_unread(outcome: str) -> bool:
    try:
        return read_outcome(outcome).is_unread
    except MalformedOutcome:
        return False


def read_unregistered(
    connection: Connection,
    tables: Tables,
    now: datetime,
    dispatchers: Sequence[DispatcherSeen],
    lags: Mapping[str, timedelta],
) -> list[Unregistered]:
    """What no live dispatcher has registered, if one is live. lags: how long the oldest due entry of a destination has waited.

    Only what has waited for a while counts: an older release's process, which has no heartbeat, may serve it.
    """
    if not live(dispatchers):
        return []
    waiting = sorted((name for name, lag in lags.items() if lag > LONG_OVER), key=lambda name: -lags[name])
    found = []
    for destination in waiting[:MAX_COUNTED_DESTINATIONS]:
        first = _first_waiting(connection, tables, destination, now)
        counts = Counter(operation for operation, *_ in _kinds(connection, tables, first).values())
        found += [
            Unregistered(
                operation=operation, destination=destination, entries=count, has_more=len(first) == MAX_UNSERVED
            )
            for operation, count in counts.items()
            if not is_served(operation, dispatchers)
        ]
    return sorted(found, key=lambda one: (-one.entries, one.operation))[:MAX_UNSERVED_OPERATIONS]


def _lags(destinations: Sequence[DestinationOverview]) -> dict[str, timedelta]:
    return {
        each.name: timedelta(seconds=each.oldest_due_seconds)
        for each in destinations
        if each.oldest_due_seconds is not None
    }


def _first_waiting(connection: Connection, tables: Tables, destination: str, now: datetime) -> Sequence[UUID]:
    """The ids of entries that have been due for a while, also if a dispatcher has released them since."""
    queue = tables.queue
    since = func.coalesce(queue.c.waiting_since, queue.c.due_at)
    due = queue.c.due_at <= now + RELEASED_WITHIN, since < now - LONG_OVER
    waiting = select(queue.c.id).where(queue.c.destination == destination, *due, _is_free(queue))
    return connection.execute(waiting.order_by(queue.c.due_at).limit(MAX_UNSERVED)).scalars().all()


class _Marked(NamedTuple):
    destination: str
    id: UUID
    outcome: str


def _marked(connection: Connection, tables: Tables, now: datetime) -> tuple[list[_Marked], int]:
    """Entries that a dispatcher has released as unserved or as unread, and that no other has taken since, for a while.

    Also returns how many of each destination it returns at most.

    Of each destination the first due ones and the last are read, by the index: a released entry is due again within seconds, and
    while a backlog waits it comes after all of it.
    """
    read_by_index(connection)
    found = found_destinations(connection, tables)
    of_each = max(1, len(found))
    read = max(min(MARKED_READ_IN_ALL // of_each, MAX_MARKED_READ), MARKED_READ_MIN)
    taken = max(MAX_UNSERVED // of_each, 1)
    asked = partial(_marked_of, tables.queue, now, read, taken)
    return [_Marked._make(row) for row in rows_of_each(connection, tables, found, asked)], taken


def _marked_of(
    queue: Table, now: datetime, read: int, taken: int, destination: Any, names: CTE
) -> Select[*tuple[Any, ...]]:
    read_of_each = ("id", "outcome", "waiting_since", "due_at", "lease_token", "suspended_reason")
    due = select(*(queue.c[name] for name in read_of_each)).where(
        queue.c.destination == destination, queue.c.due_at <= now + RELEASED_WITHIN
    )
    due = due.correlate(names)
    ends = [due.order_by(order).limit(read).subquery() for order in (queue.c.due_at, queue.c.due_at.desc())]
    either = union(*map(select, ends)).subquery()
    since = func.coalesce(either.c.waiting_since, either.c.due_at)
    marks = or_(*(either.c.outcome.contains(f'"{mark}": true') for mark in (UNSERVED, UNREAD)))
    marked = marks & (since < now - LONG_OVER)
    return select(either.c.id, either.c.outcome).where(marked, _is_free(either)).limit(taken)


def _first_due(connection: Connection, tables: Tables, destination: str, now: datetime) -> Sequence[UUID]:
    queue = tables.queue
    due = select(queue.c.id).where(queue.c.destination == destination, queue.c.due_at <= now, _is_free(queue))
    return connection.execute(due.order_by(queue.c.due_at).limit(MAX_UNSERVED)).scalars().all()


def _is_free(queue: FromClause) -> ColumnElement[bool]:
    return queue.c.lease_token.is_(None) & queue.c.suspended_reason.is_(None)


def _kinds(connection: Connection, tables: Tables, ids: Collection[UUID]) -> dict[UUID, tuple[Any, ...]]:
    """What decides whether a dispatcher serves an entry: its operation, its env, the release that wrote it."""
    if not ids:
        return {}
    entry = tables.entry
    found = select(entry.c.id, entry.c.operation, entry.c.env, entry.c.schema_version).where(entry.c.id.in_(ids))
    return {id: tuple(kind) for id, *kind in connection.execute(found)}


def _destinations(
    connection: Connection, tables: Tables, found: Sequence[str], now: datetime
) -> list[DestinationOverview]:
    queue = tables.queue
    most = max(MAX_COUNTED_ROWS // max(len(found), 1), COUNTED_OF_ONE_MIN)

    def counting(name: Any, names: CTE) -> Select[*tuple[Any, ...]]:
        columns = queue.c.state, queue.c.known, queue.c.suspended_reason, is_blocked(queue).label("is_blocked")
        rows = select(*columns).where(queue.c.destination == name).order_by(queue.c.due_at.desc()).limit(most)
        last = rows.correlate(names).subquery("last")
        return select(
            last.c.state,
            func.count().label("entries"),
            func.count(last.c.known).label("decided"),
            func.count(last.c.suspended_reason).label("suspended"),
            func.count(case((last.c.is_blocked, 1))).label("blocked"),
        ).group_by(last.c.state)

    counts: dict[str, list[_Counts]] = {}
    for name, *counted in rows_of_each(connection, tables, found, counting):
        counts.setdefault(name, []).append(_Counts(*counted))
    controls = {row.name: row for row in connection.execute(select(tables.destination))}
    lags = read_lags(connection, tables, now)
    return [
        _destination(name, counts.get(name, []), most, controls.get(name), lags.get(name), now)
        for name in sorted({*counts, *controls})
    ]


class _Counts(NamedTuple):
    """How many entries are in a state. entries: with the decided ones."""

    state: str
    entries: int
    decided: int
    suspended: int
    blocked: int


def _destination(
    name: str, counts: Sequence[_Counts], most: int, control: Any, lag: timedelta | None, now: datetime
) -> DestinationOverview:
    counted = sum(each.entries for each in counts)
    return DestinationOverview(
        name=name,
        is_whole=counted < most,
        counted=counted,
        states={each.state: each.entries - each.decided for each in counts if each.entries > each.decided},
        decided=sum(each.decided for each in counts),
        suspended=sum(each.suspended for each in counts),
        blocked=sum(each.blocked for each in counts),
        oldest_due_seconds=None if lag is None else lag.total_seconds(),
        paused=control is not None and control.paused,
        paused_reason=control.paused_reason if control is not None else None,
        cooldown_until=None if control is None or (control.cooldown_until or now) <= now else control.cooldown_until,
        breaker=control.breaker if control is not None else "closed",
    )
