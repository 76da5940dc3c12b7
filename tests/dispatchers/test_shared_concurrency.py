"""The permits of a destination that its dispatchers share: never more sends at once than permits.

Each dispatcher here has connections of its own, as a process would.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from support.database import TABLES, Database
from support.entries import (
    HOUR,
    LEASE,
    Blocking,
    age,
    claim_request,
    claims_again,
    dispatcher,
    pumping,
    put,
    quota,
    run_once,
    states,
    until_true,
)

import outbox
from dispatchers import Breaker, Delivery, Limits, Operations, Outcome, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decisions import pause, resume
from dispatchers.flow_control.state import (
    PERMITS_WAIT,
    FlowState,
    FlowUpdate,
    News,
    Taken,
    admitted,
    as_record,
    claimed,
    heard,
    on_record,
    opens_at,
)
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Exchange
from dispatchers.transitions import ClaimedEntry

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
FIRST, SECOND_ONE = UUID(int=1), UUID(int=2)
CALM = FlowState()
THREE = Limits(concurrency_in_all=3)
THREE_OF_CRM = {"crm": THREE}


# --- the rules


def test_what_one_claim_takes_no_other_gets_until_its_sends_have_ended() -> None:
    state = claimed(CALM, THREE, NOW, 2, FIRST, LEASE)
    assert admitted(state, THREE, NOW, 50) == 1
    state = claimed(state, THREE, NOW, 1, SECOND_ONE, LEASE)
    assert admitted(state, THREE, NOW, 50) == 0

    state = heard(state, News(left={FIRST: 1}), THREE, NOW)
    assert admitted(state, THREE, NOW, 50) == 1
    state = heard(state, News(left={FIRST: 0}), THREE, NOW)

    assert admitted(state, THREE, NOW, 50) == 2
    assert [each.token for each in state.permits_taken] == [SECOND_ONE]


def test_permits_without_news_are_free_when_their_lease_ends_not_sooner() -> None:
    state = claimed(CALM, THREE, NOW, 3, FIRST, LEASE)

    assert admitted(state, THREE, NOW + LEASE - SECOND, 50) == 0
    assert admitted(state, THREE, NOW + LEASE, 50) == 3


def test_what_has_come_free_leaves_no_trace() -> None:
    state = claimed(CALM, THREE, NOW, 3, FIRST, LEASE)

    later = claimed(state, THREE, NOW + LEASE, 1, SECOND_ONE, LEASE)

    assert [each.token for each in later.permits_taken] == [SECOND_ONE]
    assert heard(later, News(left={SECOND_ONE: 0}), THREE, NOW + LEASE).permits_taken == ()


def test_news_of_a_claims_end_reported_twice_or_late_change_nothing() -> None:
    state = claimed(CALM, THREE, NOW, 3, FIRST, LEASE)
    one_left = heard(state, News(left={FIRST: 1}), THREE, NOW)

    assert heard(one_left, News(left={FIRST: 1}), THREE, NOW) == one_left
    assert heard(one_left, News(left={FIRST: 2}), THREE, NOW) == one_left
    none_left = heard(one_left, News(left={FIRST: 0}), THREE, NOW)
    assert heard(none_left, News(left={FIRST: 1}), THREE, NOW) == none_left


def test_of_news_reported_together_what_is_left_last_counts() -> None:
    reported = News(left={FIRST: 2, SECOND_ONE: 1}).then(News(left={FIRST: 1}))

    assert reported.left == {FIRST: 1, SECOND_ONE: 1}


def test_a_smaller_limit_counts_what_was_taken_under_a_larger_one() -> None:
    state = claimed(CALM, Limits(concurrency_in_all=10), NOW, 10, FIRST, LEASE)

    assert admitted(state, THREE, NOW, 50) == 0
    assert admitted(heard(state, News(left={FIRST: 2}), THREE, NOW), THREE, NOW, 50) == 1


def test_without_a_permit_it_is_worth_asking_again_soon_but_not_at_once() -> None:
    state = claimed(CALM, THREE, NOW, 3, FIRST, LEASE)

    assert opens_at(state, THREE, NOW) == NOW + PERMITS_WAIT
    assert opens_at(claimed(CALM, THREE, NOW, 2, FIRST, LEASE), THREE, NOW) is None


def test_a_claim_gets_what_both_rate_and_permits_leave() -> None:
    both = Limits(concurrency_in_all=3, rate=1, burst=2)

    assert admitted(CALM, both, NOW, 50) == 2
    once = claimed(CALM, both, NOW, 2, FIRST, LEASE)
    assert admitted(once, both, NOW, 50) == 0
    assert opens_at(once, both, NOW) == NOW + SECOND
    assert admitted(once, both, NOW + 2 * SECOND, 50) == 1


def test_a_probe_needs_a_permit_too() -> None:
    limits = Limits(concurrency_in_all=3, breaker=Breaker(failures=1, wait=SECOND))
    state = heard(claimed(CALM, limits, NOW, 3, FIRST, LEASE), News(failures=1), limits, NOW)

    assert admitted(state, limits, NOW + 2 * SECOND, 50) == 0
    assert admitted(heard(state, News(left={FIRST: 1}), limits, NOW), limits, NOW + 2 * SECOND, 50) == 1


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["claim", "end", "tell", "report again", "crash"]), st.integers(0, 9), st.floats(0, 20)
        ),
        max_size=40,
    )
)
def test_no_history_sees_more_sends_at_once_than_there_are_permits(history: list[tuple[str, int, float]]) -> None:
    """`under_way`: how many sends of each claim really are, and until when its lease lasts; reported is all news so far."""
    state, now = CALM, NOW
    under_way: dict[UUID, tuple[int, datetime]] = {}
    gone: set[UUID] = set()
    reported: list[News] = []
    for number, (move, chosen, pause_seconds) in enumerate(history):
        now += timedelta(seconds=pause_seconds)
        living = [token for token, (sends, until) in under_way.items() if token not in gone and sends and until > now]
        token = living[chosen % len(living)] if living else None
        if move == "claim" and (entries := admitted(state, THREE, now, 1 + chosen % 3)):
            state = claimed(state, THREE, now, entries, UUID(int=number), LEASE)
            under_way[UUID(int=number)] = entries, now + LEASE
        elif move in ("end", "tell") and token is not None:
            under_way[token] = under_way[token][0] - 1, under_way[token][1]
            reported.append(News(left={token: under_way[token][0]}))
            if move == "tell":
                state = heard(state, reported[-1], THREE, now)
        elif move == "report again" and reported:
            state = heard(state, reported[chosen % len(reported)], THREE, now)
        elif move == "crash" and token is not None:
            gone.add(token)
        assert sum(sends for sends, until in under_way.values() if until > now) <= 3

    assert admitted(state, THREE, now + LEASE, 50) == 3


def test_what_is_taken_is_read_as_it_was_written() -> None:
    taken = (Taken(FIRST, 2, NOW), Taken(SECOND_ONE, 1, NOW + 0.000001 * SECOND))

    assert on_record(as_record(taken)) == taken
    assert (as_record(()), on_record(None)) == (None, ())


# --- on a database


def taken_of(database: Database) -> tuple[Taken, ...]:
    """What is on record as taken of crm."""
    return next((on_record(row.permits_taken) for row in database.rows(TABLES.destination) if row.name == "crm"), ())


def claim_permits(store: DatabaseStore, *, permits: int = 50, **flow_update: Any) -> Exchange:
    """What a dispatcher with this limit asks for."""
    given: dict[str, Any] = {"news": {}, "decided": frozenset({"crm"}), "limits": THREE_OF_CRM}
    request = claim_request(quota(permits=permits), flow_update=FlowUpdate(**given | flow_update), lease=HOUR)
    return asyncio.run(store.exchange([], request))


def claimed_by_another(database: Database, ob: outbox.Outbox) -> tuple[DatabaseStore, list[ClaimedEntry]]:
    """All three permits, for an hour: as by a dispatcher that hangs, or was killed."""
    other = DatabaseStore(database.new_engine(), ob.configuration)
    entries: list[ClaimedEntry] = []
    while len(entries) < 3:  # PostgreSQL takes them in powers of two
        entries += claim_permits(other).claimed
    return other, entries


def report_ends(store: DatabaseStore, entries: list[ClaimedEntry]) -> None:
    left = {"crm": News(left={entry.lease_token: 0 for entry in entries})}
    found = None
    while found is None or "crm" not in found.of:  # it is reported again while another dispatcher has locked the row
        found = claim_permits(store, permits=0, news=left, decided=frozenset()).flow_states


def work(database: Database, ob: outbox.Outbox, adapter: Any, **settings: Any) -> int:
    before = len(adapter.deliveries)
    run_once(database.new_engine(), ob, **{"adapters": {"crm": adapter}, "limits": THREE_OF_CRM} | settings)
    return len(adapter.deliveries) - before


def test_dispatchers_together_use_all_of_their_limit_and_no_more(database: Database, ob: outbox.Outbox) -> None:
    limits = {"crm": Limits(concurrency=2, concurrency_in_all=3)}  # so that neither takes them all
    put(database, ob, count=30)
    crm, mails = Blocking(), [MemoryAdapter(), MemoryAdapter()]

    async def main() -> None:
        working = [
            dispatcher(database.new_engine(), ob, adapters={"crm": crm, "mail": mail}, limits=limits, grace=HOUR)
            for mail in mails
        ]
        pumps = [asyncio.create_task(pumping(each, lambda: set(states(database)) == {"delivered"})) for each in working]
        await until_true(lambda: crm.waiting == 3)
        await claims_again(database, ob, *mails)
        assert crm.waiting == 3
        crm.released.set()
        await asyncio.gather(*pumps)
        for each in working:
            await each.close()

    asyncio.run(main())

    assert crm.most == 3
    assert taken_of(database) == ()


def test_dispatchers_that_claim_at_once_keep_to_it_too(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=30)
    stores = [DatabaseStore(database.new_engine(), ob.configuration) for _ in range(4)]
    barrier = Barrier(len(stores))

    def claim_until_none(store: DatabaseStore) -> int:
        asyncio.run(store.survey())  # connected, so that all come at once
        barrier.wait()
        limits = {"crm": Limits(concurrency_in_all=7)}
        return sum(len(claim_permits(store, permits=4, limits=limits).claimed) for _ in range(6))

    with ThreadPoolExecutor(len(stores)) as threads:
        found = list(threads.map(claim_until_none, stores))

    assert sum(found) == 7
    assert sum(each.permits for each in taken_of(database)) == 7


def test_who_finds_no_permit_gets_a_dead_dispatchers_when_its_lease_ends(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=10)
    claimed_by_another(database, ob)
    crm = MemoryAdapter()

    assert work(database, ob, crm) == 0
    age(database, HOUR - timedelta(minutes=1))
    assert work(database, ob, crm) == 0
    age(database, timedelta(minutes=1))
    assert work(database, ob, crm) == 10

    assert states(database) == {"delivered": 10}
    assert taken_of(database) == ()


def test_what_is_given_up_at_once_keeps_its_permits(database: Database, ob: outbox.Outbox) -> None:
    """The outcome is unknown, as after a crash."""
    put(database, ob, count=10)
    crm = Blocking()

    async def main() -> None:
        working = dispatcher(database, ob, adapters={"crm": crm}, limits=THREE_OF_CRM)
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        await until_true(lambda: crm.waiting == 3)
        stopping.set()
        await working.abandon()
        await pump

    asyncio.run(main())

    assert sum(each.permits for each in taken_of(database)) == 3
    assert work(database, ob, MemoryAdapter()) == 0


def test_a_dispatcher_uses_its_own_permits_again_at_once(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.flow_control.state.PERMITS_WAIT", HOUR)
    put(database, ob, count=10)
    crm = MemoryAdapter()
    working = dispatcher(database, ob, adapters={"crm": crm}, limits={"crm": Limits(concurrency_in_all=2)}, poll=HOUR)

    asyncio.run(pumping(working, lambda: states(database) == {"delivered": 10}))


def test_a_dispatcher_that_waits_takes_what_another_frees_and_asks_seldom(
    database: Database, ob: outbox.Outbox
) -> None:
    put(database, ob, count=4)
    other, entries = claimed_by_another(database, ob)
    crm = MemoryAdapter()
    passed: list[float] = []

    class CountingStore(DatabaseStore):
        exchanges = 0

        async def exchange(self, *arguments: Any) -> Exchange:
            self.exchanges += 1
            return await super().exchange(*arguments)

    async def main() -> None:
        store = CountingStore(database.new_engine(), ob.configuration)
        working = dispatcher(None, ob, store=store, adapters={"crm": crm}, limits=THREE_OF_CRM, poll=HOUR)
        pump = asyncio.create_task(pumping(working, lambda: len(crm.deliveries) == 1))
        await until_true(lambda: store.exchanges > 0)
        began, before = asyncio.get_running_loop().time(), store.exchanges
        await until_true(lambda: store.exchanges >= before + 8)  # two loops, which ask again and again
        passed.append(asyncio.get_running_loop().time() - began)
        assert crm.deliveries == []
        await asyncio.to_thread(report_ends, other, entries)
        await pump

    asyncio.run(main())

    assert passed[0] > 2 * PERMITS_WAIT.total_seconds()


def test_what_settles_with_a_callback_frees_its_permit_before_the_end(database: Database, ob: outbox.Outbox) -> None:
    effects = Operations()
    effects.on_settled("crm")(lambda session, settlement: None)
    put(database, ob, count=5)
    working = dispatcher(database, ob, adapters={"crm": MemoryAdapter()}, include=[effects], limits=THREE_OF_CRM)

    asyncio.run(pumping(working, lambda: states(database) == {"delivered": 5}))

    assert taken_of(database) == ()


@pytest.mark.parametrize("drains", [False, True], ids=["run_once", "a drain"])
def test_permits_that_cannot_be_freed_at_once_are_freed_a_moment_later(
    postgresql: Database, ob: outbox.Outbox, drains: bool
) -> None:
    """Another dispatcher is just deciding about the destination."""
    put(postgresql, ob)
    deciding = postgresql.engine.connect()

    class Busy(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            deciding.execute(sa.select(TABLES.destination).with_for_update())
            asyncio.get_running_loop().call_later(0.2, deciding.rollback)
            return await super().send(delivery)

    working = dispatcher(postgresql.new_engine(), ob, adapters={"crm": Busy()}, limits=THREE_OF_CRM)

    async def main() -> None:
        if drains:
            await pumping(working, lambda: states(postgresql) == {"delivered": 1})
        else:
            await working.run_once()

    asyncio.run(main())
    deciding.close()

    assert states(postgresql) == {"delivered": 1}
    assert taken_of(postgresql) == ()


def test_a_process_that_locks_a_destinations_row_lets_the_others_end(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.pipeline.claim_loops.PERMIT_REPORTS_MAX", 2)
    put(postgresql, ob)
    stopped = postgresql.engine.connect()

    class Stopping(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            stopped.execute(sa.select(TABLES.destination).with_for_update())
            return await super().send(delivery)

    assert work(postgresql, ob, Stopping()) == 1
    stopped.close()

    assert [each.permits for each in taken_of(postgresql)] == [1]  # until its lease ends


def test_a_breaker_a_rate_and_a_pause_delay_what_has_a_permit(database: Database, ob: outbox.Outbox) -> None:
    limits = {"crm": Limits(concurrency_in_all=1, breaker=Breaker(failures=3, wait=HOUR, wait_max=HOUR))}
    put(database, ob, count=10)
    crm = MemoryAdapter([Unknown("HTTP 500")] * 3)

    assert work(database, ob, crm, limits=limits) == 3
    assert taken_of(database) == ()
    assert work(database, ob, crm, limits=limits) == 0
    with database.engine.begin() as connection:
        pause(connection, TABLES, "crm", actor="ada")
    age(database, 2 * HOUR)
    assert work(database, ob, crm, limits=limits) == 0
    with database.engine.begin() as connection:
        resume(connection, TABLES, "crm", actor="ada")
    assert work(database, ob, crm, limits={"crm": Limits(concurrency_in_all=3, rate=0.001, burst=4)}) == 4
    assert work(database, ob, crm, limits={"crm": Limits(concurrency_in_all=3)}) == 6

    assert states(database) == {"delivered": 10}


def test_a_successful_probe_frees_its_permit_and_lets_everything_through(database: Database, ob: outbox.Outbox) -> None:
    limits = {"crm": Limits(concurrency_in_all=1, breaker=Breaker(failures=1, wait=HOUR, wait_max=HOUR))}
    put(database, ob, count=6)
    crm = MemoryAdapter([Unknown("HTTP 500")])
    assert work(database, ob, crm, limits=limits) == 1
    age(database, 2 * HOUR)

    assert work(database, ob, crm, limits=limits) == 6

    assert states(database) == {"delivered": 6}


def test_a_resumption_frees_no_permit_of_what_is_being_sent(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=6)
    claimed_by_another(database, ob)
    with database.engine.begin() as connection:
        pause(connection, TABLES, "crm", actor="ada")
        resume(connection, TABLES, "crm", actor="ada")

    assert work(database, ob, MemoryAdapter()) == 0


def test_a_dispatcher_without_the_limit_neither_counts_nor_is_counted(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=6)
    claimed_by_another(database, ob)
    before = taken_of(database)

    assert work(database, ob, MemoryAdapter(), limits={}) == 3

    assert taken_of(database) == before
