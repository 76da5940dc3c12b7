"""No payload, answer or tag in any error or log that a statement of ours causes, whatever the engine's `hide_parameters`."""

import asyncio
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support.canaries import CANARY, leaks, shown
from support.database import TABLES, Database, Order
from support.entries import put_one, run_once

import outbox
from dispatchers import Delivered
from dispatchers.adapters import MemoryAdapter
from outbox.sessions.session import flush_all
from outbox.sql.errors.statement import HIDDEN

DRIVERS = ["psycopg", "psycopg_async", "asyncpg"]

Failure = Callable[[Database, str], Any]
"""Makes every write to a table fail, for a block; yields what the session has to say first."""


def by_trigger(body: str, first: str = "SELECT 1") -> Failure:
    @contextmanager
    def failing(database: Database, table: str) -> Iterator[str]:
        function = f"CREATE FUNCTION failing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body}; RETURN NEW; END $$"
        database.execute(sa.text(function))
        on = f"BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION failing()"
        database.execute(sa.text(f"CREATE TRIGGER failing {on}"))
        yield first
        database.execute(sa.text("DROP FUNCTION failing CASCADE"))

    return failing


def by_ddl(done: str, undone: str) -> Failure:
    @contextmanager
    def failing(database: Database, table: str) -> Iterator[str]:
        database.execute(sa.text(f"ALTER TABLE {table} {done}"))
        yield "SELECT 1"
        database.execute(sa.text(f"ALTER TABLE {table} {undone}"))

    return failing


