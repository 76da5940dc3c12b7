"""The breaker of a destination is of all dispatchers: they count its failures together, and one of them probes.

Each dispatcher here has connections of its own, as a process would.

"""

import asyncio
from dataclasses import replace
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
    states,
)
from support.flow_control import FRAGILE, LASTING, Crm, crm_row, news, untouched, work

import outbox
from dispatchers import Delivered, Limits, Operations, Unknown
from dispatchers.flow_control.state import News
from dispatchers.store.database import DatabaseStore
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


@pytest.mark.parametrize("total", [None, 1], ids=["no permits shared", "one permit for all"])
def test_a_probe_that_gets_through_lets_everything_through(
    database: Database, ob: outbox.Outbox, total: int | None
) -> None:
    limits = {"crm": replace(FRAGILE["crm"], total_concurrency=total)}
    put(database, ob, count=20)
    crm = Crm(Unknown("HTTP 500"))
    assert work(database, ob, crm, limits=limits) == 3
    assert work(database, ob, crm, limits=limits) == 0
    age(database, 2 * HOUR)
    crm.answer = Delivered()

    assert work(database, ob, crm, limits=limits) == 20

    assert states(database) == {"delivered": 20}
    assert (crm_row(database).breaker, crm_row(database).breaker_failures) == ("closed", 0)
    assert crm_row(database).permits_taken is None


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


def test_a_probe_that_settles_with_its_callback_opens_the_way_too(database: Database, ob: outbox.Outbox) -> None:
    effects = Operations()
    effects.on_settled("crm")(lambda session, settlement: None)
    put(database, ob, count=5)
    crm = Crm(Unknown("HTTP 500"))
    settings: Any = {
        "adapters": {"crm": crm},
        "include": [effects],
        "limits": {"crm": replace(FRAGILE["crm"], total_concurrency=3)},
    }
    run_once(database.new_engine(), ob, **settings)
    age(database, 2 * HOUR)
    crm.answer = Delivered()

    asyncio.run(
        pumping(dispatcher(database.new_engine(), ob, **settings), lambda: states(database) == {"delivered": 5})
    )
    assert crm_row(database).permits_taken is None
