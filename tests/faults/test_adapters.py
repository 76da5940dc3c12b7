"""Adapters that take the process with them as far as they can: the entries of the others do not notice.

What an adapter may raise and answer beside this: tests/dispatchers/pipeline/test_dispatcher.py. The whole list is in
docs/verification.md.
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database
from support.entries import HOUR, age, dispatcher, put, queue_row, reasons, run_once, states

import outbox
from dispatchers import FOREVER, Deferred, Delivered, Delivery, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.steady_clock import steady_clock
from dispatchers.store import database as store_database
from dispatchers.store.connections.transactions import Transactions
from dispatchers.time_limits import Window


class Misbehaving(MemoryAdapter):
    """Does something unheard of with the first delivery, after it was executed; the others are answered."""

    def __init__(self, misbehave: Callable[[Delivery], Any], **settings: Any) -> None:
        super().__init__(**settings)
        self._misbehave = misbehave

    async def send(self, delivery: Delivery) -> Outcome:
        outcome = await super().send(delivery)
        if len(self.deliveries) == 1:
            self._misbehave(delivery)
        return outcome


class Fatal(BaseException):
    """As other frameworks have: gevent's Timeout, trio's Cancelled."""


def out_of_memory(delivery: Delivery) -> None:
    bytearray(1 << 60)


def exit_the_process(delivery: Delivery) -> None:
    raise SystemExit(1)


def be_fatal(delivery: Delivery) -> None:
    raise Fatal


@pytest.mark.parametrize("misbehave", [out_of_memory, exit_the_process, be_fatal])
def test_an_adapter_that_takes_the_process_along_is_alone_in_doubt(
    database: Database, ob: outbox.Outbox, misbehave: Callable[[Delivery], None]
) -> None:
    put(database, ob, count=5)
    adapter = Misbehaving(misbehave)

    assert run_once(database, ob, adapters={"crm": adapter}) == 5

    assert states(database) == {"delivered": 4, "retry": 1}
    assert queue_row(database, adapter.deliveries[0].id).maybe_sent
    age(database, HOUR)
    assert run_once(database, ob, adapters={"crm": adapter}) == 1
    assert states(database) == {"delivered": 5}
    assert set(adapter.effects.values()) == {1}


def test_a_payload_too_large_for_the_memory_harms_no_other_entry(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    (large, *_) = put(database, ob, count=5)

    def parse(delivery: Delivery) -> Any:
        return bytearray(1 << 60) if delivery.id == large else {}

    def read(delivery: Delivery) -> Outcome:
        return Deferred("read") if delivery.payload else Delivered()

    monkeypatch.setattr(Delivery, "payload", property(parse))
    adapter = MemoryAdapter(read)

    assert run_once(database, ob, adapters={"crm": adapter}) == 5

    assert states(database) == {"delivered": 4, "retry": 1}
    assert reasons(database, large) == ["the adapter raised MemoryError"]


# --- an adapter that blocks the event loop


def test_while_an_adapter_blocks_the_loop_another_process_takes_over_once(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    put(postgresql, ob, count=6)
    service = MemoryAdapter()
    late = timedelta(0)
    settled: list[sa.Row[Any]] = []

    def block(delivery: Delivery) -> None:
        nonlocal late
        age(postgresql, HOUR)
        late = HOUR  # it was blocked for so long: leases have run out, and no deadline could be met
        other = Thread(target=lambda: run_once(postgresql, ob, adapters={"crm": service}))
        other.start()
        other.join()
        settled.extend(postgresql.rows(TABLES.settlement))

    blocking = Misbehaving(block)
    blocking._answers, blocking.effects = service._answers, service.effects  # one service, whichever adapter asks it
    working = dispatcher(
        postgresql, ob, adapters={"crm": blocking}, clock=lambda: steady_clock() + late.total_seconds()
    )

    assert asyncio.run(working.run_once()) == 0

    assert len(service.deliveries) == len(settled) == 6
    assert len(blocking.deliveries) == 1  # what was not sent by then is not sent at all
    assert postgresql.rows(TABLES.settlement) == settled
    assert states(postgresql) == {"delivered": 6}
    assert set(service.effects.values()) == {1}


# --- cancelled anywhere


ENDS = {"delivered", "uncertain"}


class StepwiseTransactions(Transactions):
    """The real ones, of which each is a step of the event loop, with the commit in its middle."""

    async def run_unguarded(
        self, work: Callable[[sa.Connection], Any], what: str = "", *, is_one_statement: bool = False
    ) -> Any:
        await asyncio.sleep(0)
        result = self.run_blocking(work)
        await asyncio.sleep(0)
        return result


class Stepwise(MemoryAdapter):
    async def send(self, delivery: Delivery) -> Outcome:
        await asyncio.sleep(0)
        outcome = await super().send(delivery)
        await asyncio.sleep(0)
        return outcome


@pytest.mark.parametrize(("window", "others"), [(FOREVER, set()), (None, {"uncertain"})], ids=["keys", "no keys"])
def test_a_task_cancelled_at_any_await_leaves_what_the_next_one_finishes(
    sqlite: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch, window: Window, others: set[str]
) -> None:
    monkeypatch.setattr(store_database, "Transactions", StepwiseTransactions)
    adapter = Stepwise(window=window)
    ends: set[str] = set()
    steps, finished = 0, False

    while not finished:
        put(sqlite, ob, count=2)
        finished = asyncio.run(cancelled_after(steps, sqlite, ob, adapter))
        for _ in range(2):  # what was claimed and not sent, then what that has left
            if states(sqlite).keys() - ENDS:
                age(sqlite, HOUR)
                run_once(sqlite, ob, adapters={"crm": adapter})
        steps += 1
        ends |= set(states(sqlite))
        assert ends <= {"delivered"} | others, f"cancelled after {steps} steps"

    assert steps > 10
    assert ends == {"delivered"} | others
    assert set(adapter.effects.values()) == {1}
    if window is not None:
        assert len(adapter.effects) == 2 * steps


async def cancelled_after(steps: int, database: Database, ob: outbox.Outbox, adapter: MemoryAdapter) -> bool:
    """Cancel a `run_once()` after so many steps of the event loop; returns whether it had come to its end before."""
    store = store_database.DatabaseStore(database.engine, ob.configuration)
    task = asyncio.create_task(dispatcher(None, ob, adapters={"crm": adapter}, store=store).run_once())
    for _ in range(steps):
        await asyncio.sleep(0)
    ended = task.done()
    task.cancel()
    await asyncio.wait([task])
    return ended
