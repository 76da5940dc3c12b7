"""A faulty ground: full disks, few connections, commits that come late, clocks that are wrong.

Of every one: nothing is lost, and nothing happens twice. The whole list, with what shows each row: docs/verification.md.
"""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from support.database import ALL, NOTHING, TABLES, Client, Database
from support.entries import (
    HOUR,
    Blocking,
    age,
    claim_one,
    dispatcher,
    pumping,
    put,
    put_one,
    run_once,
    state,
    states,
    until_true,
)

import outbox
from dispatchers import Deferred, Delivered, Outcome, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.store.database import DatabaseStore
from outbox.sessions.session import flush_all

YEAR = timedelta(days=365)

# --- a full disk

QUEUE, SETTLEMENT = TABLES.queue.name, TABLES.settlement.name

NO_SPACE = """
CREATE FUNCTION no_space() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$
"""


def fill_disk(database: Database, statement: str) -> None:
    """From now on there is no space for this kind of statement, such as "UPDATE ON outbox_queue"."""
    database.execute(sa.text(NO_SPACE))
    database.execute(sa.text(f"CREATE TRIGGER full_disk BEFORE {statement} EXECUTE FUNCTION no_space()"))


def make_room(database: Database) -> None:
    database.execute(sa.text("DROP FUNCTION no_space CASCADE"))


def test_a_full_disk_at_the_enqueue_keeps_nothing_and_a_retry_may_come(postgresql: Database, ob: outbox.Outbox) -> None:
    client = Client(postgresql, ob, is_async=False)
    fill_disk(postgresql, f"INSERT ON {TABLES.entry.name}")

    with pytest.raises(sa.exc.OperationalError) as refused:
        client.request()
    assert getattr(refused.value.orig, "sqlstate", None) == "53100"
    assert postgresql.counts() == NOTHING
    make_room(postgresql)
    client.request()

    assert postgresql.counts() == ALL


def test_a_full_disk_under_sqlite_keeps_nothing_and_a_retry_may_come(sqlite: Database, ob: outbox.Outbox) -> None:
    client = Client(sqlite, ob, is_async=False)

    def place_large_order(session: sa.orm.Session, claim: outbox.Claim) -> None:
        session.connection().exec_driver_sql("PRAGMA max_page_count = 1")  # as many as there are: SQLite takes no fewer
        ob.enqueue(session, "mail.send", {"text": "x" * 100_000})
        client.place_order(session, claim)

    with pytest.raises(sa.exc.OperationalError, match="database or disk is full"):
        client.request(place_large_order)
    assert sqlite.counts() == NOTHING
    sqlite.engine.dispose()  # what the pragma said goes with its connection
    client.request()

    assert sqlite.counts() == ALL


@pytest.mark.parametrize(("statement", "sent"), [(f"UPDATE ON {QUEUE}", 0), (f"INSERT ON {SETTLEMENT}", 3)])
def test_a_full_disk_at_claim_or_settling_sends_nothing_twice_and_recovers(
    postgresql: Database,
    ob: outbox.Outbox,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
    sent: int,
) -> None:
    monkeypatch.setattr("dispatchers.pipeline.claim_loops.STORE_RETRY_SECONDS", (0.01, 0.01))
    put(postgresql, ob, count=3)
    adapter = MemoryAdapter()
    fill_disk(postgresql, statement)

    async def main() -> None:
        pump = asyncio.create_task(pumping(working, lambda: states(postgresql) == {"delivered": 3}))
        await until_true(lambda: "the server's disk is full (DiskFull 53100)" in caplog.text)
        assert len(adapter.deliveries) == sent
        make_room(postgresql)
        await pump

    working = dispatcher(postgresql, ob, adapters={"crm": adapter})
    asyncio.run(main())

    assert len(adapter.deliveries) == 3
    assert {(row.deliveries, row.attempts) for row in postgresql.rows(TABLES.settlement)} == {(1, 1)}
    assert "database unavailable" in caplog.text


