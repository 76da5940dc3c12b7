"""What goes to the driver's cursor directly behaves as any statement of SQLAlchemy's: listeners, errors, broken connections."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support.database import Client, Database, statements_of
from support.entries import run_once
from support.relays import relay

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.store.database import DatabaseStore
from outbox.sql.postgresql import fast_execute

pytestmark = pytest.mark.as_app

ONE_CONNECTION: dict[str, Any] = {"pool_size": 1, "max_overflow": 0}
PLAIN_CORE: dict[str, Any] = {"execution_options": {"outbox_plain_core": True}}
BOTH_WAYS = pytest.mark.parametrize("way", [{}, PLAIN_CORE], ids=["short way", "plain core"])


def enqueue(
    engine: sa.Engine, ob: outbox.Outbox, parent: str = "order:1", *, lines: int = 1, operation: str = "crm.upsert"
) -> None:
    with Session(engine) as session, session.begin():
        for line in range(lines):
            ob.enqueue(session, operation, {}, parent=parent, discriminator=str(line))


@pytest.fixture
def refusing(postgresql: Database) -> Iterator[Database]:
    """A database that refuses every entry."""
    postgresql.execute(sa.text("ALTER TABLE outbox_entry ADD CONSTRAINT refusing CHECK (operation = '')"))
    yield postgresql
    postgresql.execute(sa.text("ALTER TABLE outbox_entry DROP CONSTRAINT refusing"))


def test_a_listener_sees_every_statement(postgresql: Database, ob: outbox.Outbox) -> None:
    with statements_of(postgresql.engine) as statements:
        enqueue(postgresql.engine, ob)

    assert len(statements) == 1
    assert "INSERT INTO outbox_entry" in statements[0]


def test_echo_logs_every_statement(postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture) -> None:
    engine = sa.create_engine(postgresql.url, echo=True)

    with caplog.at_level(logging.INFO, "sqlalchemy.engine"):
        enqueue(engine, ob)

    engine.dispose()
    assert "INSERT INTO outbox_entry" in caplog.text


def in_one_trip(connection: sa.Connection) -> tuple[list[Any], str]:
    """The rows of a statement, and the setting that it was executed under."""
    before = sa.text("SELECT set_config('lock_timeout', '7s', true)")
    statement = sa.text("SELECT CAST(:n AS integer), current_setting('lock_timeout')")
    (row,) = fast_execute.execute(connection, statement, {"n": 3}, before=before).rows
    return list(row), connection.scalar(sa.text("SHOW lock_timeout")) or ""


@BOTH_WAYS
@pytest.mark.parametrize("is_listened_to", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_statement_that_goes_before_another_holds_for_it(
    postgresql: Database, way: dict[str, Any], is_async: bool, is_listened_to: bool
) -> None:
    async def found_async() -> tuple[list[Any], str]:
        async_engine = postgresql.async_engine(**way)
        async with async_engine.begin() as connection:
            return await connection.run_sync(in_one_trip)

    engine = postgresql.new_engine(**way)
    if is_listened_to:
        sa.event.listen(sa.Engine, "before_cursor_execute", unheeded)
    try:
        if is_async:
            found = asyncio.run(found_async())
        else:
            with engine.begin() as connection:
                found = in_one_trip(connection)
    finally:
        if is_listened_to:
            sa.event.remove(sa.Engine, "before_cursor_execute", unheeded)

    assert found == ([3, "7s"], "7s")


def unheeded(*arguments: Any) -> None:
    pass


@pytest.mark.parametrize("broken", ["before", "after"])
def test_an_error_of_either_statement_leaves_a_usable_connection(postgresql: Database, broken: str) -> None:
    before, statement = sa.text("SELECT 1"), sa.text("SELECT 1 / CAST(:n AS integer)")
    if broken == "before":
        before, statement = sa.text("SELECT 1 / 0"), sa.text("SELECT CAST(:n AS integer)")

    with postgresql.new_engine().connect() as connection:
        with pytest.raises(sa.exc.DataError, match="DivisionByZero"):
            fast_execute.execute(connection, statement, {"n": 0}, before=before)
        connection.rollback()
        assert connection.scalar(sa.text("SELECT 1")) == 1


def test_a_statement_and_the_one_before_it_take_one_round_trip(postgresql: Database) -> None:
    with relay(postgresql.url) as (between, url):
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            in_one_trip(connection)  # which begins the transaction, and asks for more
            trips = between.round_trips
            before, statement = sa.text("SELECT 1"), sa.text("SELECT CAST(:n AS integer)")
            fast_execute.execute(connection, statement, {"n": 1}, before=before)
            assert between.round_trips - trips == 1
        engine.dispose()


def binary_cursors(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each cursor of psycopg that is made from now on is binary, as those of the short way are."""
    made: list[bool] = []
    make = psycopg.Connection.cursor

    def cursor(connection: Any, *arguments: Any, binary: bool = False, **settings: Any) -> Any:
        made.append(binary)
        return make(connection, *arguments, binary=binary, **settings)

    monkeypatch.setattr(psycopg.Connection, "cursor", cursor)
    return made


