"""Reads the destinations' rows at a sweep, and locks them while a claim is decided. For every database.

A dispatcher skips a row that another transaction has locked, and never waits for it: a dispatcher that was stopped in the middle
of a transaction must not stop the others.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, bindparam, or_, select, update

from dispatchers.flow_control.quota import Quota
from dispatchers.flow_control.state import (
    FlowState,
    FlowStates,
    FlowUpdate,
    Limits,
    admitted,
    as_record,
    claimed,
    heard,
    limits_of,
    on_record,
)
from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.transitions import ClaimedEntry
from outbox.sql.clock import clock, database_now
from outbox.sql.dialect import dialect_of
from outbox.sql.schema.tables import MAX_STATEMENTS, Tables

SHARED = (
    *("cooldown_until", "breaker", "breaker_until", "breaker_failures", "breaker_token"),
    *("rate_at", "rate_per_second", "max_permits"),
)
"""The columns that dispatchers write, except `permits_taken`."""


def is_throttled(tables: Tables, now: Any) -> ColumnElement[bool]:
    """The condition that no entry of the destination may be claimed, except a probe."""
    destination = tables.destination
    return or_(destination.c.paused, destination.c.breaker != "closed", destination.c.cooldown_until > now)


def read_flow_states(connection: Connection, tables: Tables) -> FlowStates:
    """The states of the destinations that are throttled, have failures, or were paused at some time."""
    now = database_now(connection)
    rows = connection.execute(_noteworthy(tables), {"now": now})
    return FlowStates(now, {row.name: _flow(row) for row in rows})


@lru_cache(MAX_STATEMENTS)
def _noteworthy(tables: Tables) -> Select[Any]:
    destination = tables.destination
    throttled = is_throttled(tables, bindparam("now", type_=destination.c.cooldown_until.type))
    had_news = or_(destination.c.breaker_failures > 0, destination.c.decided_at.is_not(None))
    return select(destination).where(or_(throttled, had_news))


def make_rows(connection: Connection, tables: Tables, names: Iterable[str]) -> None:
    """Insert the missing rows of these destinations."""
    new = {"paused": False, "breaker": "closed", "breaker_failures": 0, "changed_at": clock()}
    for name in sorted(names):
        connection.execute(dialect_of(connection).insert_unless_present(tables.destination).values(name=name, **new))


def claim_throttled(
    connection: Connection,
    tables: Tables,
    request: ClaimRequest,
    flow_update: FlowUpdate,
    claim: Callable[[ClaimRequest], list[ClaimedEntry]],
) -> tuple[list[ClaimedEntry], FlowStates]:
    """Store the news, then claim what may be sent. Also returns the new states of the rows that this transaction has locked."""
    found = _lock(connection, tables, flow_update.decided.union(flow_update.news))

    def limits(name: str) -> Limits:
        return limits_of(flow_update.limits, name)

    states = {
        name: heard(row, flow_update.news[name], limits(name), found.at) if name in flow_update.news else row
        for name, row in found.of.items()
    }
    quotas = list(_admitted(request.quotas, flow_update, states, found.at))
    taken = claim(replace(request, quotas=quotas)) if quotas else []
    counts = Counter(entry.destination for entry in taken if not entry.is_known)  # the others are not sent
    after = {
        name: claimed(row, limits(name), found.at, counts[name], request.token, request.lease)
        for name, row in states.items()
    }
    _write(connection, tables, {name: row for name, row in after.items() if row != found.of[name]})
    return taken, FlowStates(found.at, after)


def _admitted(
    quotas: Sequence[Quota], flow_update: FlowUpdate, rows: Mapping[str, FlowState], now: datetime
) -> Iterable[Quota]:
    for quota in quotas:
        name = quota.destination
        if quota.known:
            yield quota
        elif name in rows:
            permits = admitted(rows[name], limits_of(flow_update.limits, name), now, quota.permits)
            if permits:
                yield quota._replace(permits=permits, admitted=True)
        elif name not in flow_update.decided:
            yield quota  # the claim's statement checks the destination's row


def _lock(connection: Connection, tables: Tables, names: Iterable[str]) -> FlowStates:
    rows = connection.execute(_locking(tables), {"names": sorted(names)}).all()
    now = rows[0].now if rows else database_now(connection)
    return FlowStates(now, {row.name: _flow(row) for row in rows})


@lru_cache(MAX_STATEMENTS)
def _locking(tables: Tables) -> Select[Any]:
    destination = tables.destination
    named = destination.c.name.in_(bindparam("names", expanding=True))
    rows = select(destination, clock().label("now")).where(named).order_by(destination.c.name)
    return rows.with_for_update(skip_locked=True)


def _write(connection: Connection, tables: Tables, rows: Mapping[str, FlowState]) -> None:
    if not rows:
        return
    destination = tables.destination
    values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in (*SHARED, "permits_taken")}
    statement = (
        update(destination).where(destination.c.name == bindparam("of")).values(values | {"changed_at": clock()})
    )
    connection.execute(statement, [{"of": name} | _written(row) for name, row in rows.items()])


def _written(row: FlowState) -> dict[str, Any]:
    shared = {f"new_{column}": getattr(row, column) for column in SHARED}
    return shared | {"new_permits_taken": as_record(row.permits_taken)}


def _flow(row: Row[Any]) -> FlowState:
    shared = {name: getattr(row, name) for name in SHARED}
    return FlowState(
        paused=row.paused,
        resumed_at=None if row.paused else row.decided_at,
        permits_taken=on_record(row.permits_taken),
        **shared,
    )
