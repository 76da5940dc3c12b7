"""Many owners of one request, whose leases run out at random: one order, one answer, one child key, for any winner."""

import random
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import PAYLOAD, TABLES, Order
from support.leases import RECEIPT, Shop
from support.retention import shift

import outbox

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb, pytest.mark.in_portable_mode]

KEYS = [f"retry-{number}" for number in range(8)]
OWNERS = 6


class Service:
    """Notes the child keys that it is asked under, by request. The first answer to each request is lost."""

    def __init__(self):
        self.asked = defaultdict(list)

    def charge(self, name, key):
        self.asked[name].append(key)
        if len(self.asked[name]) == 1:
            raise ConnectionError


def handle(shop, engine, service, key, rng):
    """One attempt, which may fail at two moments. Returns its answer, or None if it must be repeated."""
    try:
        with shop.block(engine, key=key) as claim:
            if claim.replayed:
                return claim.require_response()
            service.charge(key, claim.child_key("bank.charge"))
            if rng.random() < 0.2:
                raise ZeroDivisionError
            with Session(engine) as session, session.begin(), claim.fence(session) as fence:
                session.add(Order(customer=key, amount=2000))
                shop.ob.enqueue(session, RECEIPT, PAYLOAD)
                fence.respond(201, rng.random())
                if rng.random() < 0.2:
                    raise ZeroDivisionError
        return claim.require_response()
    except (outbox.KeyInFlight, outbox.LeaseLost, ConnectionError, ZeroDivisionError, sa.exc.OperationalError):
        return None  # an OperationalError: a serialization failure, or a busy SQLite


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("postgresql", {}),
        ("postgresql", {"isolation_level": "SERIALIZABLE"}),
        ("sqlite", {}),
        ("mariadb", {}),
        ("portable", {}),
    ],
    ids=["postgresql", "serializable", "sqlite", "mariadb", "portable"],
)
def test_however_many_own_a_request_in_turn_it_is_answered_once(request, ob, kind, settings):
    database = request.getfixturevalue(kind)
    shop, service = Shop(database, ob), Service()
    engine = database.new_engine(pool_size=OWNERS, **settings)
    done = threading.Event()

    def make_leases_run_out():
        column = TABLES.record.c.lease_until
        while not done.wait(0.01):
            with suppress(
                sa.exc.OperationalError
            ):  # a conflict with an owner, in the portable mode: the next turn shifts it
                shift(database, column, timedelta(minutes=2), TABLES.record.c.state == "leased")

    def own(number):
        rng = random.Random(number)
        answers = {}
        while len(answers) < len(KEYS):
            key = rng.choice([key for key in KEYS if key not in answers])
            answer = handle(shop, engine, service, key, rng)
            if answer is not None:
                answers[key] = answer
        return answers

    chaos = threading.Thread(target=make_leases_run_out)
    chaos.start()
    with ThreadPoolExecutor(OWNERS) as pool:
        results = list(pool.map(own, range(OWNERS)))
    done.set()
    chaos.join()

    assert all(answers == results[0] for answers in results), "two clients got different answers"
    assert sorted(order.customer for order in database.orders) == KEYS
    assert len(database.entries) == len(KEYS)
    assert {record.state for record in database.records} == {"succeeded"}
    assert all(len(keys) > 1 and len(set(keys)) == 1 for keys in service.asked.values())