@contextmanager
def locked(database: Database, table: str) -> Iterator[str]:
    with database.engine.begin() as connection:
        connection.exec_driver_sql(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        yield "SET LOCAL lock_timeout = '20ms'"


@contextmanager
def forbidden(database: Database, table: str) -> Iterator[str]:
    role = f"nobody_{uuid4().hex[:8]}"
    database.execute(sa.text(f"CREATE ROLE {role}"))
    try:
        yield f"SET LOCAL ROLE {role}"
    finally:
        database.execute(sa.text(f"DROP ROLE {role}"))


FAILURES: dict[str, Failure] = {
    "check": by_ddl("ADD CONSTRAINT failing CHECK (created_at IS NULL)", "DROP CONSTRAINT failing"),
    "not null": by_ddl("ADD COLUMN failing int NOT NULL", "DROP COLUMN failing"),
    "statement_timeout": by_trigger("PERFORM pg_sleep(60)", "SET LOCAL statement_timeout = '500ms'"),
    "lock_timeout": locked,
    "permission": forbidden,
    "read only": by_trigger("PERFORM 1", "SET TRANSACTION READ ONLY"),
    "disk full": by_trigger("RAISE 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'"),
    "raised with the row": by_trigger("RAISE 'refused: %', NEW USING HINT = NEW::text, DETAIL = NEW::text"),
    "unreadable value": by_trigger("PERFORM NEW::text::int"),
    "lost connection": by_trigger("PERFORM pg_terminate_backend(pg_backend_pid()), pg_sleep(60)"),
}


def failed(database: Database, driver: str, work: Callable[[Session], Any]) -> Exception:
    """What comes out of `work` in a transaction, over this driver. The engine hides nothing."""
    url = database.url if driver == "sqlite" else database.url.set(drivername=f"postgresql+{driver}")

    async def main() -> None:
        engine = create_async_engine(url, poolclass=sa.NullPool)
        async with AsyncSession(engine) as session, session.begin():
            await session.run_sync(work)

    def run() -> None:
        with Session(database.new_engine()) as session, session.begin():
            work(session)

    with pytest.raises(sa.exc.DBAPIError) as caught:
        run() if driver in ("psycopg", "sqlite") else asyncio.run(main())
    return caught.value


@pytest.mark.parametrize("driver", DRIVERS)
def test_no_error_of_an_enqueue_shows_a_payload(
    postgresql: Database, ob: outbox.Outbox, driver: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "psycopg")
    tags: list[bytes] = []

    def work(session: Session) -> None:
        session.connection().exec_driver_sql(first)
        entries = [ob.enqueue(session, "crm.upsert", CANARY, parent="order:1", discriminator=line) for line in "12"]
        tags.extend(entry._tag for entry in entries)  # more than one: their values go as arrays

    for name, failing in FAILURES.items():
        with failing(postgresql, "outbox_entry") as first:
            error = failed(postgresql, driver, work)

        assert (name, leaks(shown(error) + caplog.text, CANARY, *tags)) == (name, [])
        assert "INSERT INTO outbox_entry" in str(error)


@pytest.mark.parametrize("driver", DRIVERS)
def test_no_error_of_a_claim_shows_the_answer(postgresql: Database, ob: outbox.Outbox, driver: str) -> None:
    def work(session: Session) -> None:
        session.connection().exec_driver_sql(first)
        with ob.idempotent(session, "retry-1", scope="ada", content=b"{}") as claim:
            claim.respond(200, CANARY, headers={"Location": CANARY})

    for name, failing in FAILURES.items():
        if name in ("permission", "read only", "lock_timeout"):  # those refuse the claim before there is an answer
            continue
        with failing(postgresql, "outbox_record") as first:
            error = failed(postgresql, driver, work)

        assert (name, leaks(shown(error), CANARY)) == (name, [])


@pytest.mark.parametrize("driver", DRIVERS)
def test_no_unique_violation_shows_its_key(postgresql: Database, ob: outbox.Outbox, driver: str) -> None:
    postgresql.execute(sa.text("CREATE UNIQUE INDEX failing ON outbox_entry (encode(payload, 'escape'))"))

    def work(session: Session) -> None:
        for line in "12":
            ob.enqueue(session, "crm.upsert", CANARY, parent="order:1", discriminator=line)

    error = failed(postgresql, driver, work)

    assert leaks(shown(error), CANARY) == []
    assert "failing" in str(error)  # what was violated is reported


@pytest.mark.parametrize("driver", [*DRIVERS, "sqlite"])
def test_no_value_that_cannot_be_stored_is_shown(request: pytest.FixtureRequest, driver: str) -> None:
    database: Database = request.getfixturevalue("sqlite" if driver == "sqlite" else "postgresql")
    event = TABLES.event
    text = [CANARY] if driver == "sqlite" else CANARY + "\0"  # a driver's own refusal, before anything is sent

    error = failed(
        database,
        driver,
        lambda session: session.execute(
            sa.insert(event).values(entry_id=uuid4(), kind="k", at=sa.func.now(), reason=sa.literal(text, sa.Text))
        ),
    )

    assert leaks(shown(error), CANARY) == []


@pytest.mark.parametrize("table", ["outbox_entry", "outbox_queue"])
def test_no_error_under_sqlite_shows_a_payload(sqlite: Database, ob: outbox.Outbox, table: str) -> None:
    sqlite.execute(
        sa.text(f"CREATE TRIGGER failing BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'refused here'); END")
    )

    error = failed(sqlite, "sqlite", lambda session: ob.enqueue(session, "crm.upsert", CANARY, parent="order:1"))

    assert leaks(shown(error), CANARY) == []
    assert "refused here" in str(error)


def test_no_error_of_a_settlement_shows_the_result(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    adapters = {"crm": MemoryAdapter(lambda delivery: Delivered({"id": CANARY}), timeout=timedelta(seconds=1))}
    short: dict[str, Any] = {"lease": timedelta(seconds=8), "margin": timedelta(seconds=1)}
    unsettled = by_ddl("ADD CONSTRAINT failing CHECK (settled_at IS NULL)", "DROP CONSTRAINT failing")
    engine = postgresql.new_engine(connect_args={"options": "-c statement_timeout=500ms"})

    for name, failing in (FAILURES | {"check": unsettled}).items():
        if name in ("permission", "read only", "lock_timeout"):  # of a session, which is the dispatcher's own here
            continue
        put_one(postgresql, ob)
        text = ""
        with failing(postgresql, "outbox_settlement"):
            try:
                run_once(engine, ob, adapters=adapters, **short)
            except sa.exc.DBAPIError as error:  # what is one row's fault is put on record instead
                text = shown(error)

        assert postgresql.rows(TABLES.settlement) == []
        reasons = [row.reason for row in postgresql.rows(TABLES.event)]
        assert (name, leaks(f"{text}{caplog.text}{reasons}", CANARY)) == (name, [])
        postgresql.execute(sa.delete(TABLES.queue))
        postgresql.execute(sa.delete(TABLES.event))
        postgresql.execute(sa.delete(TABLES.entry))


def test_a_statement_of_the_apps_own_is_shown_as_its_engine_says(postgresql: Database) -> None:
    """Nothing else than ours is touched: an app that must hide its values sets `hide_parameters=True`."""
    order = {"id": 1, "customer": CANARY, "amount": 13}

    def work(session: Session) -> None:
        session.execute(sa.insert(Order), [order, order])

    error = failed(postgresql, "psycopg", work)

    assert CANARY in str(error)
    assert "Key (id)=(1) already exists" in str(error)
    assert "DETAIL" in shown(error)


def test_the_apps_error_that_is_being_handled_stays_as_it_was(postgresql: Database, ob: outbox.Outbox) -> None:
    """The driver's error of ours has it as its context, and it is not ours."""
    postgresql.execute(sa.text("ALTER TABLE outbox_entry ADD CONSTRAINT failing CHECK (operation = '')"))
    order = {"id": 1, "customer": "ada", "amount": 13}

    def work(session: Session) -> None:
        try:
            with session.begin_nested():
                session.execute(sa.insert(Order), [order, order])
        except sa.exc.IntegrityError:
            ob.enqueue(session, "crm.upsert", CANARY, parent="order:1")
            flush_all(session)

    error = failed(postgresql, "psycopg", work)

    assert "outbox_entry" in str(error)
    assert "Key (id)=(1) already exists" in shown(error)
    assert leaks(shown(error), CANARY) == []


def test_an_error_keeps_its_class_its_code_and_its_pickle(postgresql: Database, ob: outbox.Outbox) -> None:
    with FAILURES["raised with the row"](postgresql, "outbox_entry"):
        error = failed(
            postgresql, "psycopg", lambda session: ob.enqueue(session, "crm.upsert", CANARY, parent="order:1")
        )

    copy = pickle.loads(pickle.dumps(error))
    for each in (error, copy):
        assert isinstance(each, sa.exc.ProgrammingError)
        assert each.orig.sqlstate == "P0001"  # type: ignore[union-attr]
        assert HIDDEN in str(each)


@pytest.mark.parametrize("prefix", ["", "a b_"])
def test_the_tables_may_have_any_name(postgresql: Database, prefix: str) -> None:
    ob = outbox.Outbox(outbox.Keyring.public(), env="test", prefix=prefix, schema="büro")
    postgresql.execute(sa.text('CREATE SCHEMA "büro"'))
    ob.configuration.tables.metadata.create_all(postgresql.engine)
    quoted = postgresql.engine.dialect.identifier_preparer.format_table(ob.configuration.tables.entry)
    with postgresql.engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE {quoted} ADD CONSTRAINT failing CHECK (operation = '')")

    error = failed(postgresql, "psycopg", lambda session: ob.enqueue(session, "crm.upsert", CANARY, parent="o:1"))

    assert leaks(shown(error), CANARY) == []
