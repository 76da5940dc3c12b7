"""What an app's observer is told of claims, when, and that no request suffers by it."""

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import ALL, NOTHING, REQUEST, Client, statements_of

import outbox
from outbox import ObservedClaim

KEYRING = outbox.Keyring({"k1": bytes(range(32))})
TEST_TIMEOUT = 30  # seconds until a test that hangs fails; nothing takes that long


def observed(outcome, waited=None):
    return ObservedClaim(outcome=outcome, source="http", waited=waited)


@pytest.fixture
def told():
    return []


@pytest.fixture
def ob(told):
    """The outbox of these tests, which tells a list."""
    return outbox.Outbox(KEYRING, env="test", observe=told.append)


def test_a_first_request_is_a_miss_and_its_retries_are_hits(client, told):
    for _ in range(3):
        client.request()

    assert told == [observed("miss"), observed("hit"), observed("hit")]


def test_a_key_used_with_another_request_is_a_mismatch(client, told):
    client.request()

    with pytest.raises(outbox.RequestMismatch):
        client.request(request={"amount": 1})

    assert told[1:] == [observed("mismatch")]


def test_a_key_whose_effects_outlive_its_retry_window_is_expired(client, database, told):
    client.request()
    database.age_records(timedelta(days=2))

    with pytest.raises(outbox.KeyExpired):
        client.request()

    assert told[1:] == [observed("expired")]


def test_the_source_is_the_one_that_the_claim_was_given(client, told):
    client.request(source="inbox:billing")

    assert [claim.source for claim in told] == ["inbox:billing"]


def test_a_request_whose_handler_fails_was_a_miss(client, told):
    def fail(session, claim):
        raise LookupError

    with pytest.raises(LookupError):
        client.request(fail)

    assert told == [observed("miss")]


def test_a_request_without_a_usable_key_claims_nothing(client, told):
    with pytest.raises(outbox.KeyMalformed):
        client.request(key="k" * 256)

    assert told == []


# --- two at once


@pytest.fixture
def held(postgresql, ob, told):
    """The key is held by an open transaction, whose own claim is told of when it ends."""
    with Session(postgresql.engine) as session, session.begin():
        with ob.idempotent(session, "retry-001", scope="acct_1", request=REQUEST) as claim:
            claim.respond(201)
        yield session


def test_a_request_while_another_has_its_key_is_in_flight(held, postgresql, ob, told):
    with pytest.raises(outbox.KeyInFlight):
        Client(postgresql, ob, is_async=False).request()

    assert told == [observed("in_flight")]


def test_a_wait_in_vain_is_a_timeout_with_the_time_that_it_took(held, postgresql, ob, told):
    with pytest.raises(outbox.KeyInFlight):
        Client(postgresql, ob, is_async=True).request(in_flight="wait", wait=timedelta(milliseconds=50))

    assert [replace(claim, waited=None) for claim in told] == [observed("wait_timeout")]
    assert timedelta(milliseconds=50) <= told[0].waited < timedelta(seconds=TEST_TIMEOUT)


def test_a_wait_for_the_answer_is_a_hit_with_the_time_that_it_took(held, postgresql, ob, told):
    client = Client(postgresql, ob, is_async=False)
    wait_for_a_waiter = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.request, in_flight="wait", wait=timedelta(seconds=TEST_TIMEOUT))
        with postgresql.new_engine(isolation_level="AUTOCOMMIT").connect() as connection:
            while not connection.scalar(wait_for_a_waiter):
                assert not waiting.done(), waiting.result()
        held.commit()
        waiting.result(TEST_TIMEOUT)

    assert [claim.outcome for claim in told if claim.waited] == ["hit"]
    assert [claim.outcome for claim in told if claim.waited is None] == ["miss"]


def test_a_writer_that_is_waited_for_in_vain_on_sqlite_is_in_flight(sqlite, told, ob):
    with Session(sqlite.new_engine()) as writer, writer.begin():
        writer.connection()
        engine = sqlite.new_engine(connect_args={"timeout": 0})
        with pytest.raises(outbox.KeyInFlight), Session(engine) as session, session.begin():
            ob.idempotent(session, "retry-001", scope="acct_1", request=REQUEST).__enter__()

    assert told == [observed("in_flight")]


