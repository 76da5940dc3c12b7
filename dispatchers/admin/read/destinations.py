"""Each destination's backlog, throttling, and the operator decisions about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import CTE, Connection, Row, ScalarSelect, Select, func, select

from dispatchers.admin.read.counts import EXACT_ZERO, MAX_COUNTED, Count, planned_rows
from dispatchers.admin.read.dispatchers import live, served_destinations
from dispatchers.admin.read.waiting_reasons import why_waiting
from dispatchers.flow_control.state import on_record, service_of, still_taken
from dispatchers.store.queue.throttling import is_throttled
from dispatchers.store.records.heartbeats import DispatcherSeen, read_dispatchers
from dispatchers.store.records.queries import (
    found_destinations,
    is_claimable,
    of_each_destination,
    read_lags,
    rows_of_each,
)
from outbox.sql.clock import clock, database_now
from outbox.sql.schema.tables import Tables
from outbox.sql.statements import read_by_index


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationState:
    """One destination: its backlog and its flow control.

    due: how many entries could be sent now if the destination were not throttled. due_is_exact: whether they were counted;
        else there are more than were counted, and on PostgreSQL it is an estimate.
    decided: how many entries are not sent any more, because their end is stored; a dispatcher has yet to settle them.
    oldest_due_seconds: how long the oldest of them has waited; None if there is none.
    paused: whether an operator has paused it.
    cooldown_until: the end of a Retry-After cooldown.
    breaker: `open` lets no entry through until `breaker_until`. Then `half_open` lets one entry through, as a probe.
    breaker_failures: the number of failures in a row.
    rate_per_second: the rate of all dispatchers together.
    max_permits: the limit of concurrent sends of all dispatchers together.
    permits_taken: how many of these permits are in use.
    decided_by, decided_at: who paused or resumed it last, and when.
    waits_because: why the due entries are not claimed, if that is known, and if it is not paused or throttled; else why the
        decided ones are not settled.
    """

    name: str
    due: int
    due_is_exact: bool
    decided: int
    oldest_due_seconds: float | None
    paused: bool
    paused_reason: str | None
    cooldown_until: datetime | None
    breaker: str
    breaker_until: datetime | None
    breaker_failures: int
    rate_per_second: float | None
    max_permits: int | None
    permits_taken: int
    decided_by: str | None
    decided_at: datetime | None
    waits_because: str | None

    @property
    def is_throttled(self) -> bool:
        """Whether it is paused, or waits for a cooldown or a probe."""
        return self.paused or self.cooldown_until is not None or self.breaker != "closed"


NOT_SENT_SHOWN = 5
MAX_SHOWN = 200
"""How many destinations are on one page: a page with 100,000 had 100 MB."""
COUNTED_IN_ALL = 20_000  # an open page asks again every five seconds
COUNTED_OF_ONE_MIN = 10
MAX_ESTIMATED = 20
"""For how many destinations with more due entries than are counted the number is estimated: one statement each."""

SHARED = (
    *("paused_reason", "cooldown_until", "breaker", "breaker_until", "breaker_failures", "rate_per_second"),
    *("max_permits", "decided_by", "decided_at"),
)
"""What a state has of the destination's row, as it is."""

