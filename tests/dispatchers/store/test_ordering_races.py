"""No order of two transactions loses the order of a group, or leaves it stuck."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.cli_runner import block
from support.concurrency import TEST_TIMEOUT, is_conflict
from support.daemons import wait_for
from support.database import TABLES, Database
from support.entries import (
    HOUR,
    change,
    claim,
    claim_one,
    claim_request,
    dispatcher,
    put,
    queue_row,
    settle,
    state,
    until_true,
)
from support.ordering import OrderedService, blocked, put_in_group, send_all, states_of

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import decisions
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue import claims_postgresql
from dispatchers.store.queue.ordering import advance_groups, sort_out
from dispatchers.stored_outcome import read_outcome
from dispatchers.transitions import ClaimedEntry, Settle
from outbox.sessions.session import flush_all
from outbox.sql.clock import clock_plus
from outbox.times import NEVER


@pytest.fixture
def store(postgresql: Database, ob: outbox.Outbox) -> DatabaseStore:
    return DatabaseStore(postgresql.new_engine(), ob.configuration)


@contextmanager
def in_the_background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def waits_for_a_lock(database: Database, work: Future[object]) -> None:
    """Return once one connection waits for another's lock; `work` must not have ended by then."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with database.unprepared_engine(isolation_level="AUTOCOMMIT").connect() as connection:
        wait_for(lambda: work.done() or connection.scalar(sa.text(waiting)), "a transaction to meet the lock")
    assert not work.done()


def claim_and_sort(connection: sa.Connection) -> tuple[list[UUID], list[UUID]]:
    """One exchange's claim, not committed: who may go, and who must wait."""
    claimed = claims_postgresql.claim(connection, TABLES, claim_request())
    may_go, must_wait = sort_out(connection, TABLES, claimed)
    claims_postgresql.settle(connection, TABLES, must_wait)
    return [entry.id for entry in may_go], [entry.id for entry, _ in must_wait]


def settle_in(connection: sa.Connection, entry: ClaimedEntry, end: Settle) -> None:
    assert claims_postgresql.settle(connection, TABLES, [(entry, end)])
    advance_groups(connection, TABLES, [(entry, end)])


def settle_alone(database: Database, entry: ClaimedEntry, end: Settle) -> None:
    with database.new_engine().begin() as connection:
        settle_in(connection, entry, end)


DONE = Settle("delivered", 1)
FAILED = Settle("failed", 1, reason="declined")


# --- positions are in commit order


def test_who_enqueues_second_waits_for_the_firsts_commit(postgresql: Database, ob: outbox.Outbox) -> None:
    service = OrderedService()
    first = postgresql.session()
    ob.enqueue(first, "crm.upsert", {"group": "ada", "name": "first"}, parent="first", ordering_key="ada")
    flush_all(first)

    with in_the_background() as pool:
        second = pool.submit(put_in_group, postgresql, ob, "second")
        waits_for_a_lock(postgresql, second)
        put_in_group(postgresql, ob, "another's", group="bob")
        first.commit()
        first.close()
        second.result(TEST_TIMEOUT)

    send_all(postgresql, ob, service)
    assert service.came == {"ada": ["first", "second"], "bob": ["another's"]}


def test_a_savepoint_that_is_rolled_back_gives_its_groups_back(postgresql: Database, ob: outbox.Outbox) -> None:
    with postgresql.begin() as session:
        savepoint = session.begin_nested()
        ob.enqueue(session, "crm.upsert", {"group": "ada", "name": "undone"}, parent="undone", ordering_key="ada")
        flush_all(session)
        savepoint.rollback()

        with in_the_background() as pool:
            pool.submit(put_in_group, postgresql, ob, "free").result(TEST_TIMEOUT)


