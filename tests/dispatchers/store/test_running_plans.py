"""What a driver has prepared on small tables: it is planned again for the tables as they are."""

import asyncio

import pytest
from sqlalchemy.ext.asyncio import create_async_engine
from support.database import Database
from support.entries import claim_request, quota
from test_claim_plans import drained, fill, number, run

import outbox
from dispatchers.store.database import DatabaseStore


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_statements_prepared_on_empty_tables_never_read_grown_ones_whole(
    postgresql: Database, ob: outbox.Outbox, driver: str
) -> None:
    """Drivers prepare what they send often, and PostgreSQL may keep a plan that it made for the tables as they were."""
    postgresql.kept.close()  # a session that other tests have used has planned what its functions ask, for tables of theirs
    tables = ("queue", "entry", "settlement")
    run(postgresql, *(f"ALTER TABLE outbox_{name} SET (autovacuum_enabled = off)" for name in tables))
    run(postgresql, *(f"VACUUM ANALYZE outbox_{name}" for name in tables))  # known to be empty
    engine = create_async_engine(postgresql.url.set(drivername=f"postgresql+{driver}"), pool_size=1, max_overflow=0)
    store = DatabaseStore(engine, ob.configuration)

    async def drain(rows: int, batch: int) -> int:
        """Settles all; returns how many rows were read by sequential scans until then."""
        fill(postgresql, rows, "crm")
        exchange = await store.exchange([], claim_request(quota(permits=batch)))
        while exchange.claimed:
            exchange = await store.exchange(drained(exchange.claimed), claim_request(quota(permits=batch)))
        async with engine.connect() as connection:
            await connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
        return rows_read_from_end_to_end(postgresql)

    async def grow() -> tuple[int, int]:
        for _ in range(2):
            await drain(rows=20, batch=1)
        before = await drain(rows=1000, batch=250)
        after = await drain(rows=1000, batch=250)
        await engine.dispose()
        return before, after

    before, after = asyncio.run(grow())
    run(postgresql, *(f"ALTER TABLE outbox_{name} RESET (autovacuum_enabled)" for name in tables))

    assert number(postgresql, "SELECT count(*) FROM outbox_settlement") == 2040
    assert after - before < 50_000  # a plan for empty tables reads 2.5 million


def rows_read_from_end_to_end(database: Database) -> int:
    tables = "'outbox_queue', 'outbox_entry', 'outbox_settlement'"
    return int(number(database, f"SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE relname IN ({tables})"))