UNTHROTTLED: Mapping[str, Any] = dict.fromkeys(SHARED) | {"breaker": "closed", "breaker_failures": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationStates:
    """All of them, at one moment of the database's clock."""

    at: datetime
    destinations: list[DestinationState]


def read_destinations(connection: Connection, tables: Tables) -> DestinationStates:
    """Every destination that has unsettled entries, that was throttled once, or that a live dispatcher serves. Counts what is
    due, within bounds.
    """
    now = database_now(connection)
    counts, decided = _count_due(connection, tables, now), _count_decided(connection, tables)
    rows = {row.name: row for row in connection.execute(select(tables.destination))}
    lags = read_lags(connection, tables, now)
    dispatchers = read_dispatchers(connection, tables, now)
    states = [
        _state(
            name,
            counts.get(name, EXACT_ZERO),
            sum(decided.get(name, {}).values()),
            lags.get(name),
            rows.get(name),
            now,
            paused=_is_paused(rows, name),
        )
        for name in sorted({*counts, *rows, *served_destinations(dispatchers)})
    ]
    suspended = connection.execute(select(tables.meta.c.suspended_reason)).scalar()
    operations = _operations_of(connection, tables, states, dispatchers, now)
    states = [
        replace(
            state,
            waits_because=why_waiting(
                state.name,
                rows.get(state.name),
                now,
                dispatchers,
                suspended,
                permits_taken=state.permits_taken,
                operations=operations.get(state.name, ()),
                are_sent=state.due > 0 and not state.is_throttled,
                callbacks=[callback for callback in decided.get(state.name, ()) if callback is not None],
            ),
        )
        if state.decided or (state.due and not state.is_throttled)
        else state
        for state in states
    ]
    return DestinationStates(at=now, destinations=states)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotSent:
    """What keeps entries from being sent: why all sending is suspended, and throttled destinations, the first `NOT_SENT_SHOWN` of
    `destinations_in_all`.
    """

    suspended_reason: str | None
    destinations: list[DestinationState]
    destinations_in_all: int


def read_not_sent(connection: Connection, tables: Tables) -> NotSent:
    """Reads no backlog: the states have no counts."""
    now, destination = database_now(connection), tables.destination
    throttled = select(destination).where(is_throttled(tables, clock())).order_by(destination.c.name)
    rows = connection.execute(throttled.limit(NOT_SENT_SHOWN)).all()
    in_all = select(func.count()).select_from(throttled.order_by(None).subquery())
    return NotSent(
        suspended_reason=connection.execute(select(tables.meta.c.suspended_reason)).scalar_one_or_none(),
        destinations=[_state(row.name, EXACT_ZERO, 0, None, row, now, paused=row.paused) for row in rows],
        destinations_in_all=len(rows) if len(rows) < NOT_SENT_SHOWN else connection.execute(in_all).scalar_one(),
    )


def most_urgent(destinations: Sequence[DestinationState], max_shown: int = MAX_SHOWN) -> list[DestinationState]:
    """The destinations by name; if there are more than `max_shown`, those that are throttled, then those whose entries wait for a
    known reason, and then those with most due.
    """
    if len(destinations) <= max_shown:
        return list(destinations)
    by_need = sorted(
        destinations, key=lambda each: (not each.is_throttled, each.waits_because is None, -each.due, each.name)
    )
    return sorted(by_need[:max_shown], key=lambda each: each.name)


def _count_due(connection: Connection, tables: Tables, now: datetime) -> dict[str, Count]:
    """Count the due entries of each destination with unsettled ones: at most `MAX_COUNTED`, fewer with many destinations."""
    read_by_index(connection)
    found = found_destinations(connection, tables)
    most = max(min(COUNTED_IN_ALL // max(len(found), 1), MAX_COUNTED), COUNTED_OF_ONE_MIN)

    def counting(name: Any, names: CTE) -> ScalarSelect[int]:
        some = _due(tables, name, now).limit(most + 1).correlate(names).subquery()
        return select(func.count()).select_from(some).scalar_subquery()

    counted = of_each_destination(connection, tables, counting)
    counts = {name: Count(value=due, is_exact=due <= most) for name, due in counted}
    many = [name for name, count in counts.items() if not count.is_exact]
    for name in many[:MAX_ESTIMATED]:
        estimate = planned_rows(connection, _due(tables, name, now))
        counts[name] = Count(value=max(most, estimate), is_exact=False)
    return counts


def _due(tables: Tables, name: Any, now: datetime) -> Select[Any]:
    queue = tables.queue
    due = queue.c.destination == name, queue.c.due_at <= now, queue.c.known.is_(None)
    return select(queue.c.id).where(*due, is_claimable(tables, now))


def _operations_of(
    connection: Connection,
    tables: Tables,
    states: Sequence[DestinationState],
    dispatchers: Sequence[DispatcherSeen],
    now: datetime,
) -> dict[str, set[str]]:
    """The operations of the first due entries, if the names of destinations do not show who serves them."""
    served = served_destinations(dispatchers)
    unclear = [each.name for each in states if (each.due or each.decided) and service_of(each.name) not in served]
    if not unclear or not live(dispatchers):
        return {}
    queue, entry, most = tables.queue, tables.entry, max(min(COUNTED_IN_ALL // len(states), COUNTED_OF_ONE_MIN), 1)

    def first(name: Any, names: CTE) -> Select[*tuple[Any, ...]]:
        due = queue.c.destination == name, queue.c.due_at <= now, is_claimable(tables, now)
        asked = select(entry.c.operation).join_from(queue, entry, entry.c.id == queue.c.id).where(*due)
        return asked.order_by(queue.c.due_at).limit(most).correlate(names)

    found: dict[str, set[str]] = {}
    for name, operation in rows_of_each(connection, tables, unclear, first):
        found.setdefault(name, set()).add(operation)
    return found


def _count_decided(connection: Connection, tables: Tables) -> dict[str, dict[str | None, int]]:
    """Count the entries whose outcome is known, by an index that contains only these; mostly there are none.

    By destination, and by the callback for which a dispatcher without it has left them to others.
    """
    known, callback = tables.queue.c.known, tables.queue.c.callback
    counted = select(known, callback, func.count()).where(known.is_not(None)).group_by(known, callback)
    found: dict[str, dict[str | None, int]] = {}
    for name, missing, count in connection.execute(counted):
        found.setdefault(name, {})[missing] = count
    return found


def _is_paused(rows: Mapping[str, Row[Any]], name: str) -> bool:
    """Whether it is paused, by itself or with its service: `outbox pause stripe` pauses `stripe:acct_1` too."""
    return any(rows[each].paused for each in (name, service_of(name)) if each in rows)


def _state(
    name: str,
    due: Count,
    decided: int,
    lag: timedelta | None,
    row: Row[Any] | None,
    now: datetime,
    *,
    paused: bool,
) -> DestinationState:
    shared = dict(UNTHROTTLED) if row is None else {column: getattr(row, column) for column in SHARED}
    if shared["cooldown_until"] is not None and shared["cooldown_until"] <= now:
        shared["cooldown_until"] = None
    taken = () if row is None else still_taken(on_record(row.permits_taken), now)
    return DestinationState(
        name=name,
        due=due.value,
        due_is_exact=due.is_exact,
        decided=decided,
        oldest_due_seconds=None if lag is None else lag.total_seconds(),
        paused=paused,
        permits_taken=sum(each.permits for each in taken),
        waits_because=None,
        **shared,
    )
