"""Apps and dispatchers on different nodes of a Galera cluster. One test, because a cluster takes ten seconds to start.

`python3 dev.py galera` starts such a cluster.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import TABLES
from support.entries import run_once
from support.galera_cluster import missing_part, running_cluster, wait_until

import outbox
from dispatchers.adapters.memory import MemoryAdapter
from outbox import migrations
from outbox.sql.dialect import DEADLOCK, sqlstate
from outbox.sql.engines import engine_of


def test_the_outbox_keeps_its_guarantees_on_three_nodes_of_galera(ob: outbox.Outbox) -> None:
    if (missing := missing_part()) is not None:
        pytest.skip(f"{missing} is not installed")
    with running_cluster() as cluster:
        engines = [engine_of(url) for url in cluster.urls("shop")]
        migrations.upgrade(engines[0])
        for check in CHECKS:
            check(engines, ob)
        for engine in engines:
            engine.dispose()


def in_transaction(engine: sa.Engine, work: Callable[[Session], object]) -> int:
    """Run it again as long as another node's transaction is preferred, as an app must. Returns how often."""
    for again in range(50):
        try:
            with Session(engine) as session, session.begin():
                work(session)
        except sa.exc.OperationalError as error:
            if sqlstate(error.orig) != DEADLOCK:
                raise
        else:
            return again
    raise AssertionError("it was never preferred")


def left(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(TABLES.queue)) or 0


def one_node_sends_in_order_what_two_others_enqueue(engines: list[sa.Engine], ob: outbox.Outbox) -> None:
    service = MemoryAdapter()
    for number in range(200):
        entry = {"parent": f"order:{number}", "ordering_key": f"group {number % 10}"}
        enqueue = partial(ob.enqueue, operation="crm.upsert", payload={"number": number}, **entry)
        in_transaction(engines[number // 10 % 2], enqueue)
    wait_until(lambda: left(engines[2]) == 200, "all entries on the third node")

    wait_until(lambda: (run_once(engines[2], ob, adapters={"crm": service}), left(engines[2]))[1] == 0, "all are sent")

    sent = [delivery.payload["number"] for delivery in service.deliveries]
    assert Counter(sent) == Counter(range(200))
    for group in range(10):
        assert [number for number in sent if number % 10 == group] == [*range(group, 200, 10)]


CHECKS = (one_node_sends_in_order_what_two_others_enqueue,)
