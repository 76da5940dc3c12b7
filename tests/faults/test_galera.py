"""Apps and dispatchers on different nodes of a Galera cluster. One test, because a cluster takes ten seconds to start.

`python3 dev.py galera --chaos` is the long form.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import TABLES
from support.entries import claim_request, quota, run_once
from support.galera_chaos import chaos
from support.galera_cluster import missing_part, running_cluster, wait_until

import outbox
from dispatchers.adapters.memory import MemoryAdapter
from dispatchers.admin import doctor
from dispatchers.store import claims_plain
from dispatchers.store.outage_log import cause_of, is_outage
from outbox.sql.dialect import DEADLOCK, sqlstate
from outbox.sql.engines import engine_of
from outbox.sql.key_locks import certify


def test_the_outbox_keeps_its_guarantees_on_three_nodes_of_galera(ob: outbox.Outbox) -> None:
    if (missing := missing_part()) is not None:
        pytest.skip(f"{missing} is not installed")
    with running_cluster() as cluster:
        chaos(cluster, 300, ["kill"])
        engines = [engine_of(url) for url in cluster.urls("shop")]
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
        entry = {"parent": f"sorted:{number}", "ordering_key": f"group {number % 10}"}
        enqueue = partial(ob.enqueue, operation="crm.upsert", payload={"number": number}, **entry)
        in_transaction(engines[number // 10 % 2], enqueue)
    wait_until(lambda: left(engines[2]) == 200, "all entries on the third node")

    wait_until(lambda: (run_once(engines[2], ob, adapters={"crm": service}), left(engines[2]))[1] == 0, "all are sent")

    sent = [delivery.payload["number"] for delivery in service.deliveries]
    assert Counter(sent) == Counter(range(200))
    for group in range(10):
        assert [number for number in sent if number % 10 == group] == [*range(group, 200, 10)]


def a_claim_that_another_node_has_committed_is_refused_at_commit(engines: list[sa.Engine], ob: outbox.Outbox) -> None:
    in_transaction(engines[0], partial(ob.enqueue, operation="crm.upsert", payload={}, parent="order:claimed"))
    wait_until(lambda: left(engines[1]) == 1, "the entry on the second node")
    with engines[0].connect() as one, engines[1].connect() as other:
        for connection in (one, other):
            connection.begin()
            assert len(claims_plain.claim(connection, TABLES, claim_request(quota()))) == 1
        one.commit()

        with pytest.raises(sa.exc.OperationalError) as refused:
            other.commit()

    assert sqlstate(refused.value.orig) == DEADLOCK


def only_one_of_the_nodes_that_certify_a_name_commits(engines: list[sa.Engine], ob: outbox.Outbox) -> None:
    with engines[0].connect() as one, engines[1].connect() as other:
        for connection in (one, other):
            connection.begin()
            assert certify(connection, TABLES, ["group"]) == {"group"}
        one.commit()

        with pytest.raises(sa.exc.OperationalError) as refused:
            other.commit()

    assert sqlstate(refused.value.orig) == DEADLOCK


def the_doctor_names_a_node_that_would_change_tables_alone(engines: list[sa.Engine], ob: outbox.Outbox) -> None:
    found = []
    with engines[0].connect() as connection:
        for method in ("RSU", "TOI"):
            connection.exec_driver_sql(f"SET GLOBAL wsrep_OSU_method = {method}")
            context = doctor.Context(tables=TABLES, prefix="outbox_")
            found.append([each.text for each in doctor.CHECKS["galera"](connection, context)])

    assert found == [["wsrep_osu_method is RSU"], []]


CHECKS = (
    the_doctor_names_a_node_that_would_change_tables_alone,
    one_node_sends_in_order_what_two_others_enqueue,
    only_one_of_the_nodes_that_certify_a_name_commits,
    a_claim_that_another_node_has_committed_is_refused_at_commit,
)


@pytest.mark.parametrize(("number", "cause"), [(1047, "outside the cluster's majority"), (1180, "result is unknown")])
def test_a_node_that_left_its_cluster_is_an_outage_with_its_cause_named(number: int, cause: str) -> None:
    error = sa.exc.OperationalError("COMMIT", None, pymysql.err.OperationalError(number, "WSREP"))

    assert is_outage(error)
    assert cause in cause_of(error)
