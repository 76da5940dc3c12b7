"""A decision that needs no send takes effect at the next round, whatever holds the entry's destination; nothing is sent."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from support.callbacks import Shop
from support.database import TABLES, Database
from support.decisions import decide
from support.entries import HOUR, Blocking, age, dispatcher, pumping, put, put_one, run_once, state, states, until_true
from support.ordering import put_in_group

import outbox
import outbox.errors
from dispatchers import Delivery, Limits, Outcome, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import decisions
from dispatchers.admin.read.destinations import read_destinations
from dispatchers.admin.read.overview import read_overview
from dispatchers.admin.read.summary import read_summary
from dispatchers.errors import Suspended
from dispatchers.flow_control.state import Taken, as_record
from dispatchers.pipeline import claim_loops
from dispatchers.store.queue.throttling import make_rows
from dispatchers.stored_outcome import Known, write_outcome
from outbox.sql.clock import clock, clock_plus, database_now
from outbox.times import NEVER

pytestmark = pytest.mark.on_mariadb

RATED = {"crm": Limits(rate=1, burst=1)}
ONE_IN_ALL = {"crm": Limits(total_concurrency=1)}


def hold(database: Database, **values: Any) -> None:
    with database.owner() as connection:
        make_rows(connection, TABLES, ["crm"])
        connection.execute(sa.update(TABLES.destination).where(TABLES.destination.c.name == "crm").values(values))


def pause(database: Database) -> None:
    hold(database, paused=True, decided_by="ada", decided_at=clock())


def open_breaker(database: Database) -> None:
    hold(database, breaker="open", breaker_failures=10, breaker_until=clock_plus(HOUR))


def half_open_breaker(database: Database) -> None:
    hold(database, breaker="half_open", breaker_failures=10, breaker_until=clock_plus(HOUR), breaker_token=uuid4())


def cool_down(database: Database) -> None:
    hold(database, cooldown_until=clock_plus(HOUR))


def use_up_rate(database: Database) -> None:
    hold(database, rate_at=clock_plus(HOUR), rate_per_second=1.0)


def take_permits(database: Database) -> None:
    with database.observer.connect() as connection:
        until = database_now(connection) + HOUR
    hold(database, permits_taken=as_record([Taken(uuid4(), 1, until)]), max_permits=1)


HOLDS: dict[str, tuple[Callable[[Database], None], dict[str, Limits]]] = {
    "paused": (pause, {}),
    "breaker": (open_breaker, {}),
    "probing": (half_open_breaker, {}),
    "cooldown": (cool_down, {}),
    "rate": (use_up_rate, RATED),
    "permits": (take_permits, ONE_IN_ALL),
}
DECIDED = {
    "cancel": "cancelled",
    "happened": "delivered",
    "did_not_happen": "failed",
    "send_again": "pending",
    "retry": "pending",
    "release": "pending",
}
"""Each decision, with the entry's state after the next round of a dispatcher that may send nothing."""


def decided(database: Database, ob: outbox.Outbox, held: Callable[[Database], None]) -> dict[str, UUID]:
    """An entry for each decision, which is made while the destination is held; the service was sent what is uncertain."""
    doubtful = put(database, ob, count=3)
    run_once(database, ob, adapters={"crm": MemoryAdapter(lambda _: Unknown("no answer"), window=None)})
    ids = dict(zip(("happened", "did_not_happen", "send_again"), doubtful, strict=True))
    ids |= {name: put_one(database, ob) for name in ("cancel", "retry", "release")}
    values = {"suspended_reason": "a clone", "due_at": NEVER}
    database.execute(sa.update(TABLES.queue).where(TABLES.queue.c.id == ids["release"]).values(values))
    held(database)
    for name in ("cancel", "retry", "release"):
        decide(database, getattr(decisions, name), ids[name])
    for verdict in ("happened", "did_not_happen", "send_again"):
        decide(database, decisions.resolve, ids[verdict], verdict)
    return ids


def shown(database: Database) -> dict[str, Any]:
    """What operators are shown of the destination: by `outbox status`, `outbox destinations` and the dashboard."""
    with database.engine.connect() as connection:
        overview, summary = read_overview(connection, TABLES), read_summary(connection, TABLES)
        listed = read_destinations(connection, TABLES)
    (of_status,) = (each for each in overview.destinations if each.name == "crm")
    (of_destinations,) = (each for each in listed.destinations if each.name == "crm")
    (of_dashboard,) = (each for each in summary.destinations if each.name == "crm")
    assert of_destinations.decided == of_dashboard.decided == of_status.decided == overview.decided
    assert of_destinations.due == of_dashboard.due
    assert summary.uncertain.value == overview.uncertain == of_status.states.get("uncertain", 0)
    return {"states": of_status.states, "decided": of_status.decided, "due": of_destinations.due}


@pytest.mark.every_value
@pytest.mark.parametrize("name", HOLDS)
def test_what_needs_no_send_is_settled_while_sends_are_held(database: Database, ob: outbox.Outbox, name: str) -> None:
    held, limits = HOLDS[name]
    ids = decided(database, ob, held)
    before = database.rows(TABLES.destination)
    assert shown(database) == {"states": {"pending": 2}, "decided": 4, "due": 2}
    service = MemoryAdapter(window=None)

    assert run_once(database, ob, adapters={"crm": service}, limits=limits) == 4

    assert {what: state(database, id) for what, id in ids.items()} == DECIDED
    assert shown(database) == {"states": {"pending": 3}, "decided": 0, "due": 2}  # one waits for earlier senders
    assert service.deliveries == []
    assert database.rows(TABLES.destination) == before, "no probe, no rate and no permit was used"


