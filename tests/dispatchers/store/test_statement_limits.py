"""Every transaction of a dispatcher has its limits, whatever the role's and the session's own settings say."""

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database
from support.entries import dispatcher, put

import outbox
from dispatchers import Deferred, Limits
from dispatchers.adapters import MemoryAdapter
from dispatchers.maintenance.jobs import report_gauges, report_lag
from dispatchers.store.connections.guards import Guards, guard, guards_for
from dispatchers.store.database import DatabaseStore

LIMITS = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")
ASKED = sa.text("SELECT " + ", ".join(f"current_setting('{name}')" for name in (*LIMITS, "synchronous_commit")))


def hear_commits(engine: sa.Engine) -> Counter[tuple[Any, ...]]:
    """The limits of each transaction, as they are when it commits. Of those that only asked for the isolation level: none."""
    heard: Counter[tuple[Any, ...]] = Counter()
    begun: set[int] = set()

    @sa.event.listens_for(engine, "before_cursor_execute")
    def execute(connection: sa.Connection, cursor: Any, statement: str, *rest: Any) -> None:
        if not statement.startswith("SHOW "):
            begun.add(id(connection))

    @sa.event.listens_for(engine, "commit")
    def commit(connection: sa.Connection) -> None:
        if id(connection) in begun:
            with connection.connection.cursor() as cursor:
                cursor.execute(str(ASKED))
                heard[cursor.fetchone()] += 1
            begun.discard(id(connection))

    return heard


def test_every_transaction_of_a_dispatcher_has_its_limits(postgresql: Database) -> None:
    ob = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test", fair=["crm"])
    put(postgresql, ob, "crm.upsert", count=3)
    put(postgresql, ob, "mail.send", count=3, ordering_key="a")
    put(postgresql, ob, "sms.send", count=3)
    engine = postgresql.new_engine()
    heard = hear_commits(engine)

    async def main() -> None:
        working = dispatcher(
            engine,
            ob,
            adapters={"crm": MemoryAdapter(), "mail": MemoryAdapter(), "sms": MemoryAdapter([Deferred("later")] * 3)},
            limits={"sms": Limits(rate=100)},
        )
        await working.require_usable()
        await working.run_once()
        await working.store.request_lookups(lambda operation, form: True, timedelta(0), None)
        await report_gauges(working.store.run, TABLES)
        assert isinstance(working.store, DatabaseStore)
        await report_lag(working.store.run, TABLES)
        await working.close()

    asyncio.run(main())

    assert heard.keys() == {("5s", "18s", "1min", "on")}
    assert heard.total() > 10


@pytest.mark.parametrize(("own", "then"), [("0", "2s"), ("1500ms", "1500ms"), ("1min", "2s"), ("1d", "2s")])
def test_the_stricter_of_two_limits_holds(postgresql: Database, own: str, then: str) -> None:
    with postgresql.engine.begin() as connection:
        for name in LIMITS:
            connection.exec_driver_sql(f"SET LOCAL {name} = '{own}'")

        guard(connection, Guards(*[timedelta(seconds=2)] * 3))

        assert connection.execute(ASKED).one() == (then, then, then, "on")


def test_no_limit_uses_up_the_lease_that_it_follows_from() -> None:
    for seconds in (4, 10, 60, 600):
        lease = timedelta(seconds=seconds)
        guards = guards_for(lease)
        assert guards.lock_wait is not None
        assert guards.statement is not None
        assert guards.lock_wait < guards.statement < lease / 2
