"""A leased claim: committed first, taken over when it runs out, answered by its owner only."""

import asyncio
from datetime import timedelta

import pytest
import sqlalchemy as sa
from support.database import ALL, NOTHING, PAYLOAD, REQUEST, Order, colliding_order
from support.leases import KEY, MINUTE, RECEIPT, Shop

import outbox

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

OTHER_BODY = {"customer": "bob", "amount": 1}
LEASED = {"orders": 0, "records": 1, "entries": 0, "queue": 0}


@pytest.fixture(params=["sync", "async"])
def shop(request, database, ob):
    return Shop(database, ob, is_async=request.param == "async")


@pytest.fixture
def other(database, ob):
    """Another process, asked in the middle of a request."""
    return Shop(database, ob)


def fail(claim):
    raise ZeroDivisionError


# --- one attempt


def test_the_order_the_entry_and_the_answer_commit_together(shop, database):
    response = shop.request()

    assert response.status == 201
    assert database.counts() == ALL
    record = shop.record()
    assert (record.state, record.status, record.body) == ("succeeded", 201, b'{"order":"placed"}')
    assert (record.lease_token, record.lease_until) == (None, None)
    assert abs(record.replay_until - record.answered_at - timedelta(hours=24)) < MINUTE


def test_while_the_handler_works_no_transaction_is_open(shop, database):
    seen = []

    def look(claim):
        seen.extend(database.records)
        with database.begin() as session:  # on SQLite, impossible beside another transaction
            session.add(Order(customer="bob", amount=1))

    shop.request(look)

    (record,) = seen
    assert (record.state, record.status, record.kid) == ("leased", None, "k1")
    assert MINUTE - timedelta(seconds=10) < record.lease_until - record.created_at < MINUTE + timedelta(seconds=10)


def test_an_entry_of_a_fence_derives_from_the_claim_and_names_its_record(shop, database, ob):
    keys = []

    shop.request(lambda claim: keys.append(claim.child_key(RECEIPT)))

    (entry,) = database.entries
    assert (entry.parent, entry.scope, entry.source, entry.kid) == (KEY, "acct_1", "http", "k1")
    assert entry.record_id == entry.parent_id == shop.record().id
    parent = outbox.ParentKey(KEY, scope="acct_1", source="http")
    assert keys == [ob.child_key(parent, RECEIPT)]


def test_a_retry_is_answered_with_the_stored_response_and_calls_no_service(shop):
    first = shop.request()

    assert shop.request(fail) == first


def test_an_answer_without_rows_is_stored_by_respond(database, ob):
    shop = Shop(database, ob)
    with shop.block(database.engine) as claim:
        claim.respond(402, {"error": "card_declined"})
        assert shop.record().state == "failed"

    assert shop.request(fail).json() == {"error": "card_declined"}


def test_an_answer_without_rows_is_stored_by_an_awaited_respond(database, ob):
    shop = Shop(database, ob, is_async=True)

    async def decline():
        async with shop.block(database.async_engine()) as claim:
            await claim.respond(402, {"error": "card_declined"})

    asyncio.run(decline())

    assert shop.record().state == "failed"
    assert shop.request(fail).status == 402


def test_a_fence_that_rejects_keeps_the_answer_and_nothing_else(shop, database):
    def reject(session, fence):
        session.add(Order(customer="ada", amount=1))
        shop.ob.enqueue(session, RECEIPT, PAYLOAD)
        fence.reject(402, "declined")

    shop.request(write=reject)

    assert database.counts() == LEASED
    assert (shop.record().state, shop.record().status) == ("failed", 402)


def test_a_fence_without_an_answer_is_a_step_on_the_way(database, ob):
    shop = Shop(database, ob)
    with shop.block(database.engine) as claim:
        with database.begin() as session, claim.fence(session):
            session.add(Order(customer="ada", amount=1))
        assert shop.record().state == "leased"
        claim.respond(201)

    assert database.counts() == {"orders": 1, "records": 1, "entries": 0, "queue": 0}


# --- in flight


def test_a_request_under_a_lease_is_in_flight_until_the_lease_ends(shop, other):
    def ask_again(claim):
        with pytest.raises(outbox.KeyInFlight) as caught:
            other.request(fail)
        seconds = caught.value.retry_after.seconds
        assert 50 <= seconds <= 60
        assert str(caught.value) == f"a request with key 'retry-001' is being processed now: retry in {seconds} s"

    assert shop.request(ask_again).status == 201


def test_another_request_under_its_key_is_a_mismatch_whatever_its_lease(shop, other):
    def ask_otherwise(claim):
        for _ in range(2):
            with pytest.raises(outbox.RequestMismatch):
                other.request(fail, content=OTHER_BODY)
            other.run_out()

    assert shop.request(ask_otherwise).status == 201


def test_a_one_transaction_claim_on_a_leased_key_is_in_flight(shop, database, ob):
    texts = []

    def claim_in_one_transaction(claim):
        for _ in range(2):
            with pytest.raises(outbox.KeyInFlight) as caught, database.begin() as session:
                ob.idempotent(session, KEY, scope="acct_1", content=REQUEST).__enter__()
            texts.append(str(caught.value))
            shop.run_out()

    shop.request(claim_in_one_transaction)

    assert "is being processed now" in texts[0]
    assert texts[1] == (
        "the request with key 'retry-001' has no answer, and the lease under which it began has expired: only outbox.leased can"
        " take it over"
    )


