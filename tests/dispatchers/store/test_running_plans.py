"""What a driver has prepared on small tables: it is planned again for the tables as they are."""

import asyncio

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from support.daemons import wait_for
from support.database import Database
from support.entries import claim, claim_request, put, quota
from test_claim_plans import drained, fill, number, run

import outbox
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue import exchange


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


def test_a_claims_kept_plan_reads_grown_tables_by_their_indexes(postgresql: Database, ob: outbox.Outbox) -> None:
    """To plan a claim of one entry takes the server longer than to execute it."""
    postgresql.kept.close()  # it has planned what its functions ask, for other tests' tables
    tables = ("queue", "entry", "settlement", "destination")
    run(postgresql, *(f"ALTER TABLE outbox_{name} SET (autovacuum_enabled = off)" for name in tables))
    run(postgresql, *(f"VACUUM ANALYZE outbox_{name}" for name in tables))  # known to be empty
    engine = postgresql.new_engine(pool_size=1, max_overflow=0)
    store = DatabaseStore(engine, ob.configuration)
    names = ["crm", "mail", "sms"]
    for _ in range(30):
        fill(postgresql, 1, *names)
        claim(store, quota("crm", permits=50))
        claim(store, *(quota(name, permits=50) for name in names))

    fill(postgresql, 2000, *names)
    postgresql.kept.close()  # a session reports its counts at its end
    inserted = "SELECT n_tup_ins FROM pg_stat_user_tables WHERE relname = 'outbox_queue'"
    wait_for(lambda: number(postgresql, inserted) >= 6090, "the counts of what was filled")
    before = rows_read_from_end_to_end(postgresql)
    claimed = claim(store, quota("crm", permits=50))
    claimed += claim(store, *(quota(name, permits=100) for name in names))
    with engine.connect() as connection:
        kept = connection.exec_driver_sql(
            "SELECT statement, generic_plans, custom_plans FROM pg_prepared_statements"
        ).all()
        connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
    engine.dispose()
    run(postgresql, *(f"ALTER TABLE outbox_{name} RESET (autovacuum_enabled)" for name in tables))

    assert len(claimed) == 350
    assert rows_read_from_end_to_end(postgresql) - before == 0
    assert [planned for statement, kept_plans, planned in kept if "UPDATE" in statement and kept_plans > 15] == [0, 0]


def test_after_a_claim_of_a_group_the_rest_is_planned_for_the_present(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(postgresql, ob, count=2, ordering_key="a")
    modes: list[str] = []
    sort_out = exchange.sort_out

    def heard(connection: sa.Connection, *rest: object) -> object:
        modes.append(connection.execute(sa.text("SHOW plan_cache_mode")).scalar_one())
        return sort_out(connection, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(exchange, "sort_out", heard)

    claim(DatabaseStore(postgresql.engine, ob.configuration), quota())

    assert modes == ["force_custom_plan"]


def rows_read_from_end_to_end(database: Database) -> int:
    tables = "'outbox_queue', 'outbox_entry', 'outbox_settlement'"
    return int(number(database, f"SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE relname IN ({tables})"))
