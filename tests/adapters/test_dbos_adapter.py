"""DbosAdapter with DBOS's own tables and worker, in a real PostgreSQL."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from dbos import DBOS, DBOSClient
from support.daemons import daemon, write_factory
from support.database import Database
from support.dbos_database import DbosDatabase, dbos_database
from support.entries import HOUR, age, put_one, run_once, settlement_row, state

import outbox
from dispatchers import FOREVER, Absent, CannotTell, Deferred, Delivered, Delivery, Found, Rejected
from dispatchers.adapters import DbosAdapter

KEY = "ck1_a"
DIES_BEFORE_IT_SETTLES = """
from dispatchers.adapters import DbosAdapter
from dispatchers.testing.failpoints import failpoint

dying = failpoint("settle.before")
dying.__enter__()

def make():
    orders = DbosAdapter(engine=os.environ["DBOS_URL"], queue="orders", window=FOREVER)
    return Dispatcher(url, outbox=ob, adapters={"orders": orders})
"""


@pytest.fixture(scope="module")
def dbos(server_url: sa.URL) -> Iterator[DbosDatabase]:
    with dbos_database(server_url) as database:
        yield database


@pytest.fixture(autouse=True)
def emptied(dbos: DbosDatabase) -> None:
    dbos.execute("DELETE FROM dbos.workflow_status")


def adapter(dbos: DbosDatabase, **settings: Any) -> DbosAdapter:
    return DbosAdapter(engine=dbos.url, **{"queue": "orders", "window": FOREVER} | settings)


def delivery(seconds: float, **fields: Any) -> Delivery:
    given = {"operation": "orders.fulfil", "key": KEY, "attempt": 1, "options": {}, "headers": {}} | fields
    until = asyncio.get_running_loop().time() + seconds
    return Delivery(id=uuid4(), payload_json=b'{"amount":2000}', deadline=until, **given)


def asked(adapter: DbosAdapter, verb: str, seconds: float = 10, **fields: Any) -> Any:
    """The answer of `send` or `find`."""

    async def ask() -> Any:
        answer = await getattr(adapter, verb)(delivery(seconds, **fields))
        await adapter.aclose()
        return answer

    return asyncio.run(ask())


def test_a_workflow_runs_once_although_the_dispatcher_died(
    postgresql: Database, dbos: DbosDatabase, ob: outbox.Outbox, tmp_path: Path
) -> None:
    """The second dispatcher finds the workflow that the first one has enqueued."""
    id = put_one(postgresql, ob, "orders.fulfil")
    write_factory(tmp_path, DIES_BEFORE_IT_SETTLES)
    with daemon(tmp_path, postgresql.url, DBOS_URL=dbos.url.render_as_string(hide_password=False)) as first:
        assert first.wait() == -signal.SIGKILL
    assert state(postgresql, id) == "sending"
    age(postgresql, HOUR)

    assert run_once(postgresql, ob, adapters={"orders": adapter(dbos)}) == 1

    ((key, name, queue),) = dbos.rows()
    assert (name, queue) == ("orders.fulfil", "orders")
    assert json.loads(settlement_row(postgresql, id).result) == {"workflow_id": key, "status": "ENQUEUED"}
    assert run_by_a_worker(dbos, key) == [(key, {"amount": 2000})]


def run_by_a_worker(dbos: DbosDatabase, key: str) -> list[tuple[str | None, Any]]:
    """The workflows that a worker of DBOS has executed when this one has ended: id and argument."""
    executed = []
    DBOS(config={"name": "shop", "system_database_url": dbos.url.render_as_string(False), "run_admin_server": False})

    @DBOS.workflow(name="orders.fulfil")
    def fulfil(order: Any) -> None:
        executed.append((DBOS.workflow_id, order))

    try:
        DBOS.launch()
        DBOS.register_queue("orders", polling_interval_sec=0.02)
        DBOS.retrieve_workflow(key).get_result(polling_interval_sec=0.02)
    finally:
        DBOS.destroy(destroy_registry=True)
    return executed


def test_a_second_attempt_is_the_same_workflow(dbos: DbosDatabase) -> None:
    orders = adapter(dbos, workflow={"orders.fulfil": "fulfil"})

    outcomes = [asked(orders, "send"), asked(orders, "send", attempt=2), asked(orders, "send", key="ck1_b")]

    assert [outcome.replayed for outcome in outcomes] == [False, True, False]
    assert outcomes[0].result == outcomes[1].result == {"workflow_id": KEY, "status": "ENQUEUED"}
    assert dbos.rows() == [(KEY, "fulfil", "orders"), ("ck1_b", "fulfil", "orders")]


def test_an_insert_that_has_not_committed_is_not_absent(dbos: DbosDatabase) -> None:
    orders, engine = adapter(dbos), sa.create_engine(dbos.url, poolclass=sa.NullPool)
    client = DBOSClient(system_database_engine=engine, lazy=True)
    with engine.begin() as connection:
        client.enqueue_in_transaction(
            connection, {"workflow_name": "orders.fulfil", "queue_name": "orders", "workflow_id": KEY}, {}
        )
        while_open = asked(orders, "find", seconds=0.3)
        another = asked(orders, "find", key="ck1_b")

    assert isinstance(while_open, CannotTell)
    assert another == Absent()
    assert asked(orders, "find") == Found({"workflow_id": KEY, "status": "ENQUEUED"})
    assert len(dbos.rows()) == 1


def test_absence_proves_nothing_when_dbos_may_have_deleted_it(dbos: DbosDatabase) -> None:
    orders = adapter(dbos, window=timedelta(days=7))

    assert asked(orders, "find", age=timedelta(days=6)) == Absent()
    assert isinstance(asked(orders, "find", age=timedelta(days=8)), CannotTell)


def test_nothing_is_committed_after_the_deadline(dbos: DbosDatabase) -> None:
    """As if the process had been stopped between its insert and its commit."""
    engine = sa.create_engine(dbos.url, poolclass=sa.NullPool)
    until = time.monotonic() + 0.5

    @sa.event.listens_for(engine, "after_cursor_execute")
    def stopped(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "workflow_input" in statement:
            time.sleep(max(0.0, until - time.monotonic()))

    outcome = asked(DbosAdapter(engine=engine, queue="orders", window=FOREVER), "send", seconds=0.4)

    assert isinstance(outcome, Deferred)
    assert dbos.rows() == []


def test_options_other_than_the_workflow_are_rejected(dbos: DbosDatabase) -> None:
    chosen = asked(adapter(dbos), "send", options={"workflow": "express"})

    assert isinstance(chosen, Delivered)
    assert dbos.rows() == [(KEY, "express", "orders")]
    assert isinstance(asked(adapter(dbos), "send", options={"queue": "express"}), Rejected)
