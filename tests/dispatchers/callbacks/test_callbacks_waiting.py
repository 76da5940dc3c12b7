"""Callbacks that wait for their turn: that is no failure, and no other destination waits for them."""

import asyncio
import random
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from support.callbacks import Gate, Shop
from support.database import TABLES, Database
from support.entries import LEASE, claim, dispatcher, pumping, put, quota, states, until_true

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.callbacks import Callbacks, Calls
from dispatchers.pipeline.app_transactions import SettlementWorker
from dispatchers.pipeline.destinations import UNLIMITED, CallbackPace, Destinations
from dispatchers.store.database import DatabaseStore
from dispatchers.telemetry.errors import ErrorReports
from dispatchers.transitions import ClaimedEntry, RetryCallback, Settle, Transition


@given(
    at_once=st.integers(1, 50),
    usable=st.floats(1, 3600),
    seconds=st.lists(st.floats(0, 600), min_size=1, max_size=20),
)
def test_no_more_is_claimed_than_callbacks_settle_within_a_lease(
    at_once: int, usable: float, seconds: list[float]
) -> None:
    pace = CallbackPace(at_once, timedelta(seconds=usable))
    destinations = Destinations(permits=1, permits_in_all=1, pace=pace, called_back=["crm"])
    crm = destinations.of["crm"]
    for each in seconds:
        pace.measure(each)
    for _ in range(1000):
        if (free := min(pace.free_of(crm), 20)) == 0:
            break
        destinations.reserve_callbacks("crm", free)

    claimed = pace.max_entries - pace.free
    assert claimed <= 2 * at_once or claimed == UNLIMITED or claimed * pace.seconds_each <= at_once * usable / 2 * 1.001
    assert pace.free >= pace.max_entries // 2 or claimed < UNLIMITED // 2, "one destination leaves half to the others"
    assert pace.max_entries >= 2 * at_once, "none of the callbacks waits for a claim"


def test_nothing_is_claimed_that_callbacks_cannot_settle_in_time(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=90)
    put(postgresql, ob, "mail.send", count=90)
    shop, gate, adapter = Shop(postgresql, ob, is_async=False), Gate(), MemoryAdapter()
    shop.on_settled(gate)
    working = shop.dispatcher(
        adapters={"crm": adapter, "mail": MemoryAdapter()},
        callback_concurrency=2,
        callback_timeout=timedelta(seconds=50),
    )

    async def main() -> None:
        pump = asyncio.create_task(pumping(working, lambda: states(postgresql)["delivered"] == 180))
        await until_true(lambda: gate.entered == 2 and states(postgresql)["delivered"] == 90)
        sent = len(adapter.deliveries)
        assert gate.entered == 2, "as many run at once as the setting says"
        gate.opened.set()
        await pump
        assert sent == 28, "half of what two callbacks settle in half a lease, at an assumed second each"

    asyncio.run(main())

    assert len(shop.seen) == len(adapter.deliveries) == 90


class Stuck:
    """A store in which the first callback hangs until `continues` is set."""

    def __init__(self) -> None:
        self.begun: list[UUID] = []
        self.continues = asyncio.Event()

    async def settle_with(self, entry: ClaimedEntry, end: Any, calls: Calls) -> bool:
        self.begun.append(entry.id)
        await self.continues.wait()
        return True


def test_who_waits_until_its_lease_ends_is_released_with_its_outcome(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=3)
    store = DatabaseStore(postgresql.engine, ob.configuration)
    claimed = claim(store, quota(permits=3))
    changes: list[tuple[ClaimedEntry, Transition]] = []

    async def main() -> None:
        stuck = Stuck()
        settling = SettlementWorker(
            stuck,  # type: ignore[arg-type]
            CallbackPace(1, timedelta(seconds=1)),
            at_once=1,
            usable=timedelta(seconds=0.2),
            clock=asyncio.get_running_loop().time,
            rng=random.Random(0),
            callbacks=Callbacks([]),
            ended=lambda waiting, result: changes.append((waiting.entry, result.instead)) if result.instead else None,
            away=lambda error: None,
            trace=None,
            errors=ErrorReports(),
        )
        settling.note_claim(claimed[0].lease_token, asyncio.get_running_loop().time())
        for entry in claimed:
            settling.start(entry, Settle("delivered", 1, result={"id": "c_1"}), Calls(lambda *_: None))
        await until_true(lambda: len(changes) == 2)
        assert len(settling) == 1
        stuck.continues.set()
        await settling.finish(timedelta(seconds=20))
        assert stuck.begun == [claimed[0].id]

    asyncio.run(main())
    asyncio.run(store.exchange(changes, None))

    assert all(isinstance(change, RetryCallback) and not change.delay for _, change in changes)
    again = claim(store, quota(permits=3))
    assert {entry.id for entry in again} == {entry.id for entry in claimed[1:]}
    for entry in again:
        known = entry.outcome.known
        assert known is not None
        assert (known.state, known.result) == ("delivered", {"id": "c_1"})
    assert postgresql.rows(TABLES.event) == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"callback_concurrency": 0}, "callback_concurrency must be an int of at least 1, not 0"),
        (
            {"callback_timeout": timedelta(0)},
            r"callback_timeout must be a positive timedelta of at most lease - margin",
        ),
        ({"callback_timeout": LEASE}, r"lease - margin \(0:00:55\), not datetime.timedelta\(seconds=60\): raise lease"),
    ],
)
def test_settings_of_callbacks_that_cannot_work_are_refused(settings: dict[str, Any], text: str) -> None:
    ob = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test")
    with pytest.raises(outbox.ConfigurationError, match=text):
        dispatcher(sa.create_engine("sqlite://"), ob, adapters={"crm": MemoryAdapter()}, **settings)
