"""The destinations' rows: read at the sweep, and locked while a claim is decided. For every database alike.

A row that somebody else has locked is passed over, never waited for: a dispatcher that was stopped in the middle of a
transaction must not stop the others.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, bindparam, or_, select, update

from dispatchers.flow_control.permits import as_record, on_record
from dispatchers.flow_control.quota import Want
from dispatchers.flow_control.state import Limits, Pressing, Pressure, Pressures, admitted, claimed, heard, limits_of
from dispatchers.store.claim_request import ClaimRequest
from dispatchers.transitions import Claimed
from outbox.sql.dialect import clock, insert_unless_present
from outbox.sql.schema import Tables

SHARED = (
    *("cool_until", "breaker", "breaker_until", "breaker_failures", "breaker_token"),
    *("rate_at", "rate_per_second", "slots_max"),
)
"""The columns that dispatchers write, beside `slots_taken`."""


def is_pressed(tables: Tables, now: Any) -> ColumnElement[bool]:
    """Whether a destination's row keeps everything from being claimed, but a probe."""
    destination = tables.destination
    return or_(destination.c.paused, destination.c.breaker != "closed", destination.c.cool_until > now)


def read_pressures(connection: Connection, tables: Tables) -> Pressures:
    """Of every destination that has, or had, something to tell."""
    destination = tables.destination
    now = connection.execute(select(clock())).scalar_one()
    telling = or_(is_pressed(tables, now), destination.c.breaker_failures > 0, destination.c.decided_at.is_not(None))
    rows = connection.execute(select(destination).where(telling))
    return Pressures(now, {row.name: _pressure(row) for row in rows})


def make_rows(connection: Connection, tables: Tables, names: Iterable[str]) -> None:
    """Rows for these destinations, where there are none yet."""
    new = {"paused": False, "breaker": "closed", "breaker_failures": 0, "changed_at": clock()}
    for name in sorted(names):
        connection.execute(insert_unless_present(connection.dialect.name, tables.destination).values(name=name, **new))


def claim_under_pressure(
    connection: Connection,
    tables: Tables,
    request: ClaimRequest,
    pressing: Pressing,
    claim: Callable[[ClaimRequest], list[Claimed]],
) -> tuple[list[Claimed], Pressures]:
    """Write down the news, and claim what may then be sent. Returns the rows as they have become, but those of others."""
    found = _lock(connection, tables, pressing.decided.union(pressing.news))

    def limits(name: str) -> Limits:
        return limits_of(pressing.limits, name)

    told = {name: _heard(pressing, name, row, found.at) for name, row in found.of.items()}
    wants = list(_admitted(request.wants, pressing, told, found.at))
    taken = claim(replace(request, wants=wants)) if wants else []
    counts = Counter(entry.destination for entry in taken)
    after = {
        name: claimed(row, limits(name), found.at, counts[name], request.token, request.lease)
        for name, row in told.items()
    }
    _write(connection, tables, {name: row for name, row in after.items() if row != found.of[name]})
    return taken, Pressures(found.at, after)


def _heard(pressing: Pressing, name: str, row: Pressure, now: datetime) -> Pressure:
    news = pressing.news.get(name)
    return row if news is None else heard(row, news, limits_of(pressing.limits, name), now)


def _admitted(wants: Sequence[Want], pressing: Pressing, rows: Mapping[str, Pressure], now: datetime) -> Iterable[Want]:
    for want in wants:
        name = want.destination
        if name in rows:
            slots = admitted(rows[name], limits_of(pressing.limits, name), now, want.slots)
            if slots:
                yield want._replace(slots=slots, admitted=True)
        elif name not in pressing.decided:
            yield want  # the claim looks at its row, if it has one


def _lock(connection: Connection, tables: Tables, names: Iterable[str]) -> Pressures:
    destination = tables.destination
    statement = (
        select(destination, clock().label("now"))
        .where(destination.c.name.in_(sorted(names)))
        .order_by(destination.c.name)
        .with_for_update(skip_locked=True)
    )
    rows = connection.execute(statement).all()
    now = rows[0].now if rows else connection.execute(select(clock())).scalar_one()
    return Pressures(now, {row.name: _pressure(row) for row in rows})


def _write(connection: Connection, tables: Tables, rows: Mapping[str, Pressure]) -> None:
    if not rows:
        return
    destination = tables.destination
    values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in (*SHARED, "slots_taken")}
    statement = (
        update(destination).where(destination.c.name == bindparam("of")).values(values | {"changed_at": clock()})
    )
    connection.execute(statement, [{"of": name} | _written(row) for name, row in rows.items()])


def _written(row: Pressure) -> dict[str, Any]:
    shared = {f"new_{column}": getattr(row, column) for column in SHARED}
    return shared | {"new_slots_taken": as_record(row.slots_taken)}


def _pressure(row: Row[Any]) -> Pressure:
    shared = {name: getattr(row, name) for name in SHARED}
    return Pressure(
        paused=row.paused,
        resumed_at=None if row.paused else row.decided_at,
        slots_taken=on_record(row.slots_taken),
        **shared,
    )
