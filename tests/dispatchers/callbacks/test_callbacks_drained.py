"""Callbacks when their dispatcher ends: a drain waits for them until its grace, and an abandoned one leaves nothing half done."""

import asyncio
import json
from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from support.callbacks import Gate, Shop
from support.database import Database
from support.entries import HOUR, age, dispatcher, put, put_one, state, until_true

import outbox
from dispatchers import Operations
from dispatchers.adapters import MemoryAdapter
from dispatchers.callbacks import Settlement
from dispatchers.stored_outcome import read_outcome


@pytest.fixture(params=["sync", "async"])
def shop(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Shop:
    """The app with callbacks on a Session, and on an AsyncSession."""
    return Shop(database, ob, is_async=request.param == "async")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_drain_ends_at_its_grace_and_keeps_what_waits_for_a_callback(
    postgresql: Database, ob: outbox.Outbox, is_async: bool
) -> None:
    put(postgresql, ob, count=10)
    gate, effects, adapter = Gate(), Operations(), MemoryAdapter(window=None)
    stuck: list[UUID] = []

    @effects.on_settled("crm")
    def hang(session: Session, settlement: Settlement) -> None:
        stuck.append(settlement.entry.id)
        gate(session, settlement)

    async def hang_async(session: AsyncSession, settlement: Settlement) -> None:
        stuck.append(settlement.entry.id)
        await asyncio.sleep(60)

    if is_async:
        effects = Operations()
        effects.on_settled("crm")(hang_async)
    target = postgresql.async_engine() if is_async else postgresql
    working = dispatcher(
        target,
        ob,
        include=[effects],
        adapters={"crm": adapter},
        grace=timedelta(seconds=0.3),
        margin=timedelta(minutes=20),
        lease=timedelta(hours=1),
    )

    async def main() -> float:
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        await until_true(lambda: len(stuck) == 4 and len(adapter.deliveries) == 10)
        began = asyncio.get_running_loop().time()
        stopping.set()
        await pump
        return asyncio.get_running_loop().time() - began

    try:
        took = asyncio.run(main())
        assert took < 30, "the callbacks hang for a minute"
        rows = {row.id: row for row in postgresql.queue}
        waiting = [row for id, row in rows.items() if id not in stuck]
        assert {rows[id].state for id in stuck} == {"sending"}
        assert [read_outcome(row.outcome).known.state for row in waiting] == ["delivered"] * 6  # type: ignore[union-attr]
        reason = "delivered; the process stopped before its callback ran"
        assert {json.loads(row.outcome)["reason"] for row in waiting} == {reason}
        assert postgresql.orders == []
    finally:
        gate.open()


def test_an_abandoned_callback_leaves_nothing_half_done(postgresql: Database, ob: outbox.Outbox) -> None:
    id = put_one(postgresql, ob)
    effects, entered = Operations(), asyncio.Event()
    shop, adapter = Shop(postgresql, ob, is_async=True), MemoryAdapter()

    @effects.on_settled("crm")
    async def settled(session: AsyncSession, settlement: Settlement) -> None:
        await session.run_sync(shop.pay, settlement)
        await session.flush()
        if not entered.is_set():
            entered.set()
            await asyncio.sleep(60)

    working = dispatcher(postgresql.async_engine(), ob, include=[effects], adapters={"crm": adapter})

    async def main() -> None:
        pump = asyncio.create_task(working.pump(stopping := asyncio.Event()))
        await entered.wait()
        stopping.set()
        await working.abandon()
        await pump

    asyncio.run(main())
    assert (state(postgresql, id), postgresql.orders, len(postgresql.entries)) == ("sending", [], 1)
    age(postgresql, HOUR)
    assert asyncio.run(working.run_once()) == 1

    assert len(postgresql.orders) == len(adapter.effects) == 1