def test_flushes_of_several_groups_take_them_in_one_order(postgresql: Database, ob: outbox.Outbox) -> None:
    """Each in the opposite order of the other, again and again: without an order of their own some would deadlock."""
    groups = [f"group {number}" for number in range(6)]
    barrier = threading.Barrier(2)

    def enqueue(name: str, ordered: list[str]) -> None:
        barrier.wait(TEST_TIMEOUT)
        for turn in range(15):
            with postgresql.begin() as session:
                for group in ordered:
                    ob.enqueue(session, "crm.upsert", {}, parent=f"{name} {turn} {group}", ordering_key=group)

    with in_the_background() as pool:
        works = [pool.submit(enqueue, "north", groups), pool.submit(enqueue, "south", groups[::-1])]
        for work in works:
            work.result(TEST_TIMEOUT)

    assert len(postgresql.entries) == 2 * 15 * 6


def test_two_flushes_in_opposite_order_get_advice_against_the_deadlock(postgresql: Database, ob: outbox.Outbox) -> None:
    barrier = threading.Barrier(2)

    def enqueue(name: str, first: str, second: str) -> BaseException | None:
        try:
            with postgresql.begin() as session:
                ob.enqueue(session, "crm.upsert", {}, parent=f"{name} {first}", ordering_key=first)
                flush_all(session)
                barrier.wait(TEST_TIMEOUT)
                ob.enqueue(session, "crm.upsert", {}, parent=f"{name} {second}", ordering_key=second)
        except sa.exc.DBAPIError as error:
            return error
        return None

    with in_the_background() as pool:
        works = [pool.submit(enqueue, "north", "a", "b"), pool.submit(enqueue, "south", "b", "a")]
        (error,) = [found for work in works if (found := work.result(TEST_TIMEOUT)) is not None]

    assert error.__notes__ == [
        "two transactions locked the same ordering keys in different orders: run the transaction again. To avoid this,"
        " enqueue the entries of several ordering keys before one flush: a flush always locks its keys in the same order"
    ]


# --- the claim of a follower, and the end of the head


def test_a_follower_that_is_being_blocked_is_seen_by_who_settles_the_head(
    postgresql: Database, ob: outbox.Outbox, store: DatabaseStore
) -> None:
    put_in_group(postgresql, ob, "head")
    head = claim_one(store)
    (follower,) = put_in_group(postgresql, ob, "follower")

    with in_the_background() as pool:
        with postgresql.engine.begin() as blocking:
            assert claim_and_sort(blocking) == ([], [follower])
            settling = pool.submit(settle_alone, postgresql, head, DONE)
            waits_for_a_lock(postgresql, settling)
        settling.result(TEST_TIMEOUT)

    assert claim_one(store).id == follower


def test_a_follower_is_not_blocked_by_a_head_that_is_being_settled(
    postgresql: Database, ob: outbox.Outbox, store: DatabaseStore
) -> None:
    service = OrderedService()
    put_in_group(postgresql, ob, "head")
    head = claim_one(store)
    _, follower = put_in_group(postgresql, ob, "next", "follower")

    with postgresql.engine.begin() as settling:
        settle_in(settling, head, DONE)
        with postgresql.new_engine().begin() as blocking:
            assert claim_and_sort(blocking) == ([], [follower])
        assert queue_row(postgresql, follower).due_at < NEVER

    wait_for(lambda: queue_row(postgresql, follower) is None or send_all(postgresql, ob, service), "it to be sent")
    assert service.came == {"ada": ["next", "follower"]}


def test_a_follower_is_not_blocked_by_a_head_that_an_app_may_cancel(postgresql: Database, ob: outbox.Outbox) -> None:
    service = OrderedService()
    head, _, follower = put_in_group(postgresql, ob, "head", "next", "follower")

    with postgresql.begin() as session:
        assert ob.cancel(session, head)
        with postgresql.new_engine().begin() as blocking:
            assert claim_and_sort(blocking) == ([], [follower])
        assert queue_row(postgresql, follower).due_at < NEVER

    wait_for(lambda: queue_row(postgresql, follower) is None or send_all(postgresql, ob, service), "it to be sent")
    assert service.came == {"ada": ["next", "follower"]}


