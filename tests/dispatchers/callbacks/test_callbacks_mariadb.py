"""Callbacks on MariaDB, which undoes a whole transaction after a deadlock and then executes later statements in a new one."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from support.database import TABLES, Database, Order
from support.entries import dispatcher, pumping, put_one, states

import outbox
from dispatchers import Operations, Settlement
from dispatchers.adapters import MemoryAdapter

CHANGE = sa.update(Order).values(amount=7)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE", "AUTOCOMMIT"])
def test_a_callback_runs_at_read_committed_on_any_engine(
    mariadb: Database, ob: outbox.Outbox, level: str, is_async: bool
) -> None:
    put_one(mariadb, ob)
    operations, levels = Operations(), list[str]()

    @operations.on_settled("crm.upsert")
    def note(session: Session, settlement: Settlement) -> None:
        levels.append(session.connection().get_isolation_level())
        session.add(Order(customer="eve", amount=1))

    new_engine = mariadb.async_engine if is_async else mariadb.unprepared_engine
    engine: Any = new_engine(isolation_level=level)
    working = dispatcher(engine, ob, adapters={"crm": MemoryAdapter()}, include=[operations])

    assert asyncio.run(working.run_once()) == 1

    assert (levels, states(mariadb), len(mariadb.orders)) == (["READ COMMITTED"], {"delivered": 1}, 1)


def test_a_callback_that_catches_a_deadlock_commits_nothing(mariadb: Database, ob: outbox.Outbox) -> None:
    operations, crm, calls = Operations(), MemoryAdapter(timeout=timedelta(seconds=1)), list[int]()
    with mariadb.begin() as session:
        session.add_all([Order(id=number, customer="ada", amount=number) for number in (1, 2)])
        ob.enqueue(session, "crm.upsert", {}, parent="n:1")

    @operations.on_settled("crm.upsert")
    def note(session: Session, settlement: Settlement) -> None:
        calls.append(len(calls))
        if calls == [0]:
            catch_a_deadlock(mariadb, session)
        session.add(Order(customer="eve", amount=len(calls)))

    working = dispatcher(
        mariadb,
        ob,
        adapters={"crm": crm},
        include=[operations],
        lease=timedelta(seconds=4),
        margin=timedelta(seconds=1),
    )
    asyncio.run(pumping(working, lambda: not mariadb.rows(TABLES.queue)))

    assert len(crm.deliveries) == 1
    assert [row.state for row in mariadb.rows(TABLES.settlement)] == ["delivered"]
    written = sa.select(Order.amount).where(Order.customer == "eve")
    with mariadb.begin() as session:
        assert session.scalars(written).all() == [2]


def catch_a_deadlock(mariadb: Database, session: Session) -> None:
    with mariadb.begin() as other, ThreadPoolExecutor(1) as beside:
        session.execute(CHANGE.where(Order.id == 1))
        other.execute(CHANGE.where(Order.id == 2))
        more = [Order(customer="bob", amount=number) for number in range(100, 250)]
        other.add_all(more)  # the one that has written less is ended
        other.flush()
        waiting = beside.submit(other.execute, CHANGE.where(Order.id == 1))
        try:
            session.execute(CHANGE.where(Order.id == 2))
        except OperationalError:
            waiting.result()
        else:
            raise AssertionError("no deadlock")