def test_a_paused_destination_runs_the_callback_of_a_cancellation(database: Database, ob: outbox.Outbox) -> None:
    shop = Shop(database, ob, is_async=False)
    shop.on_settled(shop.pay)
    id = put_one(database, ob)
    pause(database)
    decide(database, decisions.cancel, id)
    service = MemoryAdapter()

    shop.run_once(adapters={"crm": service})

    assert (state(database, id), len(database.orders), service.deliveries) == ("cancelled", 1, [])


def test_while_sending_is_suspended_a_decision_waits_and_is_counted(database: Database, ob: outbox.Outbox) -> None:
    ids = decided(database, ob, lambda _: None)
    database.execute(sa.update(TABLES.meta).values(suspended_reason="restored"))
    service = MemoryAdapter(window=None)

    with pytest.raises(Suspended):
        run_once(database, ob, adapters={"crm": service})

    assert shown(database) == {"states": {"pending": 2}, "decided": 4, "due": 2}
    database.execute(sa.update(TABLES.meta).values(suspended_reason=None))
    pause(database)
    assert run_once(database, ob, adapters={"crm": service}) == 4
    assert {what: state(database, id) for what, id in ids.items()} == DECIDED
    assert service.deliveries == []


@pytest.mark.parametrize("others", [1, 30, 60])
def test_decisions_that_others_must_carry_out_delay_no_other(
    database: Database, ob: outbox.Outbox, others: int
) -> None:
    """Whatever their number, and in whatever order the database lists their destinations."""
    doubtful = [put_one(database, ob, f"{'az'[number % 2]}{number}.upsert") for number in range(others)]
    sent = {"state": "uncertain", "maybe_sent": True, "attempts": 1, "deliveries": 1, "due_at": NEVER}
    database.execute(sa.update(TABLES.queue).values(sent))
    for each in doubtful:
        decide(database, decisions.resolve, each, "happened")
    seconds, service = [0.0], MemoryAdapter()
    working = dispatcher(database, ob, adapters={"crm": service}, clock=lambda: time.monotonic() + seconds[0])
    assert asyncio.run(working.run_once()) == 0, "it has found out that it does not serve them"
    age(database, timedelta(minutes=1))
    seconds[0] = 60.0
    id = put_one(database, ob)
    pause(database)
    decide(database, decisions.cancel, id)

    assert asyncio.run(working.run_once()) == 1

    assert (state(database, id), service.deliveries) == ("cancelled", [])
    assert states(database)["uncertain"] == others


def test_an_entry_of_a_blocked_group_is_cancelled_at_once(database: Database, ob: outbox.Outbox) -> None:
    first, second, third = put_in_group(database, ob, "1", "2", "3")
    service = MemoryAdapter([Unknown("no answer")], window=None)
    run_once(database, ob, adapters={"crm": service})
    pause(database)
    decide(database, decisions.cancel, second)

    run_once(database, ob, adapters={"crm": service})

    assert [state(database, id) for id in (first, second, third)] == ["uncertain", "cancelled", "pending"]
    assert len(service.deliveries) == 1


@pytest.mark.parametrize("max_in_flight", [1, 1000])
def test_600_decisions_overtake_the_backlog_of_a_slow_service(
    database: Database, ob: outbox.Outbox, max_in_flight: int
) -> None:
    started, released = asyncio.Event(), asyncio.Event()

    class Slow(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            started.set()
            await released.wait()
            return await super().send(delivery)

    backlog = put(database, ob, count=20)
    wrong = put(database, ob, count=600)
    service = Slow()

    async def main() -> None:
        limits = {"crm": Limits(concurrency=1)}
        working = dispatcher(database, ob, adapters={"crm": service}, limits=limits, max_in_flight=max_in_flight)
        pump = asyncio.create_task(pumping(working, released.is_set))
        await asyncio.wait_for(started.wait(), 30)
        await asyncio.to_thread(cancel_all, database, wrong)
        await until_true(lambda: states(database)["cancelled"] == len(wrong))
        assert service.deliveries == []
        released.set()
        await pump

    asyncio.run(main())

    assert Counter(state(database, id) for id in backlog).keys() <= {"pending", "retry", "delivered"}
    assert {delivery.id for delivery in service.deliveries} <= set(backlog)


def cancel_all(database: Database, ids: list[UUID]) -> None:
    """As a decision in bulk does: rows of the queue in one transaction, here without the rules."""
    known = Known(state="cancelled", reason="wrong", decided_at=None)
    values = {"outcome": write_outcome("wrong", known=known), "known": "crm", "due_at": clock()}
    for first in range(0, len(ids), 300):
        some = ids[first : first + 300]
        database.execute(sa.update(TABLES.queue).where(TABLES.queue.c.id.in_(some)).values(values))


def test_while_sends_hang_each_sweep_searches_for_decisions(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All permits are used up, so nothing but a sweep finds what is decided; hints announce no decision."""
    monkeypatch.setattr(claim_loops, "IDLE_SWEEP_SECONDS", 3600.0)
    put(postgresql, ob)
    crm = Blocking()

    async def main() -> None:
        working = dispatcher(postgresql, ob, adapters={"crm": crm}, max_in_flight=1)
        pump = asyncio.create_task(pumping(working, lambda: states(postgresql)["delivered"] == 1))
        loops = working._loops
        await until_true(lambda: bool(crm.waiting) and loops._wakeup.is_listening and not loops._has_claimed)
        late = await asyncio.to_thread(put_one, postgresql, ob, due=HOUR)
        await asyncio.to_thread(decide, postgresql, decisions.cancel, late)
        try:
            await until_true(lambda: states(postgresql)["cancelled"] == 1, seconds=20)
        finally:
            crm.released.set()
            await pump

    asyncio.run(main())