def test_a_cancel_waits_for_the_claim_that_blocks_after_it_and_frees_it(
    postgresql: Database, ob: outbox.Outbox, store: DatabaseStore
) -> None:
    """The function's second statement must see what came to be while its first one waited."""
    head, follower = put_in_group(postgresql, ob, "head", "follower")
    change(postgresql, head, due_at=clock_plus(HOUR))

    def cancel() -> bool:
        with postgresql.begin() as session:
            return ob.cancel(session, head)

    with in_the_background() as pool:
        with postgresql.new_engine().begin() as blocking:
            assert claim_and_sort(blocking) == ([], [follower])
            cancelling = pool.submit(cancel)
            waits_for_a_lock(postgresql, cancelling)
        assert cancelling.result(TEST_TIMEOUT)

    assert claim_one(store).id == follower


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_the_database_refuses_a_cancel_whose_snapshot_hides_a_follower(
    postgresql: Database, ob: outbox.Outbox, level: str
) -> None:
    (head,) = put_in_group(postgresql, ob, "head")
    change(postgresql, head, due_at=clock_plus(HOUR))
    engine = postgresql.new_engine(isolation_level=level)

    with Session(engine) as session:
        session.execute(sa.text("SELECT count(*) FROM outbox_queue"))
        (follower,) = put_in_group(postgresql, ob, "follower")
        with postgresql.engine.begin() as blocking:
            assert claim_and_sort(blocking) == ([], [follower])
        with pytest.raises(sa.exc.DBAPIError) as refused:
            ob.cancel(session, head)
    assert is_conflict(refused.value)

    with Session(engine) as session, session.begin():
        assert ob.cancel(session, head)
    service = OrderedService()
    send_all(postgresql, ob, service)
    assert service.came == {"ada": ["follower"]}


@pytest.mark.parametrize("commits", [True, False])
def test_a_head_whose_next_may_be_cancelled_is_settled_later_alone(
    postgresql: Database, ob: outbox.Outbox, store: DatabaseStore, commits: bool
) -> None:
    """What else must be settled with it is settled, and what is due is claimed."""
    service = OrderedService()
    put_in_group(postgresql, ob, "head")
    put_in_group(postgresql, ob, "another's", group="bob")
    head, other = sorted(claim(store), key=lambda entry: entry.ordering_key or "")
    second, _ = put_in_group(postgresql, ob, "second", "third")
    with postgresql.new_engine().begin() as blocking:
        claim_and_sort(blocking)
    put_in_group(postgresql, ob, "yet another's", group="eve")

    with in_the_background() as pool, postgresql.session() as session:
        assert ob.cancel(session, second)
        exchange = asyncio.run(store.exchange([(head, DONE), (other, DONE)], claim_request()))
        assert (exchange.settled, exchange.postponed) == ({other.lease}, {head.lease})
        assert [entry.ordering_key for entry in exchange.claimed] == ["eve"]
        again = pool.submit(asyncio.run, store.exchange([(head, DONE)], None)).result(TEST_TIMEOUT)
        assert (again.settled, again.postponed) == (set(), {head.lease})
        session.commit() if commits else session.rollback()

    assert settle(store, (head, DONE)) == {head.id}
    send_all(postgresql, ob, service)
    assert service.came == {"ada": ["third"] if commits else ["second", "third"]}


async def until_written_down(database: Database, id: UUID) -> None:
    await until_true(
        lambda: (row := queue_row(database, id)) is not None and read_outcome(row.outcome).known is not None
    )


