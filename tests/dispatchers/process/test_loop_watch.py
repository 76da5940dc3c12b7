"""A send that blocks the event loop for longer than a lease: what waits for it is released in time, and no one else is blamed."""

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from support.daemons import wait_for
from support.database import Database
from support.entries import claim, claim_request, dispatcher, pumping, put, queue_row, states, until_true

import outbox
from dispatchers import Delivery, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.pipeline.unstarted import BLOCKED, Unstarted
from dispatchers.process import loop_watch
from dispatchers.process.loop_watch import watching
from dispatchers.store.database import DatabaseStore
from dispatchers.telemetry.events import Activity
from dispatchers.transitions import ClaimedEntry

ENTRIES = 30
SHORT: dict[str, Any] = {"lease": timedelta(seconds=4), "margin": timedelta(milliseconds=200)}


class Blocking(MemoryAdapter):
    """Its first send blocks the event loop until `released` is set."""

    def __init__(self) -> None:
        super().__init__(window=None, timeout=timedelta(seconds=1))
        self.begun = threading.Event()
        self.released = threading.Event()

    async def send(self, delivery: Delivery) -> Outcome:
        if not self.begun.is_set():
            self.begun.set()
            self.released.wait(60)
        return await super().send(delivery)


def test_what_waits_for_a_blocked_event_loop_is_sent_by_others(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    release_in_time(database, ob, database.new_engine, caplog)


def test_a_blocked_loop_with_an_async_engine_is_noticed_too(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """Not on SQLite: if its transaction is open on the blocked event loop, no other one can write."""
    release_in_time(postgresql, ob, postgresql.async_engine, caplog)


def release_in_time(
    database: Database, ob: outbox.Outbox, new_engine: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    ids = put(database, ob, count=ENTRIES)
    blocking, other = Blocking(), MemoryAdapter(window=None, timeout=timedelta(seconds=1))
    seen: list[Activity] = []
    done = threading.Event()

    def observe(event: object) -> None:
        if isinstance(event, Activity):
            seen.append(event)

    async def work(adapter: MemoryAdapter, **settings: Any) -> None:
        working = dispatcher(new_engine(), ob, adapters={"crm": adapter}, **SHORT, **settings)
        await pumping(working, done.is_set)

    with ThreadPoolExecutor(2) as pool, caplog.at_level(logging.WARNING, "outbox.dispatcher"):
        first = pool.submit(asyncio.run, work(blocking, observe=observe))
        try:
            assert blocking.begun.wait(30)
            second = pool.submit(asyncio.run, work(other))
            wait_for(lambda: len(other.deliveries) == ENTRIES - 1, "the others", seconds=20)
            blocking.released.set()
            wait_for(lambda: states(database) == {"delivered": ENTRIES}, "the entry that blocked", seconds=20)
        finally:
            blocking.released.set()
            done.set()
        first.result(60)
        second.result(60)

    assert {delivery.id for delivery in [*blocking.deliveries, *other.deliveries]} == set(ids)
    assert len(blocking.deliveries) == 1
    (over,) = (record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    assert "by operation 'crm.upsert', at" in over
    assert "in send; " in over
    assert f"{ENTRIES - 1} entries whose send had not begun were released" in over
    assert not any("the database has not answered" in record.getMessage() for record in caplog.records)
    blocked = {name: seconds for activity in seen for name, seconds in activity.blocked_seconds.items()}
    assert blocked.keys() == {("crm", "crm.upsert")}
    assert blocked["crm", "crm.upsert"] > SHORT["lease"].total_seconds() / 8


@pytest.mark.parametrize("known", ["entries", "token"])
def test_a_release_makes_the_entries_what_they_were(database: Database, ob: outbox.Outbox, known: str) -> None:
    (id,) = put(database, ob)
    before = queue_row(database, id)
    store, token = DatabaseStore(database.engine, ob.configuration), uuid4()
    claimed = asyncio.run(store.exchange([], claim_request(token=token))).claimed

    released = store.release(claimed, [], BLOCKED) if known == "entries" else store.release([], [token], BLOCKED)

    row = queue_row(database, id)
    assert released == 1
    assert (row.state, row.deliveries, row.attempts, row.maybe_sent) == ("pending", 0, 0, False)
    assert (row.lease_token, row.in_doubt_since, row.outcome) == (None, None, before.outcome)
    assert store.release(claimed, [token], BLOCKED) == 0, "the lease is lost, so nothing is changed"


def test_an_entry_is_either_begun_or_taken(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=400)
    entries = claim(DatabaseStore(database.engine, ob.configuration), max_entries=400)[:64]
    unstarted, token = Unstarted(), entries[0].lease_token
    unstarted.ask(token)
    unstarted.answered(token, entries)
    barrier, taken = threading.Barrier(2), list[ClaimedEntry]()

    def take() -> None:
        barrier.wait(30)
        taken.extend(unstarted.take_all().entries)

    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(take)
        barrier.wait(30)
        begun = [entry for entry in entries if unstarted.begin(entry)]
        taking.result(30)

    assert {entry.id for entry in begun}.isdisjoint(entry.id for entry in taken)
    assert len(begun) + len(taken) == len(entries)


def test_a_claim_whose_answer_comes_later_is_taken_as_a_whole(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=2)
    entries = claim(DatabaseStore(database.engine, ob.configuration))
    unstarted, token = Unstarted(), entries[0].lease_token
    unstarted.ask(token)

    assert unstarted.take_all().tokens == [token]
    unstarted.answered(token, entries)

    assert [unstarted.begin(entry) for entry in entries] == [False, False]
    assert [unstarted.end(entry) for entry in entries] == [True, True]
    assert [unstarted.end(entry) for entry in entries] == [False, False]


def test_one_thread_watches_for_all_dispatchers_of_an_event_loop() -> None:
    def watching_threads() -> int:
        return sum(thread.name == "outbox-loop-watch" for thread in threading.enumerate())

    others = weakref.WeakSet(loop_watch._watches)  # loops of other tests may still be referenced

    async def main() -> list[int]:
        counts = []
        for _ in range(2):
            with ExitStack() as stack:
                for _ in range(1000):
                    watched: Any = SimpleNamespace(max_seconds=5.0)
                    stack.enter_context(watching(watched))
                counts.append(watching_threads())
            wait_for(lambda: watching_threads() == 0, "the end of the thread")
        return counts

    assert asyncio.run(main()) == [1, 1]
    gc.collect()
    assert not [loop for loop in loop_watch._watches if loop.is_closed() and loop not in others]


def test_a_dispatcher_is_watched_until_the_last_of_its_calls_has_ended() -> None:
    """Two calls of `run_once` at the same time on one event loop."""
    watched: Any = SimpleNamespace(max_seconds=5.0)

    async def main() -> list[int]:
        counts = []
        with watching(watched):
            with watching(watched):
                pass
            counts.append(len(loop_watch._watches[asyncio.get_running_loop()]._watched))
        counts.append(len(loop_watch._watches[asyncio.get_running_loop()]._watched))
        return counts

    assert asyncio.run(main()) == [1, 0]


class Held:
    """A dispatcher with one entry to release. database: whose release hangs until the event is set."""

    max_seconds = 0.01

    def __init__(self, database: threading.Event) -> None:
        self.has_unstarted = True
        self.calls = 0
        self.sending = lambda task: None
        self.activity = SimpleNamespace(note_blocked=lambda *_: None)
        self._database = database

    def release(self) -> int:
        self.calls += 1
        assert self._database.wait(30)
        self.has_unstarted = False
        return 1


def test_a_database_that_hangs_delays_the_releases_of_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_watch, "MAX_RELEASES", 3)
    back, there = threading.Event(), threading.Event()
    there.set()
    hung: list[Any] = [Held(back), Held(back)]
    well: list[Any] = [Held(there) for _ in range(20)]

    async def main() -> None:
        with ExitStack() as stack:
            for watched in (*hung, *well):
                stack.enter_context(watching(watched))
            wait_for(lambda: not any(each.has_unstarted for each in well), "the other databases")
            assert [each.has_unstarted for each in hung] == [True, True]
            back.set()
            wait_for(lambda: not any(each.has_unstarted for each in hung), "the databases that hung")
            await until_true(lambda: "were released" in caplog.text)

    with caplog.at_level(logging.ERROR, "outbox.dispatcher"):
        asyncio.run(main())

    assert [each.calls for each in (*hung, *well)] == [1] * 22
    assert "22 entries whose send had not begun were released" in caplog.text
