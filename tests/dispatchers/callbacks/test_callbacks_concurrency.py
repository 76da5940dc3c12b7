"""Callbacks at the same time, on few connections or permits, and across event loops: each commits once and stalls no other."""

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support.callbacks import Breaking, Gate, Shop
from support.database import Database
from support.entries import claims_again, dispatcher, pumping, put, put_one, states, until_true

import outbox
from dispatchers import Operations
from dispatchers.adapters import MemoryAdapter
from dispatchers.callbacks import Settlement

pytestmark = pytest.mark.on_mariadb


@pytest.fixture(params=["sync", "async"])
def shop(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Shop:
    """The app with callbacks on a Session, and on an AsyncSession."""
    return Shop(database, ob, is_async=request.param == "async")


@pytest.mark.differs("portable", "a callback is called again after 40001, and commits once")
def test_two_dispatchers_run_each_callback_once(shop: Shop) -> None:
    put(shop.database, shop.ob, count=20)
    shop.on_settled(shop.pay)
    adapter = MemoryAdapter()

    async def main() -> list[int]:
        engines = [shop.database.async_engine() if shop.is_async else shop.database.new_engine() for _ in range(2)]
        both = [shop.dispatcher(engine, adapters={"crm": adapter}, concurrency=8) for engine in engines]
        return await asyncio.gather(*(each.run_once() for each in both))

    assert sum(asyncio.run(main())) == 20

    assert len(shop.database.orders) == len(shop.seen) == 20


@pytest.mark.every_value
@pytest.mark.parametrize("fates", [("before", "before"), ("conflict",), ("after",)], ids=" ".join)
def test_a_database_that_goes_away_at_the_settling_gets_the_effects_once(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, fates: tuple[str, ...]
) -> None:
    put_one(database, ob)
    shop = Shop(database, ob, is_async=False)
    shop.on_settled(shop.pay)
    adapter = MemoryAdapter()

    shop.run_once(store=Breaking(database.engine, ob, *fates), adapters={"crm": adapter})

    assert states(database) == {"delivered": 1, "pending": 1}
    assert len(adapter.deliveries) == len(database.orders) == len(shop.seen) == 1
    assert "its callback raised" not in caplog.text


def test_many_callbacks_make_do_with_a_pool_of_one_connection(shop: Shop) -> None:
    put(shop.database, shop.ob, count=20)
    shop.on_settled(shop.pay)
    pool: dict[str, Any] = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 20}

    async def main() -> int:
        if not shop.is_async:
            return await shop.dispatcher(
                shop.database.new_engine(poolclass=sa.QueuePool, **pool), adapters={"crm": MemoryAdapter()}
            ).run_once()
        engine = create_async_engine(shop.database.async_url, poolclass=sa.AsyncAdaptedQueuePool, **pool)
        working = shop.dispatcher(engine, adapters={"crm": MemoryAdapter()})
        settled = await working.run_once()
        await working.close()
        await engine.dispose()
        return settled

    assert asyncio.run(asyncio.wait_for(main(), 60)) == 20

    assert len(shop.database.orders) == 20


def test_a_slow_callback_stalls_no_entry_without_one(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=10)
    put(postgresql, ob, "crm.note", count=50)
    put(postgresql, ob, "mail.send", count=50)
    shop, gate = Shop(postgresql, ob, is_async=False), Gate()
    shop.on_settled(gate)
    working = shop.dispatcher(adapters={"crm": MemoryAdapter(), "mail": MemoryAdapter()})

    async def main() -> None:
        pump = asyncio.create_task(pumping(working, lambda: states(postgresql)["delivered"] == 110))
        try:
            await until_true(lambda: states(postgresql)["delivered"] == 100)
        finally:
            gate.opened.set()
            await pump

    asyncio.run(main())

    assert len(shop.seen) == 10


def test_callbacks_that_wait_keep_the_permits_of_their_destination(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=30)
    shop, gate = Shop(postgresql, ob, is_async=False), Gate()
    shop.on_settled(gate)
    adapter, mail = MemoryAdapter(), MemoryAdapter()
    working = shop.dispatcher(adapters={"crm": adapter, "mail": mail}, concurrency=6)

    async def main() -> None:
        pump = asyncio.create_task(pumping(working, lambda: states(postgresql)["delivered"] == 32))
        await until_true(lambda: gate.entered == 4)
        await claims_again(postgresql, ob, mail)
        sent = len(adapter.deliveries)
        gate.opened.set()
        await pump
        assert sent == 6

    asyncio.run(main())


def test_run_once_ends_though_each_callback_enqueues_another(shop: Shop) -> None:
    put_one(shop.database, shop.ob, parent="invoice:42")

    def again(session: Session, settlement: Settlement) -> None:
        number = f"{settlement.entry.discriminator}+"
        shop.ob.enqueue(session, "crm.upsert", {}, discriminator=number)

    shop.on_settled(again)

    counts = [shop.run_once(adapters={"crm": MemoryAdapter()}) for _ in range(3)]

    assert counts == [1, 1, 1]
    assert states(shop.database) == {"delivered": 3, "pending": 1}


def test_what_was_cut_off_with_its_event_loop_settles_in_the_next(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=8)
    effects = Operations()
    hanging = [True] * 4
    seen: list[Settlement] = []

    @effects.on_settled("crm.upsert")
    async def settled(session: AsyncSession, settlement: Settlement) -> None:
        if hanging and hanging.pop():
            await asyncio.sleep(60)
        await session.run_sync(Shop(postgresql, ob, is_async=True).pay, settlement)
        seen.append(settlement)

    adapter = MemoryAdapter()
    working = dispatcher(postgresql.async_engine(), ob, include=[effects], adapters={"crm": adapter})

    async def cut_off() -> None:
        call = asyncio.create_task(working.run_once())
        await until_true(lambda: not hanging)
        call.cancel()

    asyncio.run(cut_off())
    assert (states(postgresql)["delivered"], seen) == (0, [])
    asyncio.run(asyncio.wait_for(working.run_once(), 60))

    assert len(seen) == len(postgresql.orders) == len(adapter.deliveries) == 8
    assert states(postgresql) == {"delivered": 8, "pending": 8}
