"""One entry that ends alone is settled by one statement, without BEGIN and COMMIT, and its connection is as it was."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from support.claims import MINUTE, Bench, moves
from support.database import Database
from support.entries import claim_one, put_one, settle, settlement_row

import outbox
from dispatchers.store.app_code import callback_registry
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import CallbacksChanged
from dispatchers.transitions import Settle

ANSWER_ENDS = "ReadyForQuery"  # libpq's word in a trace: the server has answered one round trip


@pytest.fixture
def bench(postgresql: Database, ob: outbox.Outbox) -> Bench:
    return Bench(postgresql, DatabaseStore(postgresql.engine, ob.configuration), ob)


def idle_driver(engine: sa.Engine) -> Any:
    """The driver's connection that was used last: these pools keep one."""
    with engine.connect() as connection:
        return connection.connection.driver_connection


@pytest.mark.parametrize("kind", ["delivered", "failed", "retry", "uncertain", "pending"])
def test_one_settlement_is_one_round_trip_and_no_transaction(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path, kind: str
) -> None:
    engine = postgresql.new_engine(pool_size=1)
    store = DatabaseStore(engine, ob.configuration)
    bench = Bench(postgresql, store, ob)
    bench.put()
    entry = claim_one(store)
    change = dict(zip(["delivered", "failed", "retry", "uncertain", "pending"], moves(entry).values(), strict=True))[
        kind
    ]
    driver = idle_driver(engine)

    with (tmp_path / "trace").open("w+") as trace:
        driver.pgconn.trace(trace.fileno())
        assert settle(store, (entry, change)) == {entry.id}
        driver.pgconn.untrace()
        trace.seek(0)
        messages = trace.read()

    assert messages.count(ANSWER_ENDS) == 1
    assert "BEGIN" not in messages
    assert "COMMIT" not in messages
    assert not driver.autocommit
    engine.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_an_async_connection_is_in_autocommit_for_this_statement_only(
    postgresql: Database, ob: outbox.Outbox, driver: str
) -> None:
    id = put_one(postgresql, ob)
    seen: list[bool] = []

    async def main() -> None:
        engine = create_async_engine(postgresql.url.set(drivername=f"postgresql+{driver}"), pool_size=1)
        store = DatabaseStore(engine, ob.configuration)
        entry = await asyncio.to_thread(claim_one, DatabaseStore(postgresql.engine, ob.configuration))
        await store.survey()  # reads the isolation level
        assert (await store.exchange([(entry, Settle("delivered", 1))], None)).settled == {entry.lease}
        async with engine.connect() as connection:
            pooled: Any = await connection.get_raw_connection()
            seen.append(pooled.dbapi_connection.autocommit)
            await connection.execute(sa.text("CREATE TABLE half_done (number integer)"))
            await connection.rollback()
        await engine.dispose()

    asyncio.run(main())

    assert settlement_row(postgresql, id).state == "delivered"
    assert seen == [False]
    with postgresql.engine.connect() as connection:
        assert not sa.inspect(connection).has_table("half_done")


def test_a_refused_settlement_leaves_no_connection_in_autocommit(postgresql: Database, ob: outbox.Outbox) -> None:
    engine = postgresql.new_engine(pool_size=1)
    store = DatabaseStore(engine, ob.configuration)
    id = put_one(postgresql, ob)
    entry = claim_one(store)

    assert settle(store, (entry, Settle("failed", 1, reason="a NUL: \0"))) == {id}

    assert not idle_driver(engine).autocommit
    assert "refused its outcome" in settlement_row(postgresql, id).reason
    engine.dispose()


def test_a_transaction_that_a_listener_has_begun_is_not_disturbed(postgresql: Database, ob: outbox.Outbox) -> None:
    engine = postgresql.new_engine(pool_size=1)
    store = DatabaseStore(engine, ob.configuration)
    id = put_one(postgresql, ob)
    entry = claim_one(store)
    begun: list[int] = []

    @sa.event.listens_for(engine, "checkout")
    def begin(driver: Any, *rest: Any) -> None:
        driver.execute("SELECT 1")
        begun.append(driver.info.transaction_status)

    assert settle(store, (entry, Settle("delivered", 1))) == {id}

    assert begun
    assert settlement_row(postgresql, id).state == "delivered"
    engine.dispose()


def test_a_lost_lease_changes_nothing(bench: Bench) -> None:
    id = bench.put()
    entry = claim_one(bench.store)
    assert settle(bench.store, (entry, moves(entry)["failed"])) == {id}

    assert settle(bench.store, (entry, moves(entry)["failed"])) == set()

    assert abs(settlement_row(bench.database, id).settled_at - entry.leased_at) < MINUTE


def test_callbacks_that_have_changed_meanwhile_keep_it_from_being_settled(bench: Bench) -> None:
    id = bench.put()
    entry = claim_one(bench.store)
    asyncio.run(bench.store.callbacks())
    with bench.database.engine.begin() as connection:
        callback_registry.register(connection, bench.store.tables, ["on_settled stripe"])

    with pytest.raises(CallbacksChanged):
        settle(bench.store, (entry, Settle("delivered", 1)))

    assert bench.row(id).lease_token == entry.lease_token
