"""The four failures of an idempotent request that most suites never run, one page to read before trusting any of it.

`place_order` is a handler as an app would write it. The database is real, and so are the threads, the crash and the retry.
(More of each: test_races.py, test_crash_in_transaction.py, test_idempotent_replay.py, test_fingerprint.py.)
"""

import multiprocessing
import os
import signal
import threading

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.concurrency import TEST_TIMEOUT, at_once
from support.database import ALL, NOTHING, Order

import outbox

BODY = b'{"amount": 2000}'


def place_order(url, body=BODY, before_commit=lambda: None):
    """One order, one charge and one answer under the key `order-42`, in one transaction."""
    ob = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test")
    with Session(sa.create_engine(url, poolclass=sa.NullPool)) as session:
        with ob.idempotent(session, "order-42", scope="acct_1", content=body) as claim:
            if claim.replayed:
                return claim.response
            order = Order(customer="ada", amount=2000)
            session.add(order)
            session.flush()
            ob.enqueue(session, "stripe.payment_intents.create", {"amount": 2000, "currency": "eur"})
            response = claim.respond(201, {"order": order.id})
        before_commit()
        session.commit()
        return response


def test_two_threads_same_key_one_order(postgresql):
    refused = threading.Event()

    def request():
        try:  # the request that works keeps its transaction open until the other has had its answer
            return place_order(postgresql.url, before_commit=lambda: refused.wait(TEST_TIMEOUT))
        except outbox.KeyInFlight as error:
            refused.set()
            return error

    outcomes = at_once(2, request)

    (answered,) = [outcome for outcome in outcomes if isinstance(outcome, outbox.Response)]
    (conflict,) = [outcome for outcome in outcomes if isinstance(outcome, outbox.KeyInFlight)]
    assert (answered.status, conflict.status, conflict.retry_after.total_seconds()) == (201, 409, 1.0)
    assert postgresql.counts() == ALL


def test_a_crash_before_commit_leaves_nothing_and_the_retry_orders(postgresql):
    child = multiprocessing.get_context("spawn").Process(target=crash_before_commit, args=(postgresql.url,))
    child.start()
    child.join(TEST_TIMEOUT)
    assert child.exitcode == -signal.SIGKILL
    assert postgresql.counts() == NOTHING

    response = place_order(postgresql.url)

    assert response.status == 201
    assert postgresql.counts() == ALL


def crash_before_commit(url):
    place_order(url, before_commit=lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_retry_of_a_completed_key_gets_the_first_answer_byte_for_byte(postgresql):
    first = place_order(postgresql.url)

    retry = place_order(postgresql.url)

    assert retry == first
    assert (retry.status, retry.body, retry.headers) == (201, b'{"order":1}', {"Content-Type": "application/json"})
    assert postgresql.counts() == ALL


def test_a_changed_body_under_the_same_key_is_refused(postgresql):
    place_order(postgresql.url)

    with pytest.raises(outbox.RequestMismatch) as caught:
        place_order(postgresql.url, body=b'{"amount": 9000}')

    assert caught.value.status == 422
    assert str(caught.value) == ("key 'order-42' was used before with another request: use a new key for a new request")
    assert postgresql.counts() == ALL