@pytest.mark.parametrize("commits", [True, False])
def test_an_app_that_is_cancelling_delays_only_its_own_group(
    postgresql: Database, ob: outbox.Outbox, commits: bool
) -> None:
    """However long it keeps its transaction open: the others are sent, and the head's outcome is not lost with its lease."""
    service, others = OrderedService(), MemoryAdapter(timeout=timedelta(seconds=1))
    service.timeout, service.window = timedelta(seconds=1), None  # if its lease were lost, it would be uncertain
    head, second, _ = put_in_group(postgresql, ob, "head", "second", "third")

    async def main() -> None:
        working = dispatcher(
            postgresql.new_engine(),
            ob,
            adapters={"crm": service, "other": others},
            lease=timedelta(seconds=8),
            margin=timedelta(seconds=1),
        )
        stopping = asyncio.Event()
        with postgresql.session() as session:
            assert ob.cancel(session, second)
            pump = asyncio.create_task(working.pump(stopping))
            await until_written_down(postgresql, head)
            put(postgresql, ob, "other.send", count=20)
            await until_true(lambda: len(others.deliveries) == 20)
            session.commit() if commits else session.rollback()
        await until_true(lambda: not postgresql.queue)
        stopping.set()
        await pump
        await working.close()

    asyncio.run(main())

    assert service.came == {"ada": ["head", "third"] if commits else ["head", "second", "third"]}
    assert state(postgresql, head) == "delivered"


def test_a_settling_that_waits_for_a_cancel_delays_no_app_that_enqueues(
    postgresql: Database, ob: outbox.Outbox, store: DatabaseStore
) -> None:
    """And an app's long transaction that has enqueued delays no settling."""
    put_in_group(postgresql, ob, "head")
    head = claim_one(store)
    with postgresql.begin() as session:
        ob.enqueue(session, "crm.upsert", {"group": "ada", "name": "next"}, parent="next", ordering_key="ada")
        flush_all(session)
        with in_the_background() as pool:
            pool.submit(settle_alone, postgresql, head, DONE).result(TEST_TIMEOUT)

    assert claim_one(store).ordering_key == "ada"


# --- the block, and the release


def test_a_follower_that_is_being_blocked_is_seen_by_the_groups_release(
    postgresql: Database, ob: outbox.Outbox, store: DatabaseStore
) -> None:
    put_in_group(postgresql, ob, "head")
    settle_alone(postgresql, claim_one(store), FAILED)
    (follower,) = put_in_group(postgresql, ob, "follower")
    assert list(blocked(postgresql)) == ["ada"]

    def release() -> None:
        with postgresql.new_engine().begin() as connection:
            decisions.release_group(connection, TABLES, "ada", actor="bob", reason="asked")

    with in_the_background() as pool:
        with postgresql.engine.begin() as blocking:
            assert claim_and_sort(blocking) == ([], [follower])
            releasing = pool.submit(release)
            waits_for_a_lock(postgresql, releasing)
        releasing.result(TEST_TIMEOUT)

    assert claim_one(store).id == follower


def test_two_who_claim_the_same_group_at_once_do_not_both_send(postgresql: Database, ob: outbox.Outbox) -> None:
    head, follower = put_in_group(postgresql, ob, "head", "follower")

    with postgresql.engine.begin() as first, postgresql.new_engine().begin() as second:
        locking = sa.select(TABLES.queue.c.id).where(TABLES.queue.c.id == follower).with_for_update()
        second.execute(locking)
        assert claim_and_sort(first) == ([head], [])
        assert claim_and_sort(second) == ([], [follower])

    assert states_of(postgresql, [head, follower]) == ["sending", "pending"]


def test_a_block_of_a_group_that_is_blocked_already_is_the_later_ones(
    postgresql: Database, ob: outbox.Outbox, store: DatabaseStore
) -> None:
    put_in_group(postgresql, ob, "first")
    first = claim_one(store)
    settle_alone(postgresql, first, FAILED)
    with postgresql.engine.begin() as connection:
        decisions.release_group(connection, TABLES, "ada", actor="bob", reason="asked")
    (second,) = put_in_group(postgresql, ob, "second")
    entry = claim_one(store)
    block(postgresql, first.id, "ada")

    settle_alone(postgresql, entry, FAILED)

    assert blocked(postgresql) == {"ada": second}
