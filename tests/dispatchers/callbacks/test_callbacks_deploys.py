"""Dispatchers of several deploys on one database: an entry settles only with the callback that is on record for it."""

import asyncio
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.callbacks import Gate, Shop
from support.cli_runner import command, document, succeeded
from support.database import TABLES, Database
from support.entries import (
    claim_one,
    dispatcher,
    pumping,
    put,
    put_one,
    queue_row,
    run_once,
    settlement_row,
    state,
    states,
    until_true,
)

import outbox
from dispatchers import Operations, Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import cancel
from dispatchers.callbacks import Calls, Settlement
from dispatchers.process.dispatcher_work import DispatcherWork
from dispatchers.store.app_code.callback_registry import forget
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import CallbacksChanged
from dispatchers.stored_outcome import read_outcome
from dispatchers.transitions import Settle


@pytest.fixture(params=["sync", "async"])
def newer(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Shop:
    """The newer deploy, which has a callback that the older one does not."""
    shop = Shop(database, ob, is_async=request.param == "async")
    shop.on_settled(shop.pay)
    return shop


def without_callbacks(database: Database, ob: outbox.Outbox, adapter: MemoryAdapter) -> DispatcherWork:
    """A dispatcher of the older deploy."""
    return dispatcher(database.new_engine(), ob, adapters={"crm": adapter})


@pytest.mark.differs("portable", "a callback is called again after 40001")
def test_an_older_dispatcher_leaves_its_outcome_to_one_with_the_callback(newer: Shop) -> None:
    database, ob = newer.database, newer.ob
    newer.run_once(adapters={"crm": MemoryAdapter()})  # it has started once
    put(database, ob, count=3)
    adapter = MemoryAdapter()

    assert run_once(database, ob, adapters={"crm": adapter}) == 3

    assert states(database) == {"retry": 3}
    (reason,) = {row.reason for row in _statuses(database, ob)}
    assert reason == "delivered; waits for a process that has on_settled crm.upsert"
    assert run_once(database, ob, adapters={"crm": adapter}) == 0, "it costs the older one nothing"
    assert newer.run_once(adapters={"crm": adapter}) == 3
    assert states(database) == {"delivered": 3, "pending": 3}
    assert len(adapter.deliveries) == len(database.orders) == len(newer.seen) == 3
    assert database.rows(TABLES.event) == []


def test_what_waits_for_its_callback_shows_why_and_retry_sends_nothing(newer: Shop) -> None:
    database, ob = newer.database, newer.ob
    newer.run_once(adapters={"crm": MemoryAdapter()})  # it has started once
    id = put_one(database, ob)
    adapter = MemoryAdapter([Rejected("status 422: no such customer")])
    run_once(database, ob, adapters={"crm": adapter})
    why = "failed: status 422: no such customer; waits for a process that has on_settled crm.upsert"

    waits = document("show", str(id), database=database)
    printed = succeeded("retry", "--reason", "asked", str(id), database=database)
    listed = command("list", database=database, COLUMNS="250").stdout
    shown = succeeded("show", str(id), database=database)

    assert (waits["reason"], waits["due_at"]) == (why, None)
    assert f"not settled yet: {why}" in " ".join(listed.split())
    assert "failed, not settled yet" not in listed
    assert why in " ".join(shown.split())
    assert printed == (
        f"entry {id} is due now: its outcome is recorded: a running dispatcher that has the callback will call it"
        " and settle the entry\n"
    )
    assert newer.run_once(adapters={"crm": adapter}) >= 1
    assert (state(database, id), len(adapter.deliveries)) == ("failed", 1)


def _statuses(database: Database, ob: outbox.Outbox) -> list[Any]:
    with database.begin() as session:
        return [status for number in range(3) for status in ob.status(session, f"order:{number}")]


def test_a_running_dispatcher_heeds_a_callback_that_comes_on_record(database: Database, ob: outbox.Outbox) -> None:
    newer = Shop(database, ob, is_async=False)
    newer.on_settled(newer.pay)
    adapter = MemoryAdapter()
    older = without_callbacks(database, ob, adapter)

    async def main() -> None:
        assert await older.run_once() == 0
        await newer.dispatcher(database.new_engine(), adapters={"crm": MemoryAdapter()}).run_once()
        put(database, ob, count=5)
        await older.run_once()

    asyncio.run(main())

    assert states(database) == {"retry": 5}
    assert newer.run_once(adapters={"crm": adapter}) == 5
    assert len(database.orders) == len(adapter.deliveries) == 5


def test_a_running_callback_gives_way_to_a_longer_one_that_comes_on_record(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    put(postgresql, ob, count=3)
    older, newer, gate = Shop(postgresql, ob, is_async=False), Shop(postgresql, ob, is_async=False), Gate()
    older.on_settled(gate, "crm")
    newer.on_settled(newer.pay, "crm.upsert")
    working = older.dispatcher(adapters={"crm": MemoryAdapter()}, callback_concurrency=1)

    async def main() -> None:
        pump = asyncio.create_task(pumping(working, lambda: states(postgresql)["retry"] == 2))
        await until_true(lambda: gate.entered == 1)
        started = newer.dispatcher(postgresql.new_engine(), adapters={"mail": MemoryAdapter()})
        await started.run_once()
        gate.opened.set()
        await pump

    asyncio.run(main())

    assert (len(older.seen), states(postgresql)) == (1, {"delivered": 1, "retry": 2})


def test_nothing_settles_after_the_record_of_callbacks_has_changed(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob)
    stores = [DatabaseStore(database.engine, ob.configuration) for _ in range(2)]
    settled = Settle("delivered", 1)

    async def main() -> None:
        assert await stores[0].callbacks() == frozenset()
        claimed = await asyncio.to_thread(claim_one, stores[0])
        assert await stores[1].callbacks(["on_settled crm"]) == {"on_settled crm"}
        with pytest.raises(CallbacksChanged):
            await stores[0].exchange([(claimed, settled)], None)
        with pytest.raises(CallbacksChanged):
            await stores[0].settle_with(claimed, settled, Calls(lambda *_: None))
        assert states(database) == {"sending": 1}
        await stores[0].callbacks()
        assert (await stores[0].exchange([(claimed, settled)], None)).settled == {claimed.lease}

    asyncio.run(main())


def test_an_operators_cancel_waits_for_a_process_that_has_the_callback(newer: Shop) -> None:
    id = put_one(newer.database, newer.ob)
    newer.run_once(adapters={"mail": MemoryAdapter()})
    with newer.database.engine.begin() as connection:
        cancel(connection, TABLES, id, actor="ada", reason="asked")
    adapter = MemoryAdapter()

    run_once(newer.database, newer.ob, adapters={"crm": adapter})
    assert read_outcome(queue_row(newer.database, id).outcome).known.state == "cancelled"  # type: ignore[union-attr]
    newer.run_once(adapters={"crm": adapter})

    assert (newer.states, adapter.deliveries, state(newer.database, id)) == (["cancelled"], [], "cancelled")


def test_dispatchers_of_different_operations_hand_nothing_over(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=2)
    put(database, ob, "mail.send", count=2)
    shops = [Shop(database, ob, is_async=False) for _ in range(2)]
    shops[0].on_settled(lambda *_: None, "crm")
    shops[1].on_settled(lambda *_: None, "mail")

    counts = [
        shop.run_once(adapters={name: MemoryAdapter()}) for shop, name in zip(shops, ("crm", "mail"), strict=True)
    ]

    assert counts == [2, 2]
    assert {row.deliveries for row in database.rows(TABLES.settlement)} == {1}


def test_a_callback_that_was_removed_permanently_is_forgotten(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    ids = put(database, ob, count=2)
    shop, adapter = Shop(database, ob, is_async=False), MemoryAdapter()
    shop.on_settled(lambda *_: None, "crm")
    shop.run_once(adapters={"mail": adapter})
    older = without_callbacks(database, ob, adapter)
    asyncio.run(older.run_once())
    assert states(database) == {"retry": 2}
    assert "if the callback was removed permanently, run `outbox callbacks forget 'on_settled crm'`" in caplog.text

    with database.engine.begin() as connection:
        assert forget(connection, TABLES, "on_settled crm") == 2
        assert forget(connection, TABLES, "on_settled crm") is None

    assert asyncio.run(older.run_once()) == 2
    assert {settlement_row(database, id).state for id in ids} == {"delivered"}
    assert len(adapter.deliveries) == 2


def test_an_entry_of_a_group_keeps_its_place_while_its_callback_waits(newer: Shop) -> None:
    first, second = (put_one(newer.database, newer.ob, ordering_key="a") for _ in range(2))
    newer.run_once(adapters={"mail": MemoryAdapter()})
    adapter = MemoryAdapter()

    run_once(newer.database, newer.ob, adapters={"crm": adapter})
    assert [delivery.id for delivery in adapter.deliveries] == [first]
    newer.run_once(adapters={"crm": adapter})
    newer.run_once(adapters={"crm": adapter})

    assert [delivery.id for delivery in adapter.deliveries] == [first, second]
    assert len(newer.database.orders) == 2


def test_a_newer_and_an_older_dispatcher_side_by_side_skip_no_callback(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=60)
    newer, effects = Shop(postgresql, ob, is_async=False), Operations()
    seen: list[UUID] = []

    @effects.on_settled("crm")
    def settled(session: Session, settlement: Settlement) -> None:
        seen.append(settlement.entry.id)

    newer.effects = effects
    adapter = MemoryAdapter()
    with postgresql.engine.begin() as connection:
        connection.execute(sa.insert(TABLES.callback).values(_on_record("on_settled crm")))

    async def main() -> None:
        await asyncio.gather(
            pumping(newer.dispatcher(postgresql.new_engine(), adapters={"crm": adapter}, concurrency=5), done),
            pumping(without_callbacks(postgresql, ob, adapter), done),
        )

    def done() -> bool:
        return states(postgresql)["delivered"] == 60

    asyncio.run(main())

    assert len(seen) == len(set(seen)) == len(adapter.deliveries) == 60
    assert postgresql.rows(TABLES.event) == []


def _on_record(name: str) -> dict[str, Any]:
    return {"name": name, "recorded_at": sa.func.now(), "started_at": sa.func.now()}
