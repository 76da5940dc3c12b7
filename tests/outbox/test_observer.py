"""What is reported of claims to an app's observer, when, and that no request suffers by it."""

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
TEST_TIMEOUT = 60  # seconds until a test that hangs fails; nothing takes that long


def observed(outcome, waited=None):
    return ObservedClaim(outcome=outcome, source="http", waited=waited)


@pytest.fixture
def observations():
    return []


@pytest.fixture
def ob(observations):
    """The outbox of these tests, which reports to a list."""
    return outbox.Outbox(KEYRING, env="test", observe=observations.append)


def test_a_first_request_is_a_miss_and_its_retries_are_hits(client, observations):
    for _ in range(3):
        client.request()

    assert observations == [observed("miss"), observed("hit"), observed("hit")]


def test_a_key_used_with_another_request_is_a_mismatch(client, observations):
    client.request()

    with pytest.raises(outbox.RequestMismatch):
        client.request(content={"amount": 1})

    assert observations[1:] == [observed("mismatch")]


def test_a_key_whose_effects_outlive_its_retry_window_is_expired(client, database, observations):
    client.request()
    database.age_records(timedelta(days=2))

    with pytest.raises(outbox.KeyExpired):
        client.request()

    assert observations[1:] == [observed("expired")]


def test_the_source_is_the_one_that_the_claim_was_given(client, observations):
    client.request(source="inbox:billing")

    assert [claim.source for claim in observations] == ["inbox:billing"]


def test_a_request_whose_handler_fails_was_a_miss(client, observations):
    def fail(session, claim):
        raise LookupError

    with pytest.raises(LookupError):
        client.request(fail)

    assert observations == [observed("miss")]


def test_a_request_without_a_usable_key_claims_nothing(client, observations):
    with pytest.raises(outbox.KeyMalformed):
        client.request(key="k" * 256)

    assert observations == []


# --- two at the same time


@pytest.fixture
def claimed_key(postgresql, ob, observations):
    """The key is locked by an open transaction, whose own claim is reported when it ends."""
    with Session(postgresql.engine) as session, session.begin():
        with ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST) as claim:
            claim.respond(201)
        yield session


def test_a_request_while_another_has_its_key_is_in_flight(claimed_key, postgresql, ob, observations):
    with pytest.raises(outbox.KeyInFlight):
        Client(postgresql, ob, is_async=False).request()

    assert observations == [observed("in_flight")]


def test_a_wait_without_result_is_a_timeout_with_the_time_that_it_took(claimed_key, postgresql, ob, observations):
    with pytest.raises(outbox.KeyInFlight):
        Client(postgresql, ob, is_async=True).request(wait=timedelta(milliseconds=50))

    assert [replace(claim, waited=None) for claim in observations] == [observed("wait_timeout")]
    assert timedelta(milliseconds=50) <= observations[0].waited < timedelta(seconds=TEST_TIMEOUT)


def test_a_wait_for_the_answer_is_a_hit_with_the_time_that_it_took(claimed_key, postgresql, ob, observations):
    client = Client(postgresql, ob, is_async=False)
    wait_for_a_waiter = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.request, wait=timedelta(seconds=TEST_TIMEOUT))
        with postgresql.new_engine(isolation_level="AUTOCOMMIT").connect() as connection:
            while not connection.scalar(wait_for_a_waiter):
                assert not waiting.done(), waiting.result()
        claimed_key.commit()
        waiting.result(TEST_TIMEOUT)

    assert [claim.outcome for claim in observations if claim.waited] == ["hit"]
    assert [claim.outcome for claim in observations if claim.waited is None] == ["miss"]


def test_a_writer_that_outlasts_the_wait_on_sqlite_is_in_flight(sqlite, observations, ob):
    with Session(sqlite.new_engine()) as writer, writer.begin():
        writer.connection()
        engine = sqlite.new_engine(connect_args={"timeout": 0})
        with pytest.raises(outbox.KeyInFlight), Session(engine) as session, session.begin():
            ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST).__enter__()

    assert observations == [observed("in_flight")]


# --- when it is reported


def test_it_is_reported_when_the_transaction_has_ended_without_locks(database, observations, ob):
    with database.session() as session:
        with ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST) as claim:
            claim.respond(201)
        session.flush()
        before = list(observations)
        session.commit()

    assert before == []
    assert observations == [observed("miss")]


def test_an_observer_finds_the_record_committed_and_the_key_free(database):
    found = []

    def look(claim):
        with (
            database.begin() as session,
            plain.idempotent(session, "retry-001", scope="acct_1", content=REQUEST) as inner,
        ):
            found.append(inner.replayed)

    plain = outbox.Outbox(KEYRING, env="test")
    watched = outbox.Outbox(KEYRING, env="test", observe=look)
    with (
        database.begin() as session,
        watched.idempotent(session, "retry-001", scope="acct_1", content=REQUEST) as claim,
    ):
        claim.respond(201)

    assert found == [True]


def test_every_claim_of_a_transaction_is_reported_once(database, observations, ob):
    with database.begin() as session:
        for key in ("first-key", "second-key"):
            with ob.idempotent(session, key, scope="acct_1", content=REQUEST) as claim, session.begin_nested():
                claim.respond(201)
    with database.begin() as session:
        session.connection()

    assert observations == [observed("miss"), observed("miss")]


# --- that no request suffers


def test_an_observer_that_raises_breaks_no_request_and_is_logged_once(database, caplog):
    def fail(claim):
        raise LookupError("the statistics are unavailable")

    ob = outbox.Outbox(KEYRING, env="test", observe=fail)
    client = Client(database, ob, is_async=False)
    with caplog.at_level(logging.DEBUG, "outbox"):
        answers = [client.request(), client.request()]

    assert [answer.status for answer in answers] == [201, 201]
    assert database.counts() == ALL
    (logged,) = caplog.records
    assert logged.levelname == "ERROR"
    assert logged.message == (
        "observe= raised an exception; requests are not affected; its later exceptions are not logged"
    )
    assert "the statistics are unavailable" in logged.exc_text
    assert "retry-001" not in caplog.text
    assert "acct_1" not in caplog.text


def test_a_database_error_while_claiming_is_raised_and_not_observed(database, observations, ob):
    client = Client(database, ob, is_async=False)
    for table in ("outbox_mismatch", "outbox_record"):
        database.execute(sa.text(f"DROP TABLE {table}"))

    with pytest.raises(outbox.SchemaError):
        client.request()

    assert observations == []
    assert len(database.orders) == NOTHING["orders"]


@pytest.mark.differs("mariadb", "the first transaction of a connection asks for the server's settings")
@pytest.mark.differs("portable", "the first transaction of a connection asks for its level")
def test_observing_sends_not_one_statement_more(database, ob):
    sent = []
    for outbox_of in (outbox.Outbox(KEYRING, env="test"), ob):
        with statements_of(database.engine) as statements:
            Client(database, outbox_of, is_async=False).request(key=f"retry-{id(outbox_of)}")
        sent.append(statements)

    assert sent[0] == sent[1]


def test_claims_of_many_threads_are_all_reported(postgresql, observations, ob):
    barrier = threading.Barrier(8)

    def request(number):
        barrier.wait(TEST_TIMEOUT)
        Client(postgresql, ob, is_async=False).request(key=f"retry-{number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(request, range(8)))

    assert observations == [observed("miss")] * 8


def test_a_cancelled_request_is_reported_when_its_session_is_closed(database, observations, ob):
    async def request():
        async with (
            database.async_session() as session,
            ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST),
        ):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(request())

    assert observations == [observed("miss")]


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
