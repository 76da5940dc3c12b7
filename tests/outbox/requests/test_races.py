"""What concurrent requests of one key get, over real connections.

One request works. The others get a conflict immediately, or wait for its answer. No two work.
"""

import threading
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.concurrency import ANSWER, TEST_TIMEOUT, RacingShop, at_once
from support.database import ALL, Order

import outbox

pytestmark = pytest.mark.as_app


@pytest.fixture
def shop(postgresql, ob):
    return RacingShop(postgresql, ob, is_async=False)


def test_of_fifty_with_one_key_one_works_and_the_others_are_refused(shop):
    refused = threading.Semaphore(0)

    def wait_for_the_others(session):
        for _ in range(49):
            assert refused.acquire(timeout=TEST_TIMEOUT), "one of the others was made to wait"

    def request():
        try:
            return shop.request()
        finally:
            refused.release()

    shop.while_working = wait_for_the_others

    outcomes = at_once(50, request)

    assert outcomes.count(ANSWER) == 1
    assert sum(isinstance(outcome, outbox.KeyInFlight) for outcome in outcomes) == 49
    assert shop.executions == 1
    assert shop.database.counts() == ALL
    assert at_once(50, shop.request) == [ANSWER] * 50


@pytest.mark.parametrize("wait", [timedelta(seconds=TEST_TIMEOUT), timedelta(days=365)])
def test_of_fifty_with_the_same_key_all_get_the_answer_that_one_made(shop, wait):
    shop.while_working = lambda session: shop.wait_until_others_wait(49)

    outcomes = at_once(50, lambda: shop.request(wait=wait))

    assert outcomes == [ANSWER] * 50
    assert shop.executions == 1
    assert shop.database.counts() == ALL


def test_the_one_that_waited_keeps_its_own_lock_timeout(shop, ob):
    def request():
        with Session(shop.engine) as session, session.begin():
            session.execute(sa.text("SET LOCAL lock_timeout = '7s'"))
            with shop.claim(session, wait=timedelta(seconds=TEST_TIMEOUT)) as claim:
                if not claim.replayed:
                    shop.wait_until_others_wait(1)
                    claim.respond(201)
                return claim.replayed, session.scalar(sa.text("SHOW lock_timeout"))

    outcomes = at_once(2, request)

    assert sorted(outcomes) == [(False, "7s"), (True, "7s")]


@pytest.mark.parametrize("wait", [None, timedelta(seconds=2 * TEST_TIMEOUT)])  # longer than the test
def test_two_simultaneous_replays_are_both_answered(shop, wait):
    shop.request()
    both_inside = threading.Barrier(2)

    def replay():
        with (
            Session(shop.engine) as session,
            session.begin(),
            shop.claim(session, wait=wait) as claim,
        ):
            both_inside.wait(TEST_TIMEOUT)
            return claim.response

    assert at_once(2, replay) == [ANSWER, ANSWER]


def test_a_changed_body_is_in_flight_at_first_and_a_mismatch_afterwards(shop):
    refusals = []

    def ask_with_another_body():
        with pytest.raises(outbox.RequestError) as caught:
            shop.request({"amount": 1})
        refusals.append(type(caught.value))

    shop.while_working = lambda session: ask_with_another_body()
    shop.request()
    ask_with_another_body()

    assert refusals == [outbox.KeyInFlight, outbox.RequestMismatch]
    assert shop.database.counts() == ALL


def test_an_expired_key_is_freed_for_one_of_two(shop):
    def place_order_only():
        with Session(shop.engine) as session, session.begin(), shop.claim(session) as claim:
            session.add(Order(customer="ada", amount=1))
            claim.respond(200)

    place_order_only()
    shop.database.age_records(timedelta(hours=25))
    shop.while_working = lambda session: shop.wait_until_others_wait(1)

    outcomes = at_once(2, lambda: shop.request(wait=timedelta(seconds=TEST_TIMEOUT)))

    assert outcomes == [ANSWER, ANSWER]
    assert shop.database.counts() == {"orders": 2, "records": 1, "entries": 1, "queue": 1}
