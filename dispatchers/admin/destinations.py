"""Each destination's backlog, throttling, and the operator decisions about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row, func, select

from dispatchers.flow_control.state import on_record, service_of, still_taken
from dispatchers.store.queries import destination_names, is_claimable, read_lags
from outbox.sql.dialect import database_now
from outbox.sql.schema import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationState:
    """One destination: its backlog and its flow control.

    due: how many entries could be claimed now if the destination were not throttled.
    oldest_due_seconds: how long the oldest of them has waited; None if there is none.
    paused: whether an operator has paused it.
    cooldown_until: the end of a Retry-After cooldown.
    breaker: `open` lets no entry through until `breaker_until`. Then `half_open` lets one entry through, as a probe.
    breaker_failures: the number of failures in a row.
    rate_per_second: the rate of all dispatchers together.
    permits_max: the limit of concurrent sends of all dispatchers together.
    permits_taken: how many of these permits are in use.
    decided_by, decided_at: who paused or resumed it last, and when.
    """

    name: str
    due: int
    oldest_due_seconds: float | None
    paused: bool
    paused_reason: str | None
    cooldown_until: datetime | None
    breaker: str
    breaker_until: datetime | None
    breaker_failures: int
    rate_per_second: float | None
    permits_max: int | None
    permits_taken: int
    decided_by: str | None
    decided_at: datetime | None


SHARED = (
    *("paused_reason", "cooldown_until", "breaker", "breaker_until", "breaker_failures", "rate_per_second"),
    *("permits_max", "decided_by", "decided_at"),
)
"""What a state has of the destination's row, as it is."""

UNTHROTTLED: Mapping[str, Any] = dict.fromkeys(SHARED) | {"breaker": "closed", "breaker_failures": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationStates:
    """All of them, at one moment of the database's clock."""

    at: datetime
    destinations: list[DestinationState]


def read_destinations(connection: Connection, tables: Tables) -> DestinationStates:
    """Every destination that has unsettled entries, or that was throttled once. Counts what is due."""
    now = database_now(connection)
    queue, names = tables.queue, destination_names(tables)
    due = select(func.count()).where(
        queue.c.destination == names.c.name, queue.c.due_at <= now, is_claimable(tables, now)
    )
    counted = select(names.c.name, due.scalar_subquery().label("due")).where(names.c.name.is_not(None))
    counts = {row.name: row.due for row in connection.execute(counted)}
    rows = {row.name: row for row in connection.execute(select(tables.destination))}
    lags = read_lags(connection, tables, now)
    states = [
        _state(name, counts.get(name, 0), lags.get(name), rows.get(name), now, paused=_is_paused(rows, name))
        for name in sorted({*counts, *rows})
    ]
    return DestinationStates(at=now, destinations=states)


def _is_paused(rows: Mapping[str, Row[Any]], name: str) -> bool:
    """By itself, or with its service: `outbox pause stripe` pauses `stripe:acct_1` too."""
    return any(rows[each].paused for each in (name, service_of(name)) if each in rows)


def _state(
    name: str, due: int, lag: timedelta | None, row: Row[Any] | None, now: datetime, *, paused: bool
) -> DestinationState:
    shared = dict(UNTHROTTLED) if row is None else {column: getattr(row, column) for column in SHARED}
    if shared["cooldown_until"] is not None and shared["cooldown_until"] <= now:
        shared["cooldown_until"] = None
    taken = () if row is None else still_taken(on_record(row.permits_taken), now)
    return DestinationState(
        name=name,
        due=due,
        oldest_due_seconds=None if lag is None else lag.total_seconds(),
        paused=paused,
        permits_taken=sum(each.permits for each in taken),
        **shared,
    )
