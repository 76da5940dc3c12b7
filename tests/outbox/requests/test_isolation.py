"""Concurrent requests of one key at each isolation level: nothing is done twice, and the loser gets an error before it works.

At READ COMMITTED the loser sees what the winner has committed. At REPEATABLE READ and SERIALIZABLE its snapshot is older:
it is refused with `KeyInFlight`, or PostgreSQL ends it with 40001, and the caller runs the unit again.
"""

import asyncio
from datetime import timedelta
from functools import partial
from threading import Event

import pytest
import sqlalchemy as sa
from support.concurrency import ANSWER, TEST_TIMEOUT, RacingShop, at_once, is_conflict, retried
from support.database import ALL, CHARGE, NOTHING, PAYLOAD, Order
from support.entries import put, put_one, run_once, settlement_row, states

import outbox
from dispatchers import Delivered, Operations
from dispatchers.adapters import MemoryAdapter
from dispatchers.store.database import DatabaseStore
from outbox.sessions.session import flush_all

pytestmark = pytest.mark.as_app

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
STRICT = LEVELS[1:]
WAIT = {"wait": timedelta(seconds=TEST_TIMEOUT)}
TOO_NEW = (
    "a request with key 'retry-001' was answered after this transaction's snapshot, or the database preferred another"
    " transaction: roll the transaction back and run it again"
)


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


@pytest.fixture(params=["sync", "async"])
def shop(request, postgresql, ob, level):
    return RacingShop(postgresql, ob, is_async=request.param == "async", isolation_level=level)


def take_snapshot(session):
    session.execute(sa.text("SELECT 1"))


# --- idempotent


def test_of_ten_at_once_that_try_until_they_are_answered_one_works(shop):
    answers = at_once(10, lambda: retried(shop.request))

    assert len({answer.body for answer in answers}) == 1
    assert [type(answer) for answer in answers] == [outbox.Response] * 10
    assert shop.database.counts() == ALL


def test_while_one_works_the_other_gets_a_conflict_at_once(shop):
    refused = Event()
    shop.while_working = lambda session: refused.wait(TEST_TIMEOUT) or pytest.fail("the other was made to wait")

    def request():
        try:
            return shop.request()
        except outbox.KeyInFlight:
            refused.set()
            raise

    outcomes = at_once(2, request)

    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["KeyInFlight", "Response"]
    assert shop.executions == 1
    assert shop.database.counts() == ALL


def test_the_one_that_waited_replays_or_must_ask_again_and_does_not_work(shop, level):
    shop.while_working = lambda session: shop.wait_until_others_wait(1)

    outcomes = at_once(2, lambda: shop.request(**WAIT))

    assert ANSWER in outcomes
    refused = [str(outcome) for outcome in outcomes if outcome != ANSWER]
    assert refused == ([TOO_NEW] if level in STRICT else [])
    assert shop.executions == 1
    assert shop.request() == ANSWER
    assert shop.database.counts() == ALL


def test_the_one_that_waited_works_if_the_first_gives_up(shop):
    def give_up_once(session):
        shop.while_working = lambda session: None
        shop.wait_until_others_wait(1)
        raise outbox.OutboxError("the first gives up")

    shop.while_working = give_up_once

    outcomes = at_once(2, lambda: shop.request(**WAIT))

    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["OutboxError", "Response"]
    assert shop.executions == 2
    assert shop.database.counts() == ALL


def test_what_was_answered_after_the_snapshot_is_never_done_again(shop, level):
    def be_overtaken(session):
        take_snapshot(session)
        at_once(1, shop.request)  # on a thread: an event loop is running here

    def request():
        return shop.request(before=be_overtaken)

    (outcome,) = at_once(1, request)

    assert (str(outcome) if level in STRICT else outcome) == (TOO_NEW if level in STRICT else ANSWER)
    assert getattr(outcome, "retry_after", timedelta(seconds=1)) == timedelta(seconds=1)
    assert shop.executions == 1
    assert shop.database.counts() == ALL


@pytest.mark.parametrize("level", STRICT)
def test_who_is_refused_may_continue_in_the_same_transaction(postgresql, ob, level):
    shop = RacingShop(postgresql, ob, is_async=False, isolation_level=level)

    def work(session):
        take_snapshot(session)
        shop.request()
        with pytest.raises(outbox.KeyInFlight), shop.claim(session):
            pytest.fail("the block was entered")
        session.add(Order(customer="grace", amount=1))

    shop.unit(work)

    assert sorted(order.customer for order in postgresql.orders) == ["ada", "grace"]


