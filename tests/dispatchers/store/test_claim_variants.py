"""The claims of all databases are equal: each row's state, due time and destination, against one model in Python.

The lease's new values, the condition of due entries and that of throttled destinations are written in `claims_postgresql`, in
`rows_plain` with `claims_rows`, and in `rows_mariadb`.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import product
from typing import Any, NamedTuple
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.claims import Bench
from support.database import TABLES
from support.entries import HOUR, LEASE, claim, put, quota

import outbox
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue import claims_rows
from dispatchers.store.queue.claim_request import Forms
from outbox.sql.clock import database_now
from outbox.times import EPOCH, NEVER

pytestmark = [pytest.mark.on_mariadb, pytest.mark.every_value]

MINUTE = timedelta(minutes=1)
OLD, NEW = UUID(int=7), UUID(int=8)
LEASES = (None, -MINUTE, MINUTE)  # no lease, an expired one, a valid one
FORMS = Forms({"crm": "native v1", "crm.upsert": "native v2", "mail": "mail v1"})


@pytest.fixture(params=["postgresql", "portable on postgresql", "sqlite", "mariadb", "portable"])
def bench(request: pytest.FixtureRequest, ob: outbox.Outbox) -> Bench:
    database = request.getfixturevalue(request.param.rpartition(" ")[2])
    store = DatabaseStore(database.engine, ob.configuration)
    if request.param == "portable on postgresql":
        store._exchanges._sql = claims_rows
    return Bench(database, store, ob)


def now_of(bench: Bench) -> datetime:
    with bench.database.owner() as connection:
        return database_now(connection)


def stored(bench: Bench, operation: str, rows: Sequence[dict[str, Any]]) -> list[UUID]:
    """As many entries as there are `rows`, with these values in the queue."""
    ids = put(bench.database, bench.ob, operation, count=len(rows))
    queue = TABLES.queue
    with bench.database.owner() as connection:
        for id, row in zip(ids, rows, strict=True):
            connection.execute(sa.update(queue).where(queue.c.id == id).values(row))
    return ids


def leased(now: datetime, until: timedelta | None) -> dict[str, Any]:
    if until is None:
        return {"state": "retry"}
    return {"state": "sending", "lease_token": OLD, "lease_until": now + until, "leased_at": now - HOUR}


# --- the lease's new values


class Before(NamedTuple):
    """What a row may have before it is leased, beside what no claim reads."""

    until: timedelta | None
    first_leased: bool
    maybe_sent: bool
    in_doubt: bool
    sent_as: str | None
    outcome: str | None


STATES = [
    Before(*values)
    for values in product(
        LEASES[:2], (False, True), (False, True), (False, True), (None, "old v1"), (None, '{"reason": "x"}')
    )
    if values[2] or not values[3]  # doubt only of what may have been sent
]


@pytest.mark.parametrize("operation", ["crm.upsert.first", "crm.other", "sms.send"])
def test_a_claim_gives_each_row_the_values_of_the_model(bench: Bench, operation: str) -> None:
    now, destination = now_of(bench), operation.partition(".")[0]
    rows = [
        leased(now, state.until)
        | {
            "first_leased_at": now - 3 * HOUR if state.first_leased else None,
            "maybe_sent": state.maybe_sent,
            "in_doubt_since": now - 2 * HOUR if state.in_doubt else None,
            "sent_as": state.sent_as,
            "outcome": state.outcome,
            "deliveries": 4,
            "attempts": 3,
        }
        for state in STATES
    ]
    ids = stored(bench, operation, rows)

    claimed = {
        entry.id: entry for entry in claim(bench.store, quota(destination), token=NEW, forms=FORMS, max_entries=500)
    }

    assert claimed.keys() == set(ids)
    for id, state in zip(ids, STATES, strict=True):
        row, entry = bench.row(id), claimed[id]
        assert values_of(row, row.first_leased_at) == expected(state, row.leased_at, now, operation), state
        assert values_of(entry, entry.first_leased_at) == expected(state, row.leased_at, now, operation), state
        assert (row.state, row.lease_until - row.leased_at, row.outcome) == ("sending", LEASE, state.outcome)


def values_of(row: Any, first_leased_at: datetime) -> tuple[Any, ...]:
    names = ("lease_token", "leased_at", "deliveries", "attempts", "maybe_sent", "in_doubt_since", "sent_as")
    return *(getattr(row, name) for name in names), first_leased_at


def expected(state: Before, leased_at: datetime, now: datetime, operation: str) -> tuple[Any, ...]:
    is_taken_over = state.until is not None
    in_doubt_since = now - 2 * HOUR if state.in_doubt else now - HOUR if is_taken_over else None
    form = {"crm.upsert.first": "native v2", "crm.other": "native v1"}.get(operation)
    return (
        NEW,
        leased_at,
        5,
        3 + is_taken_over,
        state.maybe_sent or is_taken_over,
        in_doubt_since,
        state.sent_as if in_doubt_since and state.sent_as else form,
        now - 3 * HOUR if state.first_leased else leased_at,
    )


# --- which entries are due


class Due(NamedTuple):
    """What decides whether an entry may be claimed. wait: from now until it is due; None for never."""

    wait: timedelta | None
    until: timedelta | None
    callback: str | None
    known: bool


DUE = [
    Due(*values)
    for values in product(
        (-3 * HOUR, -90 * MINUTE, -30 * MINUTE, HOUR, None), LEASES, (None, "ours", "another"), (False, True)
    )
]


@pytest.mark.parametrize("unserved", [None, ("crm.upsert",), ("crm.other",)])
@pytest.mark.parametrize("known", [False, True])
def test_a_claim_takes_the_entries_that_the_model_takes(
    bench: Bench, unserved: tuple[str, ...] | None, known: bool
) -> None:
    now = now_of(bench)
    rows = [
        leased(now, due.until)
        | {
            "due_at": NEVER if due.wait is None else now + due.wait,
            "callback": due.callback,
            "known": "crm" if due.known else None,
        }
        for due in DUE
    ]
    ids = stored(bench, "crm.upsert", rows)
    asked = quota(permits=200, due_from=EPOCH if known else now - 2 * HOUR)._replace(known=known)
    request = {"callbacks": ["ours"], "cutoff": now - HOUR, "unserved": unserved}

    claimed = {entry.id for entry in claim(bench.store, asked, **request)}

    serves = unserved != ("crm.upsert",)
    assert claimed == {id for id, due in zip(ids, DUE, strict=True) if serves and is_claimed(due, known=known)}


def is_claimed(due: Due, *, known: bool) -> bool:
    is_due = due.wait == -90 * MINUTE or (known and due.wait == -3 * HOUR)
    return is_due and due.until != MINUTE and due.callback != "another" and (due.known or not known)


# --- which destinations are throttled


@pytest.mark.parametrize("admitted", [False, True])
def test_a_claim_passes_over_the_destinations_that_the_model_holds(bench: Bench, admitted: bool) -> None:
    now = now_of(bench)
    kinds = {
        f"d{number}": kind
        for number, kind in enumerate(
            product((False, True), ("closed", "open", "half_open"), (None, now - HOUR, now + HOUR))
        )
    }
    for name, (paused, breaker, cooldown_until) in kinds.items():
        bench.put(operation="crm.upsert", destination=name)
        row = {"name": name, "paused": paused, "breaker": breaker, "cooldown_until": cooldown_until}
        bench.database.execute(sa.insert(TABLES.destination).values(row | {"breaker_failures": 0, "changed_at": now}))
    bench.put(destination="without a row")
    quotas = [quota(name)._replace(admitted=admitted) for name in (*kinds, "without a row")]

    claimed = {entry.destination for entry in claim(bench.store, *quotas)}

    open_ones = {
        name
        for name, (paused, breaker, cooldown_until) in kinds.items()
        if not paused and breaker == "closed" and (cooldown_until is None or cooldown_until < now)
    }
    assert claimed == {"without a row", *(kinds if admitted else open_ones)}


@pytest.mark.parametrize("reason", [None, "a restore"])
@pytest.mark.parametrize("seen", [0, 3, 4])
def test_a_claim_takes_nothing_from_a_database_that_may_have_forgotten(
    bench: Bench, reason: str | None, seen: int
) -> None:
    bench.put()
    bench.database.execute(sa.insert(TABLES.meta).values(id=1, number=3, suspended_reason=reason))

    claimed = claim(bench.store, quota(), seen=seen)

    assert len(claimed) == (1 if reason is None and seen <= 3 else 0)
