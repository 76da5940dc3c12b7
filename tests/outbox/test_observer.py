"""What is reported of claims of every kind to an app's observer, when, and that no request suffers by it."""

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from threading import Event

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.body_keys import BODY, EDGE, SECOND, at
from support.consumer import Consumer, wait_until_one_waits_for_a_lock
from support.database import ALL, NOTHING, REQUEST, TABLES, Client, statements_of
from support.leases import Shop
from support.retention import shift

import outbox
from outbox import ObservedClaim
from outbox.observer import ClaimObservation, GuardedObserver

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


# --- What is reported to an observer of leased claims, of consumed messages, and of keys that are the body's own.


WAIT = timedelta(seconds=60)  # until a test that hangs fails; nothing takes that long
MOMENT = timedelta(milliseconds=50)


def observed_of(outcome, source="http"):
    return ObservedClaim(outcome=outcome, source=source, waited=None)


def outcomes(observations):
    return [claim.outcome for claim in observations]


@pytest.fixture(params=["sync", "async"])
def shop(request, database, ob):
    return Shop(database, ob, is_async=request.param == "async")


def fail(claim):
    raise ZeroDivisionError


# --- a leased claim


def test_a_first_leased_request_is_a_miss_and_its_retry_a_hit(shop, observations):
    shop.request()
    shop.request(fail)

    assert observations == [observed_of("miss"), observed_of("hit")]


def test_a_lease_is_observed_when_committed_and_before_the_handler_runs(shop, observations):
    seen = []

    shop.request(lambda claim: seen.extend((*observations, len(shop.database.records))))

    assert seen == [observed_of("miss"), 1]


def test_a_request_that_is_taken_over_is_reported_so(shop, observations):
    with pytest.raises(ZeroDivisionError):
        shop.request(fail)
    shop.request()

    assert observations == [observed_of("miss"), observed_of("taken_over")]


def test_a_request_under_a_lease_is_in_flight(shop, observations, database, ob):
    def ask_again(claim):
        with pytest.raises(outbox.KeyInFlight):
            Shop(database, ob).request(fail)

    shop.request(ask_again)

    assert observations == [observed_of("miss"), observed_of("in_flight")]


def test_a_failed_wait_for_a_lease_is_a_timeout_with_its_duration(shop, observations, database, ob):
    def ask_again(claim):
        with pytest.raises(outbox.KeyInFlight):
            Shop(database, ob).request(fail, wait=MOMENT)

    shop.request(ask_again)

    assert outcomes(observations) == ["miss", "wait_timeout"]
    assert MOMENT <= observations[1].waited < WAIT


def test_a_wait_for_a_leased_requests_answer_is_a_hit_with_its_duration(shop, observations, database, ob):
    was_refused = Event()
    with ThreadPoolExecutor(1) as pool:

        def let_another_wait(claim):
            sa.event.listen(database.engine, "rollback", lambda connection: was_refused.set())
            other = Shop(database, ob)
            waiting.append(pool.submit(other.request, fail, wait=WAIT))
            assert was_refused.wait(WAIT.total_seconds())

        waiting = []
        first = shop.request(let_another_wait)
        second = waiting[0].result(WAIT.total_seconds())

    assert second == first
    assert outcomes(observations) == ["miss", "hit"]
    assert timedelta(0) < observations[1].waited < WAIT


def test_a_key_leased_for_another_request_is_a_mismatch(shop, observations):
    shop.request()

    with pytest.raises(outbox.RequestMismatch):
        shop.request(fail, content={"amount": 1})

    assert observations[1:] == [observed_of("mismatch")]


def test_an_unfinished_request_that_is_too_old_to_be_taken_over_is_expired(shop, observations, database):
    with pytest.raises(ZeroDivisionError):
        shop.request(fail)
    shift(database, TABLES.record.c.replay_until, timedelta(days=2))

    with pytest.raises(outbox.KeyExpired):
        shop.request(fail)

    assert observations[1:] == [observed_of("expired")]


def test_a_fence_is_no_claim_of_its_own(shop, observations, ob):
    shop.request()

    assert outcomes(observations) == ["miss"]


def test_a_request_that_the_database_failed_is_not_reported(shop, observations, database):
    for table in ("outbox_mismatch", "outbox_record"):
        database.execute(sa.text(f"DROP TABLE {table}"))

    with pytest.raises(outbox.SchemaError):
        shop.request()

    assert observations == []


# --- a consumed message


@pytest.fixture(params=["sync", "async"])
def consumer(request, database, ob):
    return Consumer(database, ob, is_async=request.param == "async")


def test_a_first_message_is_a_miss_and_its_redelivery_a_hit_of_its_source(consumer, observations):
    consumer.consume()
    consumer.consume()
    consumer.consume(consumer="shipping")

    assert observations == [observed_of(outcome, source="inbox:billing") for outcome in ("miss", "hit")] + [
        observed_of("miss", source="inbox:shipping")
    ]


def test_a_redelivery_after_the_window_of_what_is_remembered_is_a_hit(consumer, observations, database):
    consumer.consume()
    database.age_records(timedelta(days=100))
    consumer.consume()

    assert outcomes(observations) == ["miss", "hit"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_message_that_is_handled_elsewhere_is_in_flight_or_a_timeout(postgresql, ob, observations, is_async):
    consumer = Consumer(postgresql, ob, is_async=is_async)
    with postgresql.begin() as session, Consumer(postgresql, ob, is_async=False).block(session):
        for changed in ({}, {"wait": MOMENT}):
            with pytest.raises(outbox.KeyInFlight):
                consumer.consume(**changed)

    assert outcomes(observations) == ["in_flight", "wait_timeout", "miss"]
    assert [claim.source for claim in observations] == ["inbox:billing"] * 3
    assert observations[1].waited >= MOMENT


def test_a_wait_for_who_handles_a_message_is_a_hit_with_its_duration(postgresql, ob, observations):
    consumer = Consumer(postgresql, ob, is_async=False)
    with ThreadPoolExecutor(1) as pool:
        with postgresql.begin() as session:
            with consumer.block(session):
                pass
            waiting = pool.submit(consumer.consume, wait=WAIT)
            wait_until_one_waits_for_a_lock(postgresql)
        assert waiting.result(WAIT.total_seconds()).duplicate

    assert sorted((claim.outcome, claim.waited is not None) for claim in observations) == [
        ("hit", True),
        ("miss", False),
    ]


# --- a key that is the body's own: two keys, two locks


def test_a_wait_for_a_request_across_the_windows_edge_is_reported(postgresql, ob, observations, monkeypatch):
    with postgresql.begin() as first:
        with monkeypatch.context() as patch:
            at(patch, EDGE - SECOND)
            claim = ob.idempotent(first, BODY, scope="acct_1", content=REQUEST)
            claim.__enter__().respond(201)
        at(monkeypatch, EDGE)
        with postgresql.session() as second, pytest.raises(outbox.KeyInFlight):
            ob.idempotent(second, BODY, scope="acct_1", content=REQUEST, wait=SECOND).__enter__()
        claim.__exit__(None, None, None)

    assert outcomes(observations) == ["wait_timeout", "miss"]
    assert observations[0].waited > timedelta(0)  # what is left of the time by then is waited for
    assert {claim.source for claim in observations} == {"http.body"}


def test_waits_for_both_keys_of_a_body_are_added_up():
    observations = []
    observation = ClaimObservation(GuardedObserver(observations.append), "http.body")
    for _ in range(2):
        with observation.waiting():
            Event().wait(MOMENT.total_seconds())
    observation.claimed("hit")
    observation.report()

    assert observations[0].waited >= 2 * MOMENT
