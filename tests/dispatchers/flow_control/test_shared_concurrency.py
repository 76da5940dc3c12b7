"""The permits of a destination that its dispatchers share: never more concurrent sends than permits.

Each dispatcher here has connections of its own, as a process would.
"""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database
from support.entries import (
    HOUR,
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
from dispatchers import Delivery, Limits, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import pause, resume
from dispatchers.flow_control.state import PERMITS_WAIT, FlowUpdate, News, Taken, on_record
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Exchange
from dispatchers.transitions import ClaimedEntry

THREE = Limits(total_concurrency=3)
THREE_OF_CRM = {"crm": THREE}


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
    limits = {"crm": Limits(concurrency=2, total_concurrency=3)}  # so that neither takes them all
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
    working = dispatcher(database, ob, adapters={"crm": crm}, limits={"crm": Limits(total_concurrency=2)}, poll=HOUR)

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
    monkeypatch.setattr("dispatchers.pipeline.claim_loops.MAX_PERMIT_REPORTS", 2)
    put(postgresql, ob)
    stopped = postgresql.engine.connect()

    class Stopping(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            stopped.execute(sa.select(TABLES.destination).with_for_update())
            return await super().send(delivery)

    assert work(postgresql, ob, Stopping()) == 1
    stopped.close()

    assert [each.permits for each in taken_of(postgresql)] == [1]  # until its lease ends


def test_a_resumption_frees_no_permit_of_what_is_being_sent(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=6)
    claimed_by_another(database, ob)
    with database.engine.begin() as connection:
        pause(connection, TABLES, "crm", actor="ada", reason="asked")
        resume(connection, TABLES, "crm", actor="ada", reason="asked")

    assert work(database, ob, MemoryAdapter()) == 0


def test_a_dispatcher_without_the_limit_neither_counts_nor_is_counted(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=6)
    claimed_by_another(database, ob)
    before = taken_of(database)

    assert work(database, ob, MemoryAdapter(), limits={}) == 3

    assert taken_of(database) == before
