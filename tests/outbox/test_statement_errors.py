"""What the hiding of values leaves alone: errors that only came while a statement of ours ran, and the app's own statements."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import dialect as postgresql_dialect
from sqlalchemy.dialects.sqlite import dialect as sqlite_dialect
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support.database import Database

import outbox
from outbox import configuration
from outbox.sessions.session import flush_all
from outbox.sql.errors import statement as statement_errors
from outbox.sql.schema.functions import function_name
from outbox.sql.schema.identifiers import quoted_table


class TimeLimit(Exception):
    """As a worker's signal handler raises it: `SoftTimeLimitExceeded(30)`."""


@contextmanager
def raising(error: BaseException) -> Iterator[None]:
    def handle(*_: Any) -> None:
        raise error

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def locked(database: Database) -> Iterator[sa.Connection]:
    """Whatever touches our tables waits."""
    with database.engine.begin() as connection:
        connection.exec_driver_sql("LOCK TABLE outbox_entry, outbox_queue, outbox_record, outbox_settlement")
        yield connection


def until_it_waits(database: Database, is_over: Callable[[], bool] = lambda: False) -> None:
    """Return once a session of this database waits for a lock, or all is over."""
    waits = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while not is_over() and not connection.scalar(waits):
            connection.exec_driver_sql("SELECT pg_sleep(0.01)")


def claim(session: Session, ob: outbox.Outbox) -> None:
    with ob.idempotent(session, "retry-1", scope="ada", content=b"{}"):
        pass


def enqueue(session: Session, ob: outbox.Outbox) -> None:
    ob.enqueue(session, "crm.upsert", {}, parent="order:1")
    flush_all(session)