# --- few connections


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_fifty_in_flight_make_do_with_a_pool_of_one_beside_the_app(
    postgresql: Database, ob: outbox.Outbox, is_async: bool
) -> None:
    put(postgresql, ob, count=50)
    adapter = Blocking()
    make_engine: Any = create_async_engine if is_async else sa.create_engine
    engine: Any = make_engine(postgresql.url, pool_size=1, max_overflow=0)

    async def use_the_connection() -> None:
        if is_async:
            async with engine.connect() as connection:
                await connection.execute(sa.select(1))
        else:
            with engine.connect() as connection:
                connection.execute(sa.select(1))

    async def main() -> None:
        working = dispatcher(engine, ob, adapters={"crm": adapter}, concurrency=64)
        pump = asyncio.create_task(pumping(working, lambda: states(postgresql) == {"delivered": 50}))
        await until_true(lambda: adapter.waiting == 50)
        async with asyncio.timeout(60):
            await use_the_connection()
        adapter.released.set()
        await pump
        if is_async:
            await engine.dispose()

    asyncio.run(main())
    if not is_async:
        engine.dispose()

    assert adapter.most == 50
    assert set(adapter.effects.values()) == {1}


# --- commits that come late


def test_an_entry_that_commits_late_is_sent_though_all_others_went_before(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    adapter = MemoryAdapter()
    working = dispatcher(postgresql, ob, adapters={"crm": adapter})

    async def main() -> None:
        with postgresql.session() as session:
            late = ob.enqueue(session, "crm.upsert", {}, parent="order:late").id
            flush_all(session)
            for table in (TABLES.entry, TABLES.queue):  # as if this transaction had been open for a day
                session.execute(sa.text(f"UPDATE {table.name} SET due_at = due_at - interval '1 day'"))
            put(postgresql, ob, count=20)
            pump = asyncio.create_task(pumping(working, lambda: states(postgresql) == {"delivered": 21}))
            await until_true(lambda: states(postgresql) == {"delivered": 20})
            session.commit()
            await pump
        assert adapter.deliveries[-1].id == late

    asyncio.run(main())

    assert len(adapter.deliveries) == 21


# --- clocks


def set_clock_apart(database: Database, by: timedelta) -> None:
    """From now on the database's clock is so far from everybody else's."""
    shifted = f"SELECT pg_catalog.clock_timestamp() + interval '{by.days} days'"
    with database.engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA apart")
        for name in ("clock_timestamp", "now", "statement_timestamp"):
            connection.exec_driver_sql(
                f"CREATE FUNCTION apart.{name}() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$ {shifted} $$"
            )
        connection.exec_driver_sql(
            f"ALTER DATABASE {database.url.database} SET search_path = apart, pg_catalog, public"
        )
    database.dispose()  # each connection from now on has it


@pytest.mark.parametrize("by", [YEAR, -YEAR], ids=["a year ahead", "a year slow"])
def test_with_the_databases_clock_a_year_away_all_times_are_right(
    postgresql: Database, ob: outbox.Outbox, by: timedelta
) -> None:
    answers: dict[str, Outcome] = {
        "order:0": Delivered(),
        "order:1": Deferred("busy", after=HOUR),
        "order:2": Unknown("no answer", after=HOUR),
    }
    adapter = MemoryAdapter(lambda delivery: answers.pop(parent_of[delivery.id], Delivered()), window=24 * HOUR)
    everybody = {"adapters": {"crm": adapter}}
    set_clock_apart(postgresql, by)
    ids = put(postgresql, ob, count=3)
    parent_of = {id: f"order:{number}" for number, id in enumerate(ids)}

    # What is busy waits an hour of the database's, and so does what is in doubt.
    assert run_once(postgresql, ob, **everybody) == 3
    distance = postgresql.entries[0].created_at - datetime.now(UTC)
    assert abs(distance - by) < HOUR
    assert run_once(postgresql, ob, **everybody) == 0
    age(postgresql, HOUR)
    assert run_once(postgresql, ob, **everybody) == 2
    assert states(postgresql) == {"delivered": 3}

    # A lease holds while it should, and no longer; the doubt that it leaves ends with the service's memory.
    forgotten = put_one(postgresql, ob)
    claim_one(DatabaseStore(postgresql.engine, ob.configuration))
    assert run_once(postgresql, ob, **everybody) == 0
    age(postgresql, 25 * HOUR)
    assert run_once(postgresql, ob, **everybody) == 1
    assert state(postgresql, forgotten) == "uncertain"

    assert Counter(delivery.id for delivery in adapter.deliveries) == dict(zip(ids, (1, 2, 2), strict=True))
