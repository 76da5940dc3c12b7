"""The dispatcher's flow control: limits, services that hang, and a store that breaks."""

import asyncio
import threading
from datetime import timedelta

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database
from support.entries import (
    HOUR,
    Blocking,
    WrappedStore,
    dispatcher,
    pumping,
    put,
    put_one,
    queue_row,
    run_once,
    settlement_row,
    states,
    until_true,
)

import outbox
from dispatchers import Deferred, Delivered, Delivery, Operations, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.store.database import DatabaseStore

# --- flow control


def test_the_limits_on_what_is_in_flight_hold(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=20)
    put(database, ob, "mail.send", count=20)
    waiting: dict[str, list[asyncio.Event]] = {"crm": [], "mail": []}
    most: list[tuple[int, int]] = []  # at one destination, and at both

    class Gated(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            gate = asyncio.Event()
            here = waiting[delivery.operation.partition(".")[0]]
            here.append(gate)
            most.append((len(here), sum(map(len, waiting.values()))))
            await gate.wait()
            here.remove(gate)
            return await super().send(delivery)

    async def main() -> None:
        service = Gated()
        working = dispatcher(database, ob, adapters={"crm": service, "mail": service}, concurrency=4, max_in_flight=6)
        pump = asyncio.create_task(pumping(working, lambda: states(database) == {"delivered": 40}))
        for sent in range(40):  # one leaves at a time, and another may come
            await until_true(lambda: sum(map(len, waiting.values())) >= min(6, 40 - sent))  # noqa: B023
            max(waiting.values(), key=len)[0].set()
            await until_true(lambda: len(service.deliveries) > sent)  # noqa: B023
        await pump

    asyncio.run(main())

    assert max(at_one for at_one, _ in most) == 4
    assert max(at_both for _, at_both in most) == 6


def test_a_destination_that_hangs_starves_no_other(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=20)
    mails = put(database, ob, "mail.send", count=20)
    dead, mail = Blocking(), MemoryAdapter()

    async def main() -> None:
        working = dispatcher(database, ob, adapters={"crm": dead, "mail": mail}, concurrency=4)
        await pumping(working, lambda: states(database)["delivered"] == len(mails) and not dead.released.set())

    asyncio.run(main())

    assert {delivery.id for delivery in mail.deliveries} == set(mails)


def test_sync_operations_that_hang_starve_no_other_destination(database: Database, ob: outbox.Outbox) -> None:
    effects = Operations()
    hanging, released = threading.Semaphore(0), threading.Event()

    @effects.operation("crm")
    def hang(delivery: Delivery) -> Outcome:
        hanging.release()
        released.wait(60)
        return Delivered()

    put(database, ob, count=40)
    working = dispatcher(database, ob, include=[effects], adapters={"mail": MemoryAdapter()}, concurrency=4)

    async def main() -> None:
        pump = asyncio.create_task(pumping(working, released.is_set))
        for _ in range(4):
            await asyncio.to_thread(hanging.acquire, timeout=60)
        put(database, ob, "mail.send")
        try:
            await until_true(lambda: states(database)["delivered"] == 1)
        finally:
            released.set()
            await pump

    asyncio.run(main())


def test_no_sync_operation_waits_for_the_thread_of_another(database: Database, ob: outbox.Outbox) -> None:
    """Such a wait would be part of its timeout."""
    effects, at_once = Operations(), threading.Barrier(48)  # more than asyncio's own pool has threads

    @effects.operation("crm", timeout=timedelta(seconds=40))
    def meet(delivery: Delivery) -> Outcome:
        at_once.wait(30)
        return Delivered()

    put(database, ob, count=at_once.parties)

    run_once(database, ob, include=[effects], concurrency=at_once.parties)

    assert states(database) == {"delivered": at_once.parties}


def test_a_send_that_outlives_its_lease_costs_no_permit(database: Database, ob: outbox.Outbox) -> None:
    class Stubborn(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            outcome = await super().send(delivery)
            while len(self.deliveries) == 1:
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    continue  # as code that catches everything does
            return outcome

    put(database, ob, count=1)
    adapter = Stubborn(timeout=timedelta(milliseconds=50))
    working = dispatcher(
        database,
        ob,
        adapters={"crm": adapter},
        lease=timedelta(milliseconds=200),
        margin=timedelta(milliseconds=20),
        concurrency=2,
    )

    async def main() -> None:
        await pumping(working, lambda: states(database) == {"delivered": 1})
        put(database, ob, count=4)
        adapter.timeout = timedelta(seconds=1)
        await pumping(working, lambda: states(database) == {"delivered": 5})

    asyncio.run(main())

    assert states(database) == {"delivered": 5}
    assert set(adapter.effects.values()) == {1}


# --- a store that breaks


@pytest.fixture
def one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a store's fates meet its exchanges in order."""
    monkeypatch.setattr("dispatchers.pipeline.claim_loops.CLAIM_LOOPS", 1)


@pytest.mark.usefixtures("one_group")
@pytest.mark.parametrize(
    "fates",
    [["", "before"], ["", "after"], ["", "before", "before", "after"], ["before", "", "after", "before"]],
    ids=", ".join,
)
def test_outcomes_are_kept_while_the_database_is_down_and_settled_once(
    database: Database, ob: outbox.Outbox, fates: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.pipeline.claim_loops.STORE_RETRY_SECONDS", (0.01, 0.01))
    sent, waiting = put_one(database, ob, destination="a"), put_one(database, ob, destination="a")
    adapter = MemoryAdapter(lambda delivery: Delivered() if delivery.id == sent else Deferred("busy", after=HOUR))
    store = WrappedStore(DatabaseStore(database.engine, ob.configuration), *fates)
    working = dispatcher(None, ob, adapters={"crm": adapter}, store=store)

    asyncio.run(pumping(working, lambda: states(database) == {"delivered": 1, "retry": 1} and not store.failing))

    assert len(adapter.deliveries) == 2
    row, settled = queue_row(database, waiting), settlement_row(database, sent)
    assert (row.deliveries, row.attempts) == (1, 0)
    assert (settled.deliveries, settled.attempts) == (1, 1)
    assert len(database.rows(TABLES.event)) == 1


@pytest.mark.usefixtures("one_group")
def test_run_once_raises_the_databases_error_and_the_next_call_settles(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)
    adapter = MemoryAdapter()
    store = WrappedStore(DatabaseStore(database.engine, ob.configuration), "", "before")
    working = dispatcher(None, ob, adapters={"crm": adapter}, store=store)

    with pytest.raises(sa.exc.OperationalError):
        asyncio.run(working.run_once())
    assert states(database) == {"sending": 3}

    assert asyncio.run(working.run_once()) == 3
    assert states(database) == {"delivered": 3}
    assert len(adapter.deliveries) == 3


def test_a_database_error_is_logged_without_what_was_to_be_stored(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.pipeline.claim_loops.STORE_RETRY_SECONDS", (0.01, 0.01))
    put(database, ob)
    table, away = TABLES.settlement.name, "elsewhere"

    def answer(delivery: Delivery) -> Delivered:
        """After the claim, which reads the settlements too."""
        database.execute(sa.text(f"ALTER TABLE {table} RENAME TO {away}"))
        return Delivered({"email": "ada@example.com"})

    working = dispatcher(database, ob, adapters={"crm": MemoryAdapter(answer)})

    def repaired() -> bool:
        if "the database " in caplog.text:
            database.execute(sa.text(f"ALTER TABLE {away} RENAME TO {table}"))
            return True
        return False

    asyncio.run(pumping(working, repaired))

    assert states(database) == {"delivered": 1}
    if (
        database.engine.dialect.name == "postgresql"
    ):  # which says what is wrong: an operator should not suspect the network
        assert "database error: the outbox's table 'outbox_settlement' does not exist" in caplog.text
    assert "ada@example.com" not in caplog.text