USES: dict[str, Callable[[Session, outbox.Outbox], Any]] = {
    "enqueue": enqueue,
    "idempotent": claim,
    "status": lambda session, ob: ob.status(session, "order:1"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_time_limits_signal_comes_out_as_it_was_raised(
    postgresql: Database, ob: outbox.Outbox, use: Callable[[Session, outbox.Outbox], Any]
) -> None:
    error, over = TimeLimit(30), threading.Event()

    def interrupt() -> None:
        until_it_waits(postgresql, over.is_set)
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)

    interrupter = threading.Thread(target=interrupt)
    with raising(error), locked(postgresql), Session(postgresql.engine) as session:
        interrupter.start()
        try:
            with pytest.raises(TimeLimit) as caught:
                use(session, ob)
        finally:
            over.set()
            interrupter.join()
            session.invalidate()  # psycopg's connection waits for its answer still

    assert caught.value is error
    assert error.args == (30,)


@pytest.fixture(params=["psycopg_async", "asyncpg"])
def url(request: pytest.FixtureRequest, postgresql: Database) -> sa.URL:
    return postgresql.url.set(drivername=f"postgresql+{request.param}")


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_cancellation_keeps_its_message(
    postgresql: Database, ob: outbox.Outbox, url: sa.URL, use: Callable[[Session, outbox.Outbox], Any]
) -> None:
    async def main() -> None:
        async with AsyncSession(create_async_engine(url, poolclass=sa.NullPool)) as session:
            task = asyncio.create_task(session.run_sync(use, ob))
            await asyncio.to_thread(until_it_waits, postgresql)
            task.cancel("the client is gone")
            with pytest.raises(asyncio.CancelledError) as caught:
                await task
        assert caught.value.args == ("the client is gone",)

    with locked(postgresql):
        asyncio.run(main())


def test_a_statement_outside_of_a_greenlet_says_so(ob: outbox.Outbox, url: sa.URL) -> None:
    """A lazy load in an async app writes the pending entries, too: the error is the one that everybody knows."""

    async def main() -> None:
        async with AsyncSession(create_async_engine(url, poolclass=sa.NullPool)) as session:
            await session.connection()
            ob.enqueue(session, "crm.upsert", {}, parent="order:1")
            with pytest.raises(sa.exc.MissingGreenlet, match="greenlet_spawn has not been called"):
                flush_all(session.sync_session)

    asyncio.run(main())


ASYNCPG: dict[str, str] = {
    "closed": "connection is closed",
    "busy": "another operation is in progress",
    "other loop": "attached to a different loop",
}


@pytest.mark.parametrize("misuse", ASYNCPG)
def test_what_asyncpg_says_of_its_connection_is_read(postgresql: Database, ob: outbox.Outbox, misuse: str) -> None:
    engine = create_async_engine(postgresql.url.set(drivername="postgresql+asyncpg"), poolclass=sa.NullPool)
    session = AsyncSession(engine)

    async def use_wrongly() -> None:
        driver: Any = (await (await session.connection()).get_raw_connection()).driver_connection
        other = asyncio.create_task(driver.execute("SELECT pg_sleep(60)")) if misuse == "busy" else None
        await (driver.close() if misuse == "closed" else asyncio.sleep(0))  # the other has begun
        try:
            await session.run_sync(lambda inner: ob.status(inner, "order:1"))
        finally:
            if other is not None:
                other.cancel()
                await asyncio.wait([other])

    async def connect() -> None:
        await session.connection()

    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(connect())
        with pytest.raises(Exception, match=ASYNCPG[misuse]):
            (second if misuse == "other loop" else first).run(use_wrongly())
        first.run(session.invalidate())


@pytest.mark.parametrize(("schema", "prefix"), [("büro", ""), (None, ""), (None, "shop_"), ("Büro 1", "a b_")])
def test_the_apps_statements_keep_what_their_errors_say(
    postgresql: Database, monkeypatch: pytest.MonkeyPatch, schema: str | None, prefix: str
) -> None:
    """Columns named as our tables are, tables that begin alike, and tables of our names in another schema."""
    monkeypatch.setattr(statement_errors, "_ours", {})
    monkeypatch.setattr(configuration, "tables_of", configuration.tables_of.__wrapped__)  # they are defined once
    ob = outbox.Outbox(outbox.Keyring.public(), env="test", schema=schema, prefix=prefix)
    assert statement_errors.is_ours(f"SELECT FROM {quoted_table(ob.configuration.tables.entry)}")
    postgresql.execute(sa.text("CREATE SCHEMA app"))
    for number, name in enumerate(
        [f'"{prefix}orders"', f'"{prefix}events"', f'app."{prefix}event"', f'app."{prefix}meta"']
    ):
        columns = "id int, event text, meta text, position int, email text"
        postgresql.execute(sa.text(f"CREATE TABLE {name} ({columns}, CONSTRAINT unique_{number} UNIQUE (email))"))
        inserting = f"INSERT INTO {name} (id, meta, position, event, email) VALUES (1, 'm', 2, 'e', :email)"
        selecting = f"SELECT event, meta AS record FROM {name} AS shop WHERE email = :email AND position / (id - 1) > 0"
        insert, select = (sa.text(sql).bindparams(email="ada@shop.example") for sql in (inserting, selecting))
        postgresql.execute(insert)

        with pytest.raises(sa.exc.IntegrityError, match="DETAIL") as taken:
            postgresql.execute(insert)
        with pytest.raises(sa.exc.DataError) as divided:
            postgresql.execute(select)

        orig: Any = taken.value.orig
        assert orig.diag.constraint_name == f"unique_{number}"
        assert taken.value.params == divided.value.params == {"email": "ada@shop.example"}


@pytest.mark.parametrize(
    ("schema", "prefix"), [("büro", ""), (None, ""), (None, "shop_"), ("Büro 1", "a b_"), (None, 'a"b')]
)
def test_our_statements_are_known_under_every_name(
    monkeypatch: pytest.MonkeyPatch, schema: str | None, prefix: str
) -> None:
    """By every table, as SQLAlchemy writes it, and as our own SQL does."""
    monkeypatch.setattr(statement_errors, "_ours", {})
    tables = outbox.define_tables(sa.MetaData(), schema=schema, prefix=prefix)
    statements: list[Any] = [sa.text(f"SELECT {function_name('claim_key', schema, prefix)}(:id, 1)")]
    for table in tables.metadata.sorted_tables:
        column, aliased = next(iter(table.columns)), table.alias("q")
        statements += [
            *(sa.select(column), sa.select(aliased), sa.select(sa.exists(sa.select(aliased)))),
            *(sa.update(table).values({column: None}), sa.delete(table), sa.insert(table)),
            sa.select(sa.func.unnest(sa.literal([1])).table_valued(), column),
            sa.text(f"SELECT 1 FROM {quoted_table(table)} AS q"),
            sa.text(f"INSERT INTO {quoted_table(table)} VALUES (1)"),
        ]

    missed = [
        sql
        for dialect in (postgresql_dialect(), sqlite_dialect())
        for sql in (str(statement.compile(dialect=dialect)) for statement in statements)
        if not statement_errors.is_ours(sql)
    ]

    assert missed == []
    assert len(statements) == 1 + 9 * 17
