"""What a dispatcher does about its leases and permits, on a clock of the test's own. The simulation plays the rest."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from support.database import Database
from support.entries import Blocking, change, dispatcher, pumping, put, put_one, queue_row, state, states, until_true

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Exchange
from outbox.keys import KeyFields

SECONDS = timedelta(seconds=1)


class SlowStore(DatabaseStore):
    """Its claims and its reads of keys take so long by its own clock. exchanges: how often it was asked."""

    def __init__(self, database: Database, ob: outbox.Outbox, *, of_claims: float = 0.0, of_keys: float = 0.0) -> None:
        super().__init__(database.engine, ob.configuration)
        self.seconds, self.exchanges = 1000.0, 0
        self._of_claims, self._of_keys = of_claims, of_keys

    async def exchange(self, *arguments: Any) -> Exchange:
        self.exchanges += 1
        exchange = await super().exchange(*arguments)
        self.seconds += self._of_claims if exchange.claimed else 0.0
        return exchange

    async def key_fields(self, entry_id: UUID) -> KeyFields:
        self.seconds += self._of_keys
        return await super().key_fields(entry_id)


@pytest.mark.parametrize(
    ("times", "sent"),
    [({"of_claims": 53.0}, 1), ({"of_claims": 56.0}, 0), ({"of_keys": 53.0}, 1), ({"of_keys": 70.0}, 0)],
    ids=str,
)
def test_nothing_is_sent_that_would_outlive_its_lease(
    sqlite: Database, ob: outbox.Outbox, times: dict[str, float], sent: int
) -> None:
    """The lease is 60 s and its margin 5 s. The claim's answer, or the key of a later epoch, came late."""
    id = put_one(sqlite, ob)
    change(sqlite, id, key_epoch=1)
    store, adapter = SlowStore(sqlite, ob, **times), MemoryAdapter(timeout=SECONDS)
    lease = {"lease": 60 * SECONDS, "margin": 5 * SECONDS}
    working = dispatcher(None, ob, store=store, clock=lambda: store.seconds, adapters={"crm": adapter}, **lease)

    asyncio.run(working.run_once())

    assert len(adapter.deliveries) == sent
    assert sent or (queue_row(sqlite, id).attempts, queue_row(sqlite, id).maybe_sent) == (0, False)


@pytest.mark.parametrize(("of_claims", "sent", "becomes"), [(0.0, 1, "delivered"), (45.0, 0, "uncertain")])
def test_nothing_is_sent_again_whose_window_ended_since_the_claim(
    sqlite: Database, ob: outbox.Outbox, of_claims: float, sent: int, becomes: str
) -> None:
    """Half a minute of it is left at the claim, by the database's clock."""
    id, window, margin = put_one(sqlite, ob), 3600 * SECONDS, 5 * SECONDS
    doubt = datetime.now(UTC) - (window - SECONDS - margin) + 30 * SECONDS
    change(sqlite, id, state="retry", maybe_sent=True, in_doubt_since=doubt, attempts=1, deliveries=1)
    store, adapter = SlowStore(sqlite, ob, of_claims=of_claims), MemoryAdapter(window=window, timeout=SECONDS)
    lease = {"lease": 60 * SECONDS, "margin": margin}
    working = dispatcher(None, ob, store=store, clock=lambda: store.seconds, adapters={"crm": adapter}, **lease)

    asyncio.run(working.run_once())

    assert (len(adapter.deliveries), state(sqlite, id)) == (sent, becomes)


def test_a_full_dispatcher_does_not_ask_the_database_again_and_again(sqlite: Database, ob: outbox.Outbox) -> None:
    put(sqlite, ob, count=10)
    store, adapter = SlowStore(sqlite, ob), Blocking()
    asked: list[int] = []

    async def main() -> None:
        working = dispatcher(None, ob, store=store, adapters={"crm": adapter}, max_in_flight=4, poll=10 * SECONDS)
        pump = asyncio.create_task(pumping(working, lambda: states(sqlite) == {"delivered": 10}))
        await until_true(lambda: adapter.waiting == 4)
        before = store.exchanges
        for _ in range(1000):  # iterations of the event loop
            await asyncio.sleep(0)
        asked.append(store.exchanges - before)
        adapter.released.set()
        await pump

    asyncio.run(main())

    assert asked[0] < 5