def test_an_expired_key_is_freed_by_one_and_the_one_overtaken_is_refused(shop, level):
    def renew():
        return shop.request(content={"another": "order"})

    with (
        shop.database.begin() as session,
        shop.ob.idempotent(session, "retry-001", scope="acct_1", content={}) as claim,
    ):
        claim.respond(200)
    shop.database.age_records(timedelta(hours=25))

    (outcome,) = at_once(1, lambda: shop.request(before=lambda session: [take_snapshot(session), at_once(1, renew)]))

    expected = (outbox.KeyInFlight, TOO_NEW) if level in STRICT else (outbox.RequestMismatch, str(outcome))
    assert (type(outcome), str(outcome)) == expected
    assert shop.executions == 1
    assert shop.database.counts() == ALL


def test_a_conflict_in_the_block_frees_the_key_and_the_unit_is_run_again(shop, level):
    """Two orders of different customers count on the same row: at a strict level one of them is a 40001."""
    with shop.database.begin() as session:
        session.add(Order(id=1_000, customer="stock", amount=5))
    take_one = sa.update(Order).where(Order.id == 1_000).values(amount=Order.amount - 1)
    overtaken = []

    def be_overtaken_once(session):
        if not overtaken:
            overtaken.append(True)
            shop.database.execute(take_one)
        session.execute(take_one)

    shop.while_working = be_overtaken_once
    (first,) = at_once(1, shop.request)
    if level in STRICT:
        assert is_conflict(first)
        assert shop.database.counts() == NOTHING | {"orders": 1}

    answer = retried(shop.request)

    assert answer.status == 201
    assert shop.database.counts() == ALL | {"orders": 2}
    assert shop.database.orders[-1].amount == 3


# --- enqueue, status, cancel


def test_an_effect_enqueued_since_the_snapshot_is_duplicate_or_conflict(shop, level):
    def enqueue(session):
        shop.ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")
        flush_all(session)

    def be_overtaken(session):
        take_snapshot(session)
        at_once(1, lambda: shop.unit(enqueue))
        enqueue(session)

    outcomes = [*at_once(1, lambda: shop.unit(be_overtaken)), *at_once(1, lambda: shop.unit(enqueue))]

    assert [is_conflict(outcome) for outcome in outcomes] == [level in STRICT, False]
    assert isinstance(outcomes[1], outbox.DuplicateEntry)
    assert len(shop.database.entries) == len(shop.database.queue) == 1


def test_of_ten_that_enqueue_the_same_effect_at_once_one_does(shop):
    def enqueue(session):
        return shop.ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42", if_exists="ignore").id

    ids = at_once(10, lambda: retried(lambda: shop.unit(enqueue)))

    assert set(ids) == {entry.id for entry in shop.database.entries}
    assert len(shop.database.queue) == 1


def test_what_was_sent_since_the_snapshot_is_not_cancelled(shop, level):
    id = put_one(shop.database, shop.ob)
    service = MemoryAdapter()

    def be_overtaken(session):
        take_snapshot(session)
        at_once(1, lambda: run_once(shop.database, shop.ob, adapters={"crm": service}))
        return shop.ob.cancel(session, id)

    (outcome,) = at_once(1, lambda: shop.unit(be_overtaken))

    assert is_conflict(outcome) if level in STRICT else outcome is False
    assert settlement_row(shop.database, id).state == "delivered"
    assert len(service.deliveries) == 1
    assert retried(lambda: shop.unit(lambda session: shop.ob.cancel(session, id))) is False


@pytest.mark.owner
def test_each_of_fifty_entries_is_sent_or_cancelled_and_none_both(shop, level):
    ids = put(shop.database, shop.ob, count=50)
    service = MemoryAdapter()
    engine = shop.database.new_engine(isolation_level=level)
    cancelled = []

    def cancel(id):
        return shop.unit(lambda session: shop.ob.cancel(session, id))

    def cancel_all():
        cancelled.extend(id for id in ids if retried(partial(cancel, id)))

    works = [cancel_all, lambda: run_once(engine, shop.ob, adapters={"crm": service})]
    outcomes = at_once(2, lambda: works.pop()())
    run_once(engine, shop.ob, adapters={"crm": service})

    assert not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    assert not set(cancelled) & {delivery.id for delivery in service.deliveries}
    assert states(shop.database) == {
        state: count for state, count in (("cancelled", len(cancelled)), ("delivered", 50 - len(cancelled))) if count
    }