# --- when it is told


def test_it_is_told_when_the_transaction_has_ended_and_nothing_is_locked(database, told, ob):
    with database.session() as session:
        with ob.idempotent(session, "retry-001", scope="acct_1", request=REQUEST) as claim:
            claim.respond(201)
        session.flush()
        before = list(told)
        session.commit()

    assert before == []
    assert told == [observed("miss")]


def test_an_observer_finds_the_record_committed_and_the_key_free(database):
    found = []

    def look(claim):
        with (
            database.begin() as session,
            plain.idempotent(session, "retry-001", scope="acct_1", request=REQUEST) as inner,
        ):
            found.append(inner.replayed)

    plain = outbox.Outbox(KEYRING, env="test")
    watched = outbox.Outbox(KEYRING, env="test", observe=look)
    with (
        database.begin() as session,
        watched.idempotent(session, "retry-001", scope="acct_1", request=REQUEST) as claim,
    ):
        claim.respond(201)

    assert found == [True]


def test_every_claim_of_a_transaction_is_told_once(database, told, ob):
    with database.begin() as session:
        for key in ("first-key", "second-key"):
            with ob.idempotent(session, key, scope="acct_1", request=REQUEST) as claim, session.begin_nested():
                claim.respond(201)
    with database.begin() as session:
        session.connection()

    assert told == [observed("miss"), observed("miss")]


# --- that no request suffers


def test_an_observer_that_raises_breaks_no_request_and_is_logged_once(database, caplog):
    def fail(claim):
        raise LookupError("the statistics are away")

    ob = outbox.Outbox(KEYRING, env="test", observe=fail)
    client = Client(database, ob, is_async=False)
    with caplog.at_level(logging.DEBUG, "outbox"):
        answers = [client.request(), client.request()]

    assert [answer.status for answer in answers] == [201, 201]
    assert database.counts() == ALL
    (logged,) = caplog.records
    assert logged.levelname == "ERROR"
    assert logged.message == ("observe= raised; requests are not affected, and its further errors are not logged")
    assert "the statistics are away" in logged.exc_text
    assert "retry-001" not in caplog.text
    assert "acct_1" not in caplog.text


def test_a_database_error_while_claiming_is_raised_and_not_observed(database, told, ob):
    client = Client(database, ob, is_async=False)
    database.execute(sa.text("DROP TABLE outbox_record"))

    with pytest.raises(outbox.SchemaError):
        client.request()

    assert told == []
    assert len(database.orders) == NOTHING["orders"]


def test_observing_sends_not_one_statement_more(database, ob):
    sent = []
    for outbox_of in (outbox.Outbox(KEYRING, env="test"), ob):
        with statements_of(database.engine) as statements:
            Client(database, outbox_of, is_async=False).request(key=f"retry-{id(outbox_of)}")
        sent.append(statements)

    assert sent[0] == sent[1]


def test_many_threads_are_all_told_of(postgresql, told, ob):
    barrier = threading.Barrier(8)

    def request(number):
        barrier.wait(TEST_TIMEOUT)
        Client(postgresql, ob, is_async=False).request(key=f"retry-{number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(request, range(8)))

    assert told == [observed("miss")] * 8


def test_a_cancelled_request_is_told_of_when_its_session_is_closed(database, told, ob):
    async def request():
        async with (
            database.async_session() as session,
            ob.idempotent(session, "retry-001", scope="acct_1", request=REQUEST),
        ):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(request())

    assert told == [observed("miss")]


async def an_async_observer(claim):
    pass


@pytest.mark.parametrize("observe", ["print", an_async_observer], ids=["a str", "a coroutine function"])
def test_what_cannot_observe_is_refused_at_the_start(observe):
    with pytest.raises(outbox.ConfigurationError) as caught:
        outbox.Outbox(KEYRING, env="test", observe=observe)

    assert str(caught.value) == (
        f"observe must be a plain function of one outbox.ObservedClaim, not {observe!r}: it is called, and not awaited,"
        " wherever a transaction ends"
    )
