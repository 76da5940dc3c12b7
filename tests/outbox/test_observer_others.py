"""What is reported to an observer of leased claims, of consumed messages, and of keys that are the body's own."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event

import pytest
import sqlalchemy as sa
from support.body_keys import BODY, EDGE, SECOND, at
from support.consumer import Consumer, wait_until_one_waits_for_a_lock
from support.database import REQUEST, TABLES
from support.leases import Shop
from support.retention import shift

import outbox
from outbox import ObservedClaim
from outbox.observer import ClaimObservation, GuardedObserver

KEYRING = outbox.Keyring({"k1": bytes(range(32))})
TEST_TIMEOUT = timedelta(seconds=60)  # until a test that hangs fails; nothing takes that long
MOMENT = timedelta(milliseconds=50)


def observed(outcome, source="http"):
    return ObservedClaim(outcome=outcome, source=source, waited=None)


def outcomes(observations):
    return [claim.outcome for claim in observations]


@pytest.fixture
def observations():
    return []


@pytest.fixture
def ob(observations):
    """The outbox of these tests, which reports to a list."""
    return outbox.Outbox(KEYRING, env="test", observe=observations.append)


@pytest.fixture(params=["sync", "async"])
def shop(request, database, ob):
    return Shop(database, ob, is_async=request.param == "async")


def fail(claim):
    raise ZeroDivisionError


# --- a leased claim


def test_a_first_leased_request_is_a_miss_and_its_retry_a_hit(shop, observations):
    shop.request()
    shop.request(fail)

    assert observations == [observed("miss"), observed("hit")]


def test_a_lease_is_observed_when_committed_and_before_the_handler_runs(shop, observations):
    seen = []

    shop.request(lambda claim: seen.extend((*observations, len(shop.database.records))))

    assert seen == [observed("miss"), 1]


def test_a_request_that_is_taken_over_is_reported_so(shop, observations):
    with pytest.raises(ZeroDivisionError):
        shop.request(fail)
    shop.request()

    assert observations == [observed("miss"), observed("taken_over")]


def test_a_request_under_a_lease_is_in_flight(shop, observations, database, ob):
    def ask_again(claim):
        with pytest.raises(outbox.KeyInFlight):
            Shop(database, ob).request(fail)

    shop.request(ask_again)

    assert observations == [observed("miss"), observed("in_flight")]


def test_a_failed_wait_for_a_lease_is_a_timeout_with_its_duration(shop, observations, database, ob):
    def ask_again(claim):
        with pytest.raises(outbox.KeyInFlight):
            Shop(database, ob).request(fail, wait=MOMENT)

    shop.request(ask_again)

    assert outcomes(observations) == ["miss", "wait_timeout"]
    assert MOMENT <= observations[1].waited < TEST_TIMEOUT


def test_a_wait_for_a_leased_requests_answer_is_a_hit_with_its_duration(shop, observations, database, ob):
    was_refused = Event()
    with ThreadPoolExecutor(1) as pool:

        def let_another_wait(claim):
            sa.event.listen(database.engine, "rollback", lambda connection: was_refused.set())
            other = Shop(database, ob)
            waiting.append(pool.submit(other.request, fail, wait=TEST_TIMEOUT))
            assert was_refused.wait(TEST_TIMEOUT.total_seconds())

        waiting = []
        first = shop.request(let_another_wait)
        second = waiting[0].result(TEST_TIMEOUT.total_seconds())

    assert second == first
    assert outcomes(observations) == ["miss", "hit"]
    assert timedelta(0) < observations[1].waited < TEST_TIMEOUT


def test_a_key_leased_for_another_request_is_a_mismatch(shop, observations):
    shop.request()

    with pytest.raises(outbox.RequestMismatch):
        shop.request(fail, content={"amount": 1})

    assert observations[1:] == [observed("mismatch")]


def test_an_unfinished_request_that_is_too_old_to_be_taken_over_is_expired(shop, observations, database):
    with pytest.raises(ZeroDivisionError):
        shop.request(fail)
    shift(database, TABLES.record.c.replay_until, timedelta(days=2))

    with pytest.raises(outbox.KeyExpired):
        shop.request(fail)

    assert observations[1:] == [observed("expired")]


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

    assert observations == [observed(outcome, source="inbox:billing") for outcome in ("miss", "hit")] + [
        observed("miss", source="inbox:shipping")
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
            waiting = pool.submit(consumer.consume, wait=TEST_TIMEOUT)
            wait_until_one_waits_for_a_lock(postgresql)
        assert waiting.result(TEST_TIMEOUT.total_seconds()).duplicate

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
            ob.idempotent(second, BODY, scope="acct_1", content=REQUEST, wait=MOMENT).__enter__()
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
