"""A consumed message is handled once: what its handler writes, what it enqueues and the record commit together."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
from sqlalchemy.orm import Session
from support.consumer import Consumer, Poison, wait_until_one_waits_for_a_lock
from support.database import ALL, CHARGE, NOTHING, PAYLOAD, Order, statements_of

import outbox

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

TRACE = (
    "consumer 'billing' has handled message 'evt_1' before. Check message.duplicate first, and acknowledge the message"
)


@pytest.fixture(params=["sync", "async"])
def consumer(request, database, ob):
    return Consumer(database, ob, is_async=request.param == "async")


# --- once


def test_a_message_is_handled_and_its_redelivery_is_a_duplicate(consumer, database):
    first = consumer.consume()
    second = consumer.consume()

    assert (first.duplicate, second.duplicate) == (False, True)
    assert database.counts() == ALL


def test_an_entry_takes_its_parent_from_the_message(consumer, database, ob):
    message = consumer.consume()

    (entry,), (record,) = database.entries, database.records
    assert message.parent == outbox.ParentKey("evt_1", scope="shop", source="inbox:billing")
    assert (entry.parent, entry.scope, entry.source) == ("evt_1", "shop", "inbox:billing")
    assert entry.record_id == entry.parent_id == record.id


def test_the_child_key_is_the_same_in_every_delivery_of_the_message(consumer, ob):
    keys = []

    def fail(session, message):
        keys.append(ob.enqueue(session, CHARGE, PAYLOAD).child_key)
        raise Poison

    for _ in range(2):
        with pytest.raises(Poison):
            consumer.consume(fail)

    assert keys == [ob.child_key(outbox.ParentKey("evt_1", scope="shop", source="inbox:billing"), CHARGE)] * 2


@pytest.mark.parametrize("changed", [{"consumer": "mailing"}, {"message_id": "evt_2"}, {"scope": "warehouse"}])
def test_another_consumer_message_or_scope_is_another_message(consumer, database, changed):
    consumer.consume()

    assert not consumer.consume(**changed).duplicate
    assert len(database.orders) == 2


def test_an_http_request_of_the_same_key_and_scope_is_no_duplicate(consumer, database, ob):
    consumer.consume()

    with database.begin() as session, ob.idempotent(session, "evt_1", scope="shop", content=b"") as claim:
        assert not claim.replayed
        claim.respond(200)


def test_a_handler_may_write_nothing_at_all(consumer, database):
    consumer.consume(lambda session, message: None)

    assert consumer.consume().duplicate
    assert database.counts() == NOTHING | {"records": 1}


def test_the_record_holds_no_answer(consumer, database):
    consumer.consume()

    (record,) = database.records
    assert (record.state, record.status, record.body, record.headers) == ("succeeded", 204, b"", "{}")
    assert record.fingerprint == b""


# --- a handler that fails


def test_a_handler_that_raises_stores_nothing_and_the_next_delivery_works(consumer, database):
    def fail(session, message):
        consumer.place_order(session, message)
        session.flush()
        raise Poison

    with pytest.raises(Poison):
        consumer.consume(fail)

    assert database.counts() == NOTHING
    assert not consumer.consume().duplicate
    assert database.counts() == ALL


def test_one_poison_message_leaves_the_others_of_its_transaction_intact(database, ob):
    """Ten messages, one commit: the block of the one that fails is undone, and it alone is left unacknowledged."""
    failed = []
    with database.begin() as session:
        for number in range(10):
            try:
                with ob.inbox(session, consumer="billing", message_id=f"evt_{number}", scope="shop") as message:
                    session.add(Order(customer=message.parent.key, amount=2000))
                    ob.enqueue(session, CHARGE, PAYLOAD)
                    session.flush()
                    if number == 3:
                        raise Poison
            except Poison:
                failed.append(message.parent.key)

    assert failed == ["evt_3"]
    assert database.counts() == {"orders": 9, "records": 9, "entries": 9, "queue": 9}
    assert {record.parent for record in database.records} == {f"evt_{number}" for number in range(10)} - {"evt_3"}


def test_a_cancelled_task_leaves_nothing(database, ob):
    async def consume():
        async with (
            database.async_session() as session,
            session.begin(),
            ob.inbox(session, consumer="billing", message_id="evt_1", scope="shop"),
        ):
            await session.run_sync(lambda inner: inner.add(Order(customer="ada", amount=2000)))
            await session.flush()
            asyncio.current_task().cancel()
            await asyncio.sleep(0)

    with suppress(asyncio.CancelledError):
        asyncio.run(consume())

    assert database.counts() == NOTHING


# --- a duplicate


def test_enqueue_for_a_duplicate_raises(consumer, database):
    consumer.consume()

    with pytest.raises(outbox.AlreadyAnswered) as caught:
        consumer.consume(even_a_duplicate=True)

    assert str(caught.value) == f"enqueue inside a replay: {TRACE}"
    assert database.counts() == ALL


def test_a_write_for_a_duplicate_raises_and_cannot_be_committed(consumer, database):
    consumer.consume()

    with pytest.raises(outbox.AlreadyAnswered) as caught:
        consumer.consume(lambda session, message: session.add(Order(customer="ada", amount=1)), even_a_duplicate=True)

    assert str(caught.value) == f"a write inside a replay: {TRACE}"
    assert database.counts() == ALL


def test_two_copies_in_one_batch_are_one_message_and_a_duplicate(database, ob):
    seen = []
    with database.begin() as session:
        for _ in range(2):
            with ob.inbox(session, consumer="billing", message_id="evt_1", scope="shop") as message:
                seen.append(message.duplicate)
                if not message.duplicate:
                    session.add(Order(customer="ada", amount=2000))

    assert seen == [False, True]
    assert len(database.orders) == 1


# --- in flight elsewhere


def test_a_message_that_another_transaction_handles_is_refused_at_once(consumer, postgresql, ob):
    consumer = Consumer(postgresql, ob, is_async=consumer.is_async)
    with postgresql.begin() as session, consumer.block(session) as message:
        consumer.place_order(session, message)
        with pytest.raises(outbox.KeyInFlight) as caught:
            consumer.consume()

    assert str(caught.value) == (
        "message 'evt_1' is being handled by another transaction now: leave it unacknowledged, so that it is redelivered"
    )
    assert caught.value.retry_after == timedelta(seconds=1)
    assert consumer.consume().duplicate
    assert postgresql.counts() == ALL


def test_on_sqlite_the_single_writer_refuses_it_too(sqlite, ob):
    impatient = sqlite.new_engine(connect_args={"timeout": 0.05})
    with sqlite.begin() as session, ob.inbox(session, consumer="billing", message_id="evt_1", scope="shop"):
        session.flush()
        with (
            Session(impatient) as other,
            pytest.raises(outbox.KeyInFlight, match="message 'evt_1' is being handled"),
            ob.inbox(other, consumer="billing", message_id="evt_1", scope="shop"),
        ):
            pytest.fail("it was not refused")


def test_a_consumer_may_wait_for_the_other_and_then_has_a_duplicate(postgresql, ob):
    consumer = Consumer(postgresql, ob, is_async=False)
    with ThreadPoolExecutor(1) as pool:
        with postgresql.begin() as session:
            with consumer.block(session) as message:
                consumer.place_order(session, message)
            waiting = pool.submit(consumer.consume, wait=timedelta(seconds=30))
            wait_until_one_waits_for_a_lock(postgresql)

        assert waiting.result(30).duplicate
    assert postgresql.counts() == ALL


def test_of_many_copies_that_come_at_once_one_is_handled(postgresql, ob):
    consumer = Consumer(postgresql, ob, is_async=False)
    barrier = threading.Barrier(8)

    def deliver_until_it_is_acknowledged(_):
        barrier.wait(60)
        while True:
            with suppress(outbox.KeyInFlight):
                return consumer.consume().duplicate

    with ThreadPoolExecutor(8) as pool:
        duplicates = list(pool.map(deliver_until_it_is_acknowledged, range(8)))

    assert sorted(duplicates) == [False] + [True] * 7
    assert postgresql.counts() == ALL


# --- the transaction


def test_a_commit_inside_the_block_raises_before_it_happens(consumer, database):
    def commit(session, message):
        consumer.place_order(session, message)
        session.commit()

    with pytest.raises(outbox.ClaimOpen) as caught:
        consumer.consume(commit)

    assert str(caught.value) == (
        "the session was committed inside the outbox.inbox block of message 'evt_1': the record, the rows and the entries"
        " must commit together, so commit after the block"
    )
    assert database.counts() == NOTHING


def test_a_rollback_inside_the_block_loses_the_message(database, ob):
    with (
        database.session() as session,
        pytest.raises(outbox.ClaimLost) as caught,
        ob.inbox(session, consumer="billing", message_id="evt_1", scope="shop"),
    ):
        session.rollback()

    assert str(caught.value) == (
        "the transaction of message 'evt_1' was rolled back, closed or committed inside its outbox.inbox block, and cannot be"
        " committed any more: roll the session back after the block, and acknowledge none of the messages that were handled"
        " in this transaction, so that all of them are redelivered"
    )


def test_a_commit_after_a_rollback_inside_the_block_loses_it_too(consumer):
    def roll_back_and_commit(session, message):
        session.rollback()
        session.add(Order(customer="ada", amount=2000))
        session.commit()

    with pytest.raises(outbox.ClaimLost, match="acknowledge none of the messages"):
        consumer.consume(roll_back_and_commit)


def test_a_message_inside_a_request_is_refused(database, ob):
    with (
        database.session() as session,
        pytest.raises(
            outbox.ClaimOpen, match=r"this session already has an open outbox\.idempotent or outbox\.inbox block"
        ),
        ob.idempotent(session, "retry-001", scope="acct_1", content=b""),
        ob.inbox(session, consumer="billing", message_id="evt_1", scope="shop"),
    ):
        pytest.fail("it was not refused")


# --- bad input


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"consumer": ""}, "consumer '': has 0 bytes of UTF-8; 1 to 58 are allowed"),
        ({"consumer": "b" * 59}, f"consumer {'b' * 59!r}: has 59 bytes of UTF-8; 1 to 58 are allowed"),
        ({"message_id": ""}, "message_id '': has 0 bytes of UTF-8; 1 to 255 are allowed"),
        ({"message_id": None}, "message_id None: must be a str, not NoneType"),
        ({"message_id": "é" * 128}, "message_id 'ééééé"),
        ({"message_id": "a\0"}, "message_id 'a\\x00': contains a NUL character"),
        ({"scope": ""}, "scope '': must name the producer of these message ids"),
        (
            {"retention": timedelta(0)},
            "retention datetime.timedelta(0): must be a timedelta of more than 0 s, and 36525 days at most",
        ),
        (
            {"wait": 5},
            "wait 5: must be a timedelta of 0 s or more, and 36525 days at most, or None to refuse immediately",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent_to_the_database(database, ob, changed, text):
    consumer = Consumer(database, ob, is_async=False)
    with statements_of(database.engine) as sent, pytest.raises(outbox.InvalidValue) as caught:
        consumer.consume(**changed)

    assert str(caught.value).startswith(text)
    assert sent == []


def test_with_and_async_with_are_distinguished(database, ob):
    async def wrong():
        async with ob.inbox(database.session(), consumer="billing", message_id="evt_1", scope="shop"):
            pytest.fail("it was not refused")

    with pytest.raises(outbox.ClaimError, match="'async with' needs an AsyncSession, not Session: use 'with'"):
        asyncio.run(wrong())


def test_the_longest_names_fit(database, ob):
    consumer = Consumer(database, ob, is_async=False)
    longest = {"consumer": "b" * 58, "message_id": "m" * 255, "scope": "s" * 255}

    consumer.consume(**longest)

    assert consumer.consume(**longest).duplicate


# --- what is loaded


def test_no_client_library_is_loaded_with_the_ids():
    program = "import sys; from outbox import inboxes; print(*sys.modules)"

    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()

    assert "outbox.inboxes" in loaded
    assert not {"boto3", "confluent_kafka", "pika", "nats", "redis", "stripe", "cloudevents"} & set(loaded)