def test_a_key_in_a_one_transaction_claim_is_in_flight_for_a_lease(database, ob):
    engine = database.new_engine(connect_args={"timeout": 0.05} if database.name == "sqlite" else {})
    with (
        database.begin() as session,
        ob.idempotent(session, KEY, scope="acct_1", content=REQUEST) as claim,
    ):
        with pytest.raises(outbox.KeyInFlight):
            Shop(database, ob).block(engine).__enter__()
        claim.respond(201)

    assert Shop(database, ob).request(fail).status == 201


# --- what ends a lease


def test_an_exception_stores_nothing_and_the_next_attempt_takes_over(shop, database):
    with pytest.raises(ZeroDivisionError):
        shop.request(fail)
    assert database.counts() == LEASED

    assert shop.request().status == 201
    assert database.counts() == ALL


def test_after_an_exception_the_key_is_still_the_first_requests(shop):
    """Freed, it would let another body be sent under the child keys that were used."""
    with pytest.raises(ZeroDivisionError):
        shop.request(fail)

    with pytest.raises(outbox.RequestMismatch):
        shop.request(fail, content=OTHER_BODY)


def test_an_exception_in_a_fence_undoes_its_rows_and_ends_the_lease(shop, database):
    def fail_after_writing(session, fence):
        shop.place_order(session, fence)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shop.request(write=fail_after_writing)

    assert database.counts() == LEASED
    assert shop.request().status == 201


def test_a_commit_that_fails_ends_the_lease(shop, database):
    with database.begin() as session:
        session.add(colliding_order())

    def collide(session, fence):
        fence.respond(201)
        session.add(colliding_order())

    with pytest.raises(sa.exc.IntegrityError):
        shop.request(write=collide)

    assert shop.request().status == 201


def test_a_handler_may_try_its_transaction_again(database, ob):
    shop = Shop(database, ob)
    with shop.block(database.engine) as claim:
        with database.session() as session, claim.fence(session) as fence:
            shop.place_order(session, fence)  # and no commit: as if it had failed
        with database.begin() as session, claim.fence(session) as fence:
            shop.place_order(session, fence)

    assert database.counts() == ALL
    assert shop.record().state == "succeeded"


def test_a_block_without_an_answer_is_an_error_and_ends_the_lease(shop):
    with pytest.raises(outbox.NotAnswered) as caught:
        shop.request(write=lambda session, fence: None)

    assert str(caught.value) == (
        "the outbox.leased block of key 'retry-001' ended without an answer that is stored: claim.respond(...) stores one, or"
        " fence.respond(...) in a claim.fence(session) whose transaction is committed inside the block"
    )
    assert shop.request().status == 201


def test_an_answer_whose_transaction_was_not_committed_is_none(database, ob):
    """Else the client would get an order that was not stored."""
    shop = Shop(database, ob)

    def forget_to_commit():
        with (
            shop.block(database.engine) as claim,
            database.session() as session,  # and no session.begin()
            claim.fence(session) as fence,
        ):
            shop.place_order(session, fence)

    with pytest.raises(outbox.NotAnswered, match="ended without an answer that is stored"):
        forget_to_commit()
    assert database.counts() == {**NOTHING, "records": 1}
    assert shop.request().status == 201
    assert database.counts() == ALL


def test_an_answer_whose_transaction_is_still_open_is_not_stored_yet(postgresql, ob):
    shop = Shop(postgresql, ob)
    with postgresql.session() as session:

        def commit_later():
            with shop.block(postgresql.engine) as claim, claim.fence(session) as fence:
                shop.place_order(session, fence)

        with pytest.raises(outbox.NotAnswered, match="whose transaction is committed inside the block"):
            commit_later()
        session.commit()

    assert shop.request().status == 201
    assert postgresql.counts() == ALL


def test_after_a_commit_that_failed_the_answer_may_be_another(database, ob):
    shop = Shop(database, ob)
    with shop.block(database.engine) as claim:
        with database.session() as session, claim.fence(session) as fence:
            fence.respond(201)
        claim.respond(503, {"error": "not placed"})

    assert shop.request().status == 503


def test_an_async_answer_whose_transaction_was_not_committed_is_none(database, ob):
    shop = Shop(database, ob, is_async=True)

    async def forget_to_commit():
        async with (
            shop.block(database.async_engine()) as claim,
            database.async_session() as session,
            claim.fence(session) as fence,
        ):
            await session.run_sync(shop.place_order, fence)

    with pytest.raises(outbox.NotAnswered):
        asyncio.run(forget_to_commit())
    assert shop.request().status == 201


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_interrupted_handler_leaves_its_lease_to_run_out(database, ob, interruption):
    shop = Shop(database, ob)

    def interrupt(claim):
        raise interruption

    with pytest.raises(interruption):
        shop.request(interrupt)

    with pytest.raises(outbox.KeyInFlight):
        shop.request()
    shop.run_out()
    assert shop.request().status == 201


def test_a_client_that_hangs_up_leaves_a_lease_that_runs_out(database, ob):
    shop = Shop(database, ob, is_async=True)

    async def hang_up():
        begun = asyncio.Event()

        async def handle():
            async with shop.block(database.async_engine(), renew_for=MINUTE):
                begun.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(handle())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert {task.get_name() for task in asyncio.all_tasks()}.isdisjoint({"outbox-lease"})

    asyncio.run(hang_up())

    with pytest.raises(outbox.KeyInFlight):
        shop.request()
    shop.run_out()
    assert shop.request().status == 201
