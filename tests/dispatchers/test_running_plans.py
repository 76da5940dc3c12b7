"""What a running dispatcher asks beside its claims: however long the queue, no statement reads it from end to end."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import create_async_engine
from support.database import TABLES, Database
from support.entries import claim_request, quota
from test_claim_plans import drained, fill, number, run
from test_retention_plans import nodes, plans_of

import outbox
from dispatchers.maintenance.jobs import report_lag
from dispatchers.store.database import DatabaseStore

ROWS = 30_000
SMALL = {"outbox_meta", "outbox_kid", "outbox_destination", "outbox_blocked_group"}


async def ask_everything(store: DatabaseStore, ob: outbox.Outbox) -> None:
    await store.gauges()
    await store.unknown_kid(["k1"])
    await store.require_environment("test")
    await store.require_secrets(ob.configuration.keyring, recording=False)
    await store.destinations()
    await store.flow_states()
    await store.accepted(None)
    await store.request_lookups(lambda operation, sent_as: True, timedelta(seconds=1), None)
    await store.check_identity("test", None)
    await report_lag(store.run, TABLES)


def test_no_statement_of_a_running_dispatcher_reads_the_whole_queue(postgresql: Database, ob: outbox.Outbox) -> None:
    run(postgresql, *(f"ALTER TABLE outbox_{name} SET (autovacuum_enabled = off)" for name in ("queue", "entry")))
    run(postgresql, "ANALYZE outbox_queue", "ANALYZE outbox_entry")
    fill(postgresql, ROWS, "a", "b", "c")
    found = []
    for analyze in ([], ["ANALYZE outbox_queue", "ANALYZE outbox_entry"]):
        run(postgresql, *analyze)
        engine = postgresql.new_engine()
        with plans_of(engine) as plans:
            asyncio.run(ask_everything(DatabaseStore(engine, ob.configuration), ob))
        engine.dispose()
        found += [node for plan in plans for node in nodes(plan)]
    run(postgresql, *(f"ALTER TABLE outbox_{name} RESET (autovacuum_enabled)" for name in ("queue", "entry")))

    kinds = {(node["Node Type"], node.get("Relation Name")) for node in found}
    # A bitmap of the primary key's entries under one parent is none of the table.
    bitmaps = {node["Index Name"] for node in found if node["Node Type"] == "Bitmap Index Scan"}
    assert {name for kind, name in kinds if "Seq" in kind} <= SMALL
    assert bitmaps <= {"outbox_entry_pkey"}
    assert ("Index Scan", "outbox_queue") in kinds


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_statements_prepared_on_empty_tables_never_read_grown_ones_whole(
    postgresql: Database, ob: outbox.Outbox, driver: str
) -> None:
    """Drivers prepare what they send often, and PostgreSQL may keep a plan that it made for the tables as they were."""
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
        before = await drain(rows=2000, batch=250)
        after = await drain(rows=2000, batch=250)
        await engine.dispose()
        return before, after

    before, after = asyncio.run(grow())
    run(postgresql, *(f"ALTER TABLE outbox_{name} RESET (autovacuum_enabled)" for name in tables))

    assert number(postgresql, "SELECT count(*) FROM outbox_settlement") == 4040
    assert after - before < 50_000  # a plan for empty tables reads 10 million


def rows_read_from_end_to_end(database: Database) -> int:
    tables = "'outbox_queue', 'outbox_entry', 'outbox_settlement'"
    return int(number(database, f"SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE relname IN ({tables})"))