def test_a_strict_level_sees_one_state_of_the_effects_throughout(shop, level):
    id = put_one(shop.database, shop.ob, parent="order:1")

    def look_twice(session):
        first = shop.ob.status(session, "order:1")[0].state
        at_once(1, lambda: run_once(shop.database, shop.ob, adapters={"crm": MemoryAdapter()}))
        return first, shop.ob.status(session, "order:1")[0].state

    seen = shop.unit(look_twice)

    assert seen == ("pending", "pending" if level in STRICT else "delivered")
    assert settlement_row(shop.database, id).state == "delivered"


# --- the dispatcher, on an engine of that level


def engine_at(database, level, kind):
    return (
        database.async_engine(isolation_level=level) if kind == "async" else database.new_engine(isolation_level=level)
    )


kinds = pytest.mark.parametrize("kind", ["sync", "async"])


@kinds
@pytest.mark.owner
def test_the_dispatcher_claims_at_read_committed_whatever_the_engine_says(postgresql, ob, level, kind):
    store = DatabaseStore(engine_at(postgresql, level, kind), ob.configuration)
    look = sa.text("SHOW transaction_isolation")

    async def levels():
        try:
            return [await store.run(lambda connection: connection.execute(look).scalar_one()) for _ in range(2)]
        finally:
            await store.close()

    assert asyncio.run(levels()) == ["read committed"] * 2


def test_a_level_that_the_server_sets_is_passed_over_too(postgresql, ob):
    url = postgresql.url.update_query_dict({"options": "-c default_transaction_isolation=serializable"})
    store = DatabaseStore(url, ob.configuration)
    look = sa.text("SELECT current_setting('default_transaction_isolation'), current_setting('transaction_isolation')")

    levels = asyncio.run(store.run(lambda connection: tuple(connection.execute(look).one())))
    asyncio.run(store.close())

    assert levels == ("serializable", "read committed")


def settling(kind, work):
    """Operations with a service that delivers, and a callback that does `work(session)`."""
    operations = Operations()

    @operations.operation("crm")
    async def deliver(delivery):
        return Delivered()

    if kind == "async":

        @operations.on_settled("crm")
        async def settled_async(session, settlement):
            await session.run_sync(work)
    else:

        @operations.on_settled("crm")
        def settled(session, settlement):
            work(session)

    return operations


@kinds
@pytest.mark.owner
def test_a_callback_runs_at_the_engine_s_own_level(postgresql, ob, level, kind):
    put_one(postgresql, ob)
    seen = []

    def look(session):
        seen.append(session.execute(sa.text("SHOW transaction_isolation")).scalar_one())

    settled = run_once(engine_at(postgresql, level, kind), ob, include=[settling(kind, look)])

    assert (settled, seen) == (1, [level.lower()])


@kinds
@pytest.mark.owner
def test_on_an_engine_in_autocommit_mode_a_callback_has_a_transaction(postgresql, ob, kind):
    put_one(postgresql, ob)

    def write_and_fail(session):
        ob.enqueue(session, "mail.send", PAYLOAD, parent="order:1")
        session.flush()
        raise RuntimeError("a bug")

    run_once(engine_at(postgresql, "AUTOCOMMIT", kind), ob, include=[settling(kind, write_and_fail)])

    assert "its callback raised RuntimeError" in postgresql.queue[0].outcome
    assert [entry.operation for entry in postgresql.entries] == ["crm.upsert"]


@kinds
@pytest.mark.owner
def test_on_an_engine_in_autocommit_mode_the_store_has_transactions(postgresql, ob, kind):
    store = DatabaseStore(engine_at(postgresql, "AUTOCOMMIT", kind), ob.configuration)

    def ids(connection):
        return [connection.execute(sa.text("SELECT pg_current_xact_id()::text")).scalar_one() for _ in range(2)]

    first, second = asyncio.run(store.run(ids))

    assert first == second


def test_the_trial_of_a_strict_level_leaves_no_record_if_unanswered(shop):
    def give_up(session):
        raise outbox.OutboxError("gives up")

    shop.while_working = give_up
    with pytest.raises(outbox.OutboxError, match="gives up"):
        shop.request()

    assert shop.database.counts() == NOTHING