@BOTH_WAYS
@pytest.mark.owner
def test_an_engine_chooses_between_the_short_way_and_plain_core(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]
) -> None:
    """What is claimed, replayed, enqueued, sent and settled is the same."""
    made = binary_cursors(monkeypatch)
    engine = postgresql.new_engine(**way)
    answers = []
    for _ in range(2):
        with (
            Session(engine) as session,
            session.begin(),
            ob.idempotent(session, "invoice:42", scope="a", content={"b": 1}) as claim,
        ):
            answers.append(claim.replayed)
            if not claim.replayed:
                for line in range(3):
                    ob.enqueue(session, "crm.upsert", {"line": line}, discriminator=str(line), options={"account": "a"})
                claim.respond(201, {"order": 1})
    service = MemoryAdapter()
    settled = run_once(engine, ob, adapters={"crm": service})

    assert answers == [False, True]
    assert settled == 3
    assert sorted((delivery.payload["line"], delivery.options["account"]) for delivery in service.deliveries) == [
        (0, "a"),
        (1, "a"),
        (2, "a"),
    ]
    assert any(made) == (way == {})


def test_a_sqlalchemy_without_the_private_method_gets_plain_core(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = binary_cursors(monkeypatch)
    monkeypatch.setattr(fast_execute, "_CONVERTS_ERRORS", False)

    enqueue(postgresql.new_engine(**ONE_CONNECTION), ob)

    assert len(postgresql.entries) == 1
    assert made
    assert not any(made)


def test_what_is_read_is_the_same_with_and_without_a_listener(postgresql: Database, ob: outbox.Outbox) -> None:
    client = Client(postgresql, ob, is_async=False)
    first = client.request()

    unheard = client.request()
    with statements_of(postgresql.engine) as statements:
        heard = client.request()

    assert first == unheard == heard
    assert len(statements) == 1  # a replay: one statement asks all that is needed


@pytest.mark.parametrize(
    ("prepares", "made_in_all"), [({}, 1), ({"prepare_threshold": None}, 3)], ids=["prepares", "never"]
)
def test_a_connection_that_prepares_keeps_its_cursor_for_the_next_ones(
    postgresql: Database,
    ob: outbox.Outbox,
    monkeypatch: pytest.MonkeyPatch,
    prepares: dict[str, Any],
    made_in_all: int,
) -> None:
    """Another would keep the values of its last statement, too."""
    engine = postgresql.new_engine(**ONE_CONNECTION, connect_args=prepares)
    made = binary_cursors(monkeypatch)
    for number in range(3):
        enqueue(engine, ob, parent=f"order:{number}")

    assert made.count(True) == made_in_all


def test_a_new_dispatcher_leaves_what_its_connection_has_prepared(postgresql: Database, ob: outbox.Outbox) -> None:
    """psycopg prepares what it has executed five times, and forgets it all at a ROLLBACK."""
    engine = postgresql.new_engine(**ONE_CONNECTION)
    for number in range(6):
        enqueue(engine, ob, parent=f"order:{number}")

    asyncio.run(DatabaseStore(engine, ob.configuration).accepted(None))

    with engine.connect() as connection:
        prepared = connection.exec_driver_sql("SELECT statement FROM pg_prepared_statements").scalars().all()
    assert any("INSERT INTO outbox_entry" in statement for statement in prepared)


@BOTH_WAYS
def test_a_connection_that_has_written_one_entry_writes_many(
    postgresql: Database, ob: outbox.Outbox, way: dict[str, Any]
) -> None:
    """The types of arrays are taught to a connection when it first needs them."""
    engine = postgresql.new_engine(**ONE_CONNECTION, **way)

    for number, lines in enumerate((1, 3, 1)):
        enqueue(engine, ob, parent=f"order:{number}", lines=lines)

    assert len(postgresql.entries) == 5


@BOTH_WAYS
def test_a_connection_on_which_a_statement_failed_serves_the_next(
    postgresql: Database, ob: outbox.Outbox, way: dict[str, Any]
) -> None:
    engine = postgresql.new_engine(**ONE_CONNECTION, **way)
    postgresql.execute(sa.text("ALTER TABLE outbox_entry ADD CONSTRAINT picky CHECK (operation <> 'crm.refused')"))
    try:
        for number in range(3):
            enqueue(engine, ob, parent=f"order:{number}")
            with pytest.raises(sa.exc.IntegrityError, match="picky"):
                enqueue(engine, ob, parent=f"order:{number}", operation="crm.refused")
    finally:
        postgresql.execute(sa.text("ALTER TABLE outbox_entry DROP CONSTRAINT picky"))

    assert len(postgresql.entries) == 3


@pytest.mark.parametrize("listens", [False, True], ids=["unheard", "heard"])
@pytest.mark.owner
def test_a_driver_that_writes_values_into_the_statement_is_served_too(
    postgresql: Database, ob: outbox.Outbox, listens: bool
) -> None:
    """As some apps set it for PgBouncer: `connect_args={"cursor_factory": psycopg.ClientCursor}`."""
    engine = sa.create_engine(postgresql.url, connect_args={"cursor_factory": psycopg.ClientCursor})
    listening = statements_of(engine) if listens else nullcontext()

    with listening, Session(engine) as session, session.begin():
        for line in ("1", "2"):
            ob.enqueue(session, "crm.upsert", {"line": line}, parent="order:1", discriminator=line)
    settled = run_once(engine, ob, adapters={"crm": MemoryAdapter()})

    engine.dispose()
    assert settled == 2


def test_an_async_driver_that_writes_values_into_statements_is_served_too(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    async def main() -> None:
        engine = create_async_engine(postgresql.url, connect_args={"cursor_factory": psycopg.AsyncClientCursor})
        async with AsyncSession(engine) as session, session.begin():
            for line in ("1", "2"):
                ob.enqueue(session, "crm.upsert", {"line": line}, parent="order:1", discriminator=line)
        await engine.dispose()

    asyncio.run(main())

    assert sorted(row.discriminator for row in postgresql.entries) == ["1", "2"]


@BOTH_WAYS
def test_an_error_of_the_database_is_one_of_sqlalchemys(
    refusing: Database, ob: outbox.Outbox, way: dict[str, Any]
) -> None:
    with pytest.raises(sa.exc.IntegrityError, match="refusing") as caught:
        enqueue(refusing.new_engine(**way), ob)

    assert not caught.value.connection_invalidated
    assert caught.value.statement is not None
    assert refusing.entries == []


@BOTH_WAYS
def test_a_connection_that_broke_is_thrown_away(postgresql: Database, ob: outbox.Outbox, way: dict[str, Any]) -> None:
    engine = postgresql.new_engine(**ONE_CONNECTION, **way)

    with Session(engine) as session:
        pid = session.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()
        postgresql.execute(sa.text(f"SELECT pg_terminate_backend({pid}, 10000)"))
        ob.enqueue(session, "crm.upsert", {}, parent="order:1")
        with pytest.raises(sa.exc.OperationalError) as caught:
            session.commit()

    assert caught.value.connection_invalidated
    enqueue(engine, ob, parent="order:2")
    assert [row.parent for row in postgresql.entries] == ["order:2"]


@BOTH_WAYS
def test_an_apps_own_error_handler_is_asked(refusing: Database, ob: outbox.Outbox, way: dict[str, Any]) -> None:
    engine = sa.create_engine(refusing.url, **way)
    seen: list[str] = []

    @sa.event.listens_for(engine, "handle_error")
    def handle(context: Any) -> None:
        seen.append(type(context.sqlalchemy_exception).__name__)

    with pytest.raises(sa.exc.IntegrityError):
        enqueue(engine, ob)

    engine.dispose()
    assert seen == ["IntegrityError"]


@BOTH_WAYS
@pytest.mark.owner
def test_a_cancelled_statement_leaves_no_connection_half_read(
    postgresql: Database, ob: outbox.Outbox, way: dict[str, Any]
) -> None:
    """As SQLAlchemy's own do: a task that is cancelled while the database is asked gives the connection up."""

    async def main() -> None:
        engine = create_async_engine(postgresql.url, **ONE_CONNECTION, **way)
        with Session(postgresql.engine) as holder:
            holder.execute(sa.text("LOCK TABLE outbox_entry"))

            async def write() -> None:
                async with AsyncSession(engine) as session, session.begin():
                    ob.enqueue(session, "crm.upsert", {}, parent="order:1")

            task = asyncio.ensure_future(write())
            waits = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            while not holder.execute(waits).scalar_one():  # noqa: ASYNC110  # the database alone knows
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with AsyncSession(engine) as session, session.begin():
            ob.enqueue(session, "crm.upsert", {}, parent="order:2")
        await engine.dispose()

    asyncio.run(main())

    assert [row.parent for row in postgresql.entries] == ["order:2"]


def test_a_new_connection_defines_no_classes_for_the_driver(postgresql: Database, ob: outbox.Outbox) -> None:
    """psycopg keeps the classes of all connections for the life of the process."""
    engine = sa.create_engine(postgresql.url, poolclass=sa.NullPool)
    enqueue(engine, ob, "order:0", lines=2)
    before = all_dumpers()

    for number in range(1, 4):
        enqueue(engine, ob, f"order:{number}", lines=2)

    assert all_dumpers() == before


def all_dumpers(kind: type = psycopg.adapt.Dumper) -> int:
    return 1 + sum(all_dumpers(each) for each in kind.__subclasses__())
