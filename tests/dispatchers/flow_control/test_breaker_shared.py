"""The breaker of a destination is of all dispatchers: they count its failures together, and one of them probes.

Each dispatcher here has connections of its own, as a process would.

"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from support.database import Database
from support.entries import (
    HOUR,
    age,
    change,
    claim_request,
    dispatcher,
    pumping,
    put,
    put_one,
    queue_row,
    quota,
    run_once,
    settlement_row,
    states,
)
from support.flow_control import FRAGILE, LASTING, MINUTE, Crm, crm_row, news, untouched, work

import outbox
from dispatchers import Delivered, Limits, Operations, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.flow_control.state import News
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Exchange
from outbox.sql.clock import clock_plus

pytestmark = pytest.mark.on_mariadb


def test_failures_that_several_dispatchers_met_open_the_breaker_for_all(database: Database, ob: outbox.Outbox) -> None:
    limits = {"crm": Limits(concurrency=1, breaker=LASTING)}
    put(database, ob, count=10)
    crm = Crm(Unknown("HTTP 500"))

    for _ in range(2):
        store = DatabaseStore(database.new_engine(), ob.configuration)
        asyncio.run(store.exchange([], claim_request(quota("nobody"), flow_update=news({"crm": News(failures=4)}))))

    assert crm_row(database).breaker_failures == 8
    assert work(database, ob, crm, limits=limits) == 2
    assert crm_row(database).breaker == "open"
    assert work(database, ob, crm, limits=limits) == 0
    assert len(untouched(database)) == 8


def test_an_answer_closes_the_count_before_the_breaker_opens(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=8)
    bad = Unknown("HTTP 500")

    work(database, ob, MemoryAdapter([bad, bad, Delivered(), bad, bad, Delivered()]), limits=FRAGILE)

    assert states(database) == {"delivered": 4, "retry": 4}
    assert crm_row(database).breaker_failures == 0


def test_of_many_dispatchers_one_probes(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=20)
    work(database, ob, Crm(Unknown("HTTP 500")), limits=FRAGILE)
    age(database, 2 * HOUR)
    stores = [DatabaseStore(database.new_engine(), ob.configuration) for _ in range(6)]
    barrier = Barrier(len(stores))

    def probe(store: DatabaseStore) -> Exchange:
        asyncio.run(store.survey())  # connected, so that all come at the same time
        request = claim_request(quota(permits=50), flow_update=news({}, decided=frozenset({"crm"})))
        barrier.wait()
        return asyncio.run(store.exchange([], request))

    with ThreadPoolExecutor(len(stores)) as threads:
        exchanges = list(threads.map(probe, stores))

    (entry,) = (entry for exchange in exchanges for entry in exchange.claimed)
    assert (crm_row(database).breaker, crm_row(database).breaker_token) == ("half_open", entry.lease_token)


def test_a_probe_that_gets_through_lets_everything_through(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=20)
    crm = Crm(Unknown("HTTP 500"))
    assert work(database, ob, crm, limits=FRAGILE) == 3
    assert work(database, ob, crm, limits=FRAGILE) == 0
    age(database, 2 * HOUR)
    crm.answer = Delivered()

    assert work(database, ob, crm, limits=FRAGILE) == 20

    assert states(database) == {"delivered": 20}
    assert (crm_row(database).breaker, crm_row(database).breaker_failures) == ("closed", 0)


def test_a_probe_that_fails_shuts_it_for_longer(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=20)
    crm = Crm(Unknown("HTTP 500"))
    work(database, ob, crm, limits=FRAGILE)

    age(database, HOUR)
    assert [work(database, ob, crm, limits=FRAGILE) for _ in range(2)] == [1, 0]
    age(database, HOUR)
    assert work(database, ob, crm, limits=FRAGILE) == 0
    age(database, HOUR)
    assert work(database, ob, crm, limits=FRAGILE) == 1


def test_a_dead_dispatchers_probe_goes_to_another_when_its_lease_ends(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=5)
    crm = Crm(Unknown("HTTP 500"))
    work(database, ob, crm, limits=FRAGILE)
    age(database, 2 * HOUR)
    dead = DatabaseStore(database.new_engine(), ob.configuration)
    request = claim_request(quota(permits=50), flow_update=news({}, decided=frozenset({"crm"})), lease=HOUR)
    (probe,) = asyncio.run(dead.exchange([], request)).claimed
    crm.answer = Delivered()

    assert work(database, ob, crm, limits=FRAGILE) == 0
    age(database, HOUR + MINUTE)
    assert work(database, ob, crm, limits=FRAGILE) == 5

    assert states(database) == {"delivered": 5}
    assert settlement_row(database, probe.id).deliveries >= 2
    late = News(failures=1, probe=probe.lease_token, passed=False)
    asyncio.run(dead.exchange([], claim_request(quota("nobody"), flow_update=news({"crm": late}))))
    assert crm_row(database).breaker == "closed"


def test_a_probe_that_no_adapter_here_can_send_leaves_its_place(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=5)
    crm = Crm(Unknown("HTTP 500"))
    work(database, ob, crm, limits=FRAGILE)
    age(database, 2 * HOUR)
    strange = put_one(database, ob, "unserved.operation", destination="crm")
    change(database, strange, due_at=clock_plus(-3 * HOUR))  # it is the first
    crm.answer = Delivered()

    assert work(database, ob, crm, limits=FRAGILE) == 5

    row = queue_row(database, strange)
    assert (row.state, row.deliveries) == ("pending", 0)


def test_without_a_breaker_a_broken_service_is_asked_again_and_again(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=30)

    assert work(database, ob, Crm(Unknown("HTTP 500")), limits={"crm": Limits(breaker=None)}) == 30


def test_a_probe_that_settles_with_its_callback_opens_the_way_too(database: Database, ob: outbox.Outbox) -> None:
    effects = Operations()
    effects.on_settled("crm")(lambda session, settlement: None)
    put(database, ob, count=5)
    crm = Crm(Unknown("HTTP 500"))
    settings: Any = {"adapters": {"crm": crm}, "include": [effects], "limits": FRAGILE}
    run_once(database.new_engine(), ob, **settings)
    age(database, 2 * HOUR)
    crm.answer = Delivered()

    asyncio.run(
        pumping(dispatcher(database.new_engine(), ob, **settings), lambda: states(database) == {"delivered": 5})
    )
