"""The read side for operators: how the outbox is, destination by destination, and what stands still in it.

Every function takes a Connection and reads with it, in whatever transaction it is in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, case, func, or_, select

from outbox.databases import clock
from outbox.instants import NEVER
from outbox.lanes import is_blocked
from outbox.schema import Tables

HALTED_LANES_MAX = 100
OVERDUE_LEASES_MAX = 100

LONG_OVER = timedelta(minutes=1)
"""After its end a lease is taken over within a second or two, if a dispatcher serves the entry and can lock its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationOverview:
    """What waits for one destination.

    states: how many entries are in each state. held: how many of them are held back by a person or a check. blocked: how many
        wait behind another of their lane.
    oldest_due_seconds: for how long the oldest one has waited that could be claimed now; None if there is none.
    """

    name: str
    states: dict[str, int]
    held: int
    blocked: int
    oldest_due_seconds: float | None
    paused: bool
    paused_reason: str | None
    cool_until: datetime | None
    breaker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltedLane:
    """An ordering key whose entries wait until a person lets them go on."""

    ordering_key: str
    entry_id: UUID
    reason: str
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class OverdueLease:
    """An entry that is being sent by nobody any more, and that nobody takes over.

    No dispatcher serves it, or none is running; or a transaction that does not end has locked its row. over_seconds: for how
    long its lease has been over.
    """

    id: UUID
    destination: str
    over_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LastResume:
    """Who let the dispatchers go on after a failover or a restore, and why."""

    at: datetime
    by: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The outbox at one moment of the database's clock.

    overdue: the leases that are long over, the oldest first. held_reason: why every dispatcher holds, if they do.
    """

    at: datetime
    destinations: list[DestinationOverview]
    uncertain: int
    held: int
    blocked: int
    halted: list[HaltedLane]
    overdue: list[OverdueLease]
    held_reason: str | None
    resumed: LastResume | None


def read_overview(connection: Connection, tables: Tables) -> Overview:
    """Count what has not ended, for each destination. Reads the queue from end to end."""
    now: datetime = connection.execute(select(clock())).scalar_one()
    destinations = _destinations(connection, tables, now)
    halted = select(tables.halted).order_by(tables.halted.c.since).limit(HALTED_LANES_MAX)
    meta = connection.execute(select(tables.meta)).one_or_none()
    return Overview(
        at=now,
        destinations=destinations,
        uncertain=sum(destination.states.get("uncertain", 0) for destination in destinations),
        held=sum(destination.held for destination in destinations),
        blocked=sum(destination.blocked for destination in destinations),
        halted=[HaltedLane(**row._mapping) for row in connection.execute(halted)],
        overdue=_overdue(connection, tables, now),
        held_reason=meta.held_reason if meta is not None else None,
        resumed=_last_resume(meta),
    )


def _overdue(connection: Connection, tables: Tables, now: datetime) -> list[OverdueLease]:
    queue = tables.queue
    over = select(queue.c.id, queue.c.destination, queue.c.lease_until).where(queue.c.lease_until < now - LONG_OVER)
    oldest = over.order_by(queue.c.lease_until).limit(OVERDUE_LEASES_MAX)
    return [
        OverdueLease(id=row.id, destination=row.destination, over_seconds=(now - row.lease_until).total_seconds())
        for row in connection.execute(oldest)
    ]


def _last_resume(meta: Row[Any] | None) -> LastResume | None:
    if meta is None or meta.resumed_at is None:
        return None
    return LastResume(at=meta.resumed_at, by=meta.resumed_by, reason=meta.resumed_reason)


def _destinations(connection: Connection, tables: Tables, now: datetime) -> list[DestinationOverview]:
    queue = tables.queue
    claimable = or_(queue.c.lease_until.is_(None), queue.c.lease_until < now)
    since = func.coalesce(queue.c.waiting_since, queue.c.due_at)  # what was handed back has waited all the same
    counted = select(
        queue.c.destination,
        queue.c.state,
        func.count().label("entries"),
        func.count(queue.c.hold).label("held"),
        func.count(case((is_blocked(queue), 1))).label("blocked"),
        func.min(case((claimable & (queue.c.due_at < NEVER), since))).label("oldest_due"),
    ).group_by(queue.c.destination, queue.c.state)
    rows: dict[str, list[Any]] = {}
    for row in connection.execute(counted):
        rows.setdefault(row.destination, []).append(row)
    controls = {row.name: row for row in connection.execute(select(tables.destination))}
    return [_destination(name, rows.get(name, []), controls.get(name), now) for name in sorted({*rows, *controls})]


def _destination(name: str, rows: Sequence[Any], control: Any, now: datetime) -> DestinationOverview:
    due = [row.oldest_due for row in rows if row.oldest_due is not None and row.oldest_due <= now]
    return DestinationOverview(
        name=name,
        states={row.state: row.entries for row in rows},
        held=sum(row.held for row in rows),
        blocked=sum(row.blocked for row in rows),
        oldest_due_seconds=(now - min(due)).total_seconds() if due else None,
        paused=control is not None and control.paused,
        paused_reason=control.paused_reason if control is not None else None,
        cool_until=control.cool_until if control is not None and (control.cool_until or now) > now else None,
        breaker=control.breaker if control is not None else "closed",
    )
