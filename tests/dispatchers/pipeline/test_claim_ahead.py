"""Where sends end fast, entries are claimed ahead; what was claimed ahead is sent in time, or released without an attempt."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from support.database import TABLES, Database
from support.entries import dispatcher, pumping, put, until_true

import outbox
from dispatchers import Deferred, Delivered, Delivery, Limits, Operations, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import decisions
from dispatchers.pipeline import destinations as permits
from dispatchers.pipeline.attempt import Attempt
from dispatchers.pipeline.destinations import WAIT_SECONDS, Destinations
from dispatchers.pipeline.scheduler import Scheduler
from dispatchers.store.database import DatabaseStore
from dispatchers.time_limits import RetryPolicy
from dispatchers.transitions import ClaimedEntry, Send

# --- how many


def ahead_of(max_ahead: int) -> Destinations:
    """Entries of `crm` may be claimed ahead."""
    return Destinations(permits=4, permits_in_all=20, can_wait=lambda name: name == "crm", max_ahead=max_ahead)


def measured(ended: int, seconds: float, name: str = "crm", destinations: Destinations | None = None) -> int:
    destinations = destinations or ahead_of(500)
    begin = 1e9
    assert destinations.ahead(destinations.of[name], begin) == 0
    for _ in range(ended):
        destinations.note_end(name)
    return destinations.ahead(destinations.of[name], begin + seconds)


def test_a_tenth_of_a_second_of_sends_is_claimed_ahead() -> None:
    assert measured(ended=200, seconds=0.5) == 40


def test_slow_sends_are_not_claimed_ahead() -> None:
    assert measured(ended=9, seconds=1.0) == 0


def test_no_more_than_the_limit_is_claimed_ahead() -> None:
    assert measured(ended=100_000, seconds=0.5) == 500


def test_a_rate_counts_for_the_present_only() -> None:
    destinations = ahead_of(500)
    crm = destinations.of["crm"]
    destinations.ahead(crm, 0.0)
    for _ in range(1000):
        destinations.note_end("crm")

    assert destinations.ahead(crm, 1.0) == 100
    assert destinations.ahead(crm, 1.001) == 100  # too soon to measure again
    assert destinations.ahead(crm, 2.0) == 0


def test_entries_claimed_ahead_leave_permits_to_other_destinations() -> None:
    destinations = ahead_of(10)
    scheduler = Scheduler(["crm", "mail"], destinations)
    destinations.claims_ahead = True
    scheduler.note_claim(scheduler.next_quotas(0.0), [])
    for _ in range(1000):
        destinations.note_end("crm")

    first = {quota.destination: quota.permits for quota in scheduler.next_quotas(1.0)}
    second = {quota.destination: quota.permits for quota in scheduler.next_quotas(1.0)}

    assert first == {"crm": 7, "mail": 2}  # half of 4 and 10, half of 4
    assert second == {"crm": 7, "mail": 2}


def test_only_where_a_crash_costs_no_decision_and_no_shared_limit_counts(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    few, looked_up = MemoryAdapter(), MemoryAdapter(window=None, find=True)
    few.retry, looked_up.at_least_once = RetryPolicy(max_attempts=2), True  # two crashes: the end, or a lookup each
    adapters = {"crm": MemoryAdapter(), "mail": MemoryAdapter(window=None), "bank": few, "sms": looked_up}
    limits = {"crm:acct_1": Limits(total_concurrency=2), "shop": Limits(rate=10), "shop:acct_1": Limits()}
    working = dispatcher(postgresql, ob, adapters=adapters | {"shop": MemoryAdapter()}, limits=limits)
    destinations = working._loops._scheduler.destinations

    names = ["crm", "crm:acct_1", "crm:acct_2", "mail", "bank", "sms", "shop", "shop:acct_1"]
    allowed = [name for name in names if measured(200, 0.5, name, destinations)]

    assert allowed == ["crm", "crm:acct_2", "shop:acct_1"]


# --- those that wait


def attempt(name: str = "crm", claimed_at: float = 0.0) -> Attempt:
    blank = ClaimedEntry._make([None] * len(ClaimedEntry._fields))
    unused: Any = None  # the attempt is not made here
    return Attempt(blank._replace(id=uuid4(), destination=name), unused, Send(), claimed_at, unused)


def test_what_waits_is_sent_in_its_order_as_sends_end() -> None:
    destinations = Destinations(permits=2, permits_in_all=20)
    attempts = [attempt() for _ in range(4)]

    assert [destinations.begin(each) for each in attempts] == [True, True, False, False]
    assert destinations.next("crm") is None
    destinations.end("crm")
    destinations.end("crm")
    assert [destinations.next("crm") for _ in range(3)] == [attempts[2], attempts[3], None]
    assert not destinations.begin(attempt())


def test_what_waits_too_long_is_taken_out() -> None:
    destinations = Destinations(permits=1, permits_in_all=20)
    slow, quick = [attempt("slow"), attempt("slow")], [attempt("quick", 0.5), attempt("quick", 0.5)]
    for each in (*slow, *quick):
        destinations.begin(each)

    assert destinations.take_late(0.0) == []
    assert destinations.take_late(WAIT_SECONDS + 0.1) == slow[1:]
    assert destinations.take_all() == quick[1:]


# --- in a dispatcher


def drain(
    database: Database,
    ob: outbox.Outbox,
    send: Callable[[Delivery], Awaitable[Outcome]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    sends: int,
    at_least_once: bool = True,
    **settings: Any,
) -> list[int]:
    """A dispatcher runs until so many sends were made; returns how many entries each claim took."""
    made = 0

    async def counting(delivery: Delivery) -> Outcome:
        nonlocal made
        made += 1
        return await send(delivery)

    operations = Operations()
    operations.operation("crm", at_least_once=at_least_once)(counting)
    claims: list[int] = []
    exchange = DatabaseStore.exchange

    async def counted(self: DatabaseStore, *arguments: Any) -> Any:
        done = await exchange(self, *arguments)
        claims.append(len(done.claimed))
        return done

    monkeypatch.setattr(DatabaseStore, "exchange", counted)
    asyncio.run(pumping(dispatcher(database, ob, include=[operations], **settings), lambda: made >= sends))
    return claims


def test_claims_grow_where_sends_end_fast(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(postgresql, ob, count=800)
    at_once = most_at_once = 0

    async def send(delivery: Delivery) -> Outcome:
        nonlocal at_once, most_at_once
        at_once += 1
        most_at_once = max(most_at_once, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        return Delivered()

    claims = drain(postgresql, ob, send, monkeypatch, sends=800, concurrency=4)

    assert sum(claims) == 800
    assert max(claims) > 4
    assert most_at_once == 4


def test_claims_do_not_grow_where_others_name_the_destination(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=100)
    mail = put(postgresql, ob, "mail.send", count=100, destination="crm")
    service = MemoryAdapter(window=None)

    async def main() -> None:
        adapters = {"crm": MemoryAdapter(), "mail": service}
        working = dispatcher(postgresql, ob, adapters=adapters, concurrency=4)
        await pumping(working, lambda: len(service.deliveries) == len(mail))
        assert measured(200, 0.5, "crm", working._loops._scheduler.destinations) == 0

    asyncio.run(main())


def test_what_no_one_sends_again_by_itself_does_not_wait_claimed(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permits, "WAIT_SECONDS", 3600.0)
    put(postgresql, ob, count=300)
    mails = set(put(postgresql, ob, "mail.send", count=100, destination="crm"))
    operations, hanging = Operations(), asyncio.Event()

    @operations.operation("mail", at_least_once=False)
    async def send(delivery: Delivery) -> Outcome:
        hanging.set()
        await asyncio.Event().wait()
        return Delivered()

    def claimed() -> int:
        return sum(row.id in mails and row.state == "sending" for row in postgresql.queue)

    async def main() -> None:
        adapters = {"crm": MemoryAdapter()}
        settings: dict[str, Any] = {"concurrency": 1, "grace": timedelta(0)}
        working = dispatcher(postgresql, ob, adapters=adapters, include=[operations], **settings)
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        try:
            await hanging.wait()
            await until_true(lambda: claimed() == 1)
        finally:
            stopping.set()
            await pump
            await working.close()

    asyncio.run(main())


def test_a_release_does_not_count_as_the_end_of_a_send(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=100)
    put(postgresql, ob, "crm.unserved", count=100)

    async def main() -> None:
        service = MemoryAdapter()
        working = dispatcher(postgresql, ob, adapters={"crm.upsert": service})
        ended: list[str] = []
        working._loops._scheduler.destinations.note_end = ended.append  # type: ignore[method-assign]
        await pumping(working, lambda: len(service.deliveries) == 100 and not working._loops._collector.in_batches)
        assert len(ended) == 100

    asyncio.run(main())


def test_what_was_claimed_ahead_is_not_sent_once_the_service_asks_to_wait(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(postgresql, ob, count=600)
    sent = 0

    async def send(delivery: Delivery) -> Outcome:
        nonlocal sent
        sent += 1
        return Delivered() if sent < 300 else Deferred("busy", after=timedelta(hours=1), cooldown=True)

    claims = drain(postgresql, ob, send, monkeypatch, sends=300, concurrency=1)

    assert max(claims) > 1
    assert 300 <= sent <= 302  # and the first of a claim that was on its way
    left = list(postgresql.queue)
    assert len(left) == 301
    assert [row.attempts for row in left] == [0] * 301
    assert {row.lease_token for row in left} == {None}


def test_a_pause_of_the_service_keeps_back_what_was_claimed_ahead(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permits, "WAIT_SECONDS", 3600.0)
    put(postgresql, ob, count=600, destination="crm:acct_1")
    operations, sent = Operations(), 0
    hanging, going_on = asyncio.Event(), asyncio.Event()

    @operations.operation("crm", at_least_once=True)
    async def send(delivery: Delivery) -> Outcome:
        nonlocal sent
        sent += 1
        if sent == 300:
            hanging.set()
            await going_on.wait()
        return Delivered()

    async def main() -> None:
        working = dispatcher(postgresql, ob, include=[operations], concurrency=1)
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        await hanging.wait()
        await until_true(lambda: working._loops._workers.has_waiting)
        with postgresql.observer.begin() as connection:
            decisions.pause(connection, TABLES, "crm", actor="ops", reason="asked")
        await until_true(lambda: working._loops._scheduler.destinations.of["crm"].shut_until > 0)
        going_on.set()
        await until_true(lambda: not working._loops._workers)
        stopping.set()
        await pump
        await working.close()

    asyncio.run(main())

    assert 300 <= sent <= 301  # and the first of a claim that was on its way
    assert [row.attempts for row in postgresql.queue] == [0] * (600 - sent)


def test_a_stop_releases_what_was_claimed_ahead(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(postgresql, ob, count=600)
    operations, sent = Operations(), 0
    hanging = asyncio.Event()

    @operations.operation("crm", at_least_once=True)
    async def send(delivery: Delivery) -> Outcome:
        nonlocal sent
        sent += 1
        if sent == 300:
            hanging.set()
            await asyncio.Event().wait()
        return Delivered()

    async def main() -> None:
        working = dispatcher(postgresql, ob, include=[operations], concurrency=1, grace=timedelta(seconds=0.2))
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        await hanging.wait()
        stopping.set()
        await pump
        await working.close()

    asyncio.run(main())

    left = list(postgresql.queue)
    assert len(left) == 301
    assert [row.maybe_sent for row in left].count(True) + [row.state for row in left].count("sending") == 1


def test_one_run_claims_nothing_ahead_even_after_a_continuous_one(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(postgresql, ob, count=400)
    operations, sent = Operations(), 0
    claims: list[int] = []
    exchange = DatabaseStore.exchange

    @operations.operation("crm", at_least_once=True)
    async def send(delivery: Delivery) -> Outcome:
        nonlocal sent
        sent += 1
        return Delivered()

    async def counted(self: DatabaseStore, *arguments: Any) -> Any:
        done = await exchange(self, *arguments)
        claims.append(len(done.claimed))
        return done

    async def main() -> None:
        working = dispatcher(postgresql, ob, include=[operations], concurrency=4)
        await pumping(working, lambda: sent == 400)
        await asyncio.to_thread(put, postgresql, ob, count=400)
        monkeypatch.setattr(DatabaseStore, "exchange", counted)
        assert await working.run_once() == 400
        await working.close()

    asyncio.run(main())

    assert sum(claims) == 400
    assert max(claims) == 2
