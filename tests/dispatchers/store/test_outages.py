"""What the log says of a database that is unavailable: one line with the cause, then seldom one, and one when it is back."""

import asyncio
import logging
import time
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from support.concurrency import CONFLICT
from support.database import Database
from support.entries import dispatcher, pumping, put, until_true
from support.relays import relay

import outbox
from dispatchers import Delivered, Delivery
from dispatchers.adapters import MemoryAdapter
from dispatchers.store import database as store_database
from dispatchers.store.connections.outage_log import OutageLog, cause_of, ends_by_itself, is_outage
from dispatchers.store.connections.transactions import DEADLOCK_TRIES
from outbox.sql.errors.driver import is_passing

SECRETS = {"username": "absent-user", "password": "hunter2"}

REFUSALS = 4 * DEADLOCK_TRIES  # of four exchanges


async def error_of(url: sa.URL) -> Exception:
    if url.get_dialect().is_async:
        engine = create_async_engine(url)
        try:
            await engine.connect()
        except Exception as error:
            return error
        finally:
            await engine.dispose()
    else:
        try:
            sa.create_engine(url).connect()
        except Exception as error:
            return error
    raise AssertionError("connected")


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize(
    ("where", "cause", "waits"),
    [
        ({"host": "127.0.0.1", "port": 1, **SECRETS}, "the connection is refused", True),
        ({"host": "absent-user.invalid", "port": 5432, **SECRETS}, "the host's name cannot be resolved", True),
        ({"host": "/absent-user", "port": 5432, **SECRETS}, "the server's socket does not exist", True),
        ({"database": "absent-user", "password": "hunter2"}, ("the database does not exist", "the user or"), False),
        (SECRETS, ("the user or the database does not exist", "the server does not admit", "the password is"), False),
    ],
    ids=["refused", "dns", "socket", "database", "user"],
)
def test_the_cause_is_logged_without_names_and_secrets(
    postgresql: Database, driver: str, where: dict[str, Any], cause: Any, waits: bool
) -> None:
    url = postgresql.url.set(drivername=f"postgresql+{driver}")
    if "host" in where:
        url = url.set(query={})
    error = asyncio.run(error_of(url.set(**where)))

    cause_found = cause_of(error)

    assert cause_found.startswith(cause)
    assert not any(secret in cause_found for secret in ("hunter2", "absent-user"))
    assert is_outage(error)
    assert ends_by_itself(error) == waits
    assert is_passing(error) or not waits


@pytest.mark.parametrize(
    ("query", "cause"),
    [
        ({"sslmod": "require"}, "a parameter of the URL does not exist"),
        ({"options": "-cabsent=1"}, "a parameter of the URL does not exist"),
        ({"sslmode": "requird"}, "a value in the URL is invalid"),
        ({"connect_timeout": "abc"}, "a value in the URL is invalid"),
        ({"options": "-cwork_mem=x"}, "a value in the URL is invalid"),
    ],
)
def test_a_misspelt_url_is_named_and_not_waited_for(postgresql: Database, query: dict[str, str], cause: str) -> None:
    error = asyncio.run(error_of(postgresql.url.update_query_dict(query)))

    assert cause_of(error).startswith(cause)
    assert not ends_by_itself(error)


def closed_because(cause: Exception | None, context: Exception | None = None) -> Exception:
    """As asyncpg raises it, wrapped by SQLAlchemy."""
    driver = ConnectionResetError("closed in the middle of operation")
    driver.__context__ = context
    if cause is not None:  # to set None would hide the context
        driver.__cause__ = cause
    return DBAPIError("SELECT 1", {}, driver)


class InternalClientError(Exception):
    """As asyncpg and SQLAlchemy both name theirs."""


class BufferError(Exception):
    pass


def of_server(code: str) -> Exception:
    error = Exception("by absent-user")
    error.sqlstate = code  # type: ignore[attr-defined]
    return error


def internal(text: str) -> Exception:
    driver, adapted = InternalClientError(text), InternalClientError(text)
    driver.__context__ = BufferError("overread of hunter2")
    adapted.__cause__ = driver
    return DBAPIError("SELECT 1", {}, adapted)


@pytest.mark.parametrize(
    ("error", "cause_found"),
    [
        (closed_because(of_server("57P01")), "the server ended the connection, or is shutting down (Exception 57P01)"),
        (closed_because(None, of_server("57P01")), "the connection was closed (ConnectionResetError)"),
        (Exception('FATAL: too many connections for role "app"'), "the server has too many connections (Exception)"),
        (internal("protocol is in the failed state"), "InternalClientError from BufferError"),
        (
            internal("while performing authentication"),
            "the driver cannot understand the server's part of the authentication",
        ),
    ],
)
def test_the_real_cause_is_found_where_the_driver_hides_it(error: Exception, cause_found: str) -> None:
    """What was only being handled when it was raised does not count as its cause, where the error itself says why."""
    assert cause_of(error).startswith(cause_found)


def test_asyncpg_reports_why_the_server_closed_its_connection(postgresql: Database) -> None:
    async def main() -> str:
        engine = create_async_engine(postgresql.url.set(drivername="postgresql+asyncpg"))
        try:
            async with engine.connect() as connection:
                await connection.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))
        except DBAPIError as error:
            return cause_of(error)
        finally:
            await engine.dispose()
        raise AssertionError("still connected")

    cause_found = asyncio.run(main())

    assert cause_found == "the server ended the connection, or is shutting down (AdminShutdownError 57P01)"


def test_asyncpg_reports_why_it_could_not_authenticate(postgresql: Database) -> None:
    """A proxy that answers in a way of its own; the driver's error would be just InternalClientError."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(8)
        writer.write(b"N")  # no TLS
        await reader.read(1000)
        writer.write(b"R" + (22).to_bytes(4) + (10).to_bytes(4) + b"SCRAM-SHA-256\0")  # and no end of the list
        await reader.read(1000)
        writer.close()

    async def main() -> Exception:
        async with await asyncio.start_server(answer, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            where = {"host": "127.0.0.1", "port": port, "query": {}, **SECRETS}
            return await error_of(postgresql.url.set(drivername="postgresql+asyncpg", **where))

    cause_found = cause_of(asyncio.run(main()))

    assert cause_found == "the driver cannot understand the server's part of the authentication (InternalClientError)"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("database ")]


def test_an_outage_is_reported_once_then_seldom_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    clock = iter([*range(0, 400, 5), 400, 1000])
    outages = OutageLog(lambda: next(clock))
    refused = ConnectionRefusedError(111, "Connection refused")

    for _ in range(0, 400, 5):
        outages.failed(refused)
    outages.answered()
    outages.answered()
    outages.failed(refused)

    cause = "the connection is refused (ConnectionRefusedError)"
    first = f"database unavailable: {cause}; this process keeps outcomes in memory and tries again until the database answers"
    assert lines(caplog) == [
        first,
        f"database unavailable for 0:01:00: {cause}; this process tries again",
        f"database unavailable for 0:03:00: {cause}; this process tries again",
        "database available again after 0:06:40",
        first,
    ]


def test_a_dispatcher_reports_an_outage_in_one_line_and_its_end_in_another(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """However many sends come back meanwhile, and however often it asks."""
    tries = 0
    released = asyncio.Event()

    async def answer_late(delivery: Delivery) -> Delivered:
        await released.wait()
        return Delivered()

    async def main() -> None:
        nonlocal tries
        with relay(postgresql.url) as (between, url):
            engine = sa.create_engine(url, poolclass=sa.NullPool)

            @sa.event.listens_for(engine, "do_connect")
            def count(*_: Any) -> None:
                nonlocal tries
                tries += 1

            service = MemoryAdapter()
            service.send = answer_late  # type: ignore[method-assign]
            working = dispatcher(engine, ob, adapters={"crm": service})
            stopping = asyncio.Event()
            pump = asyncio.create_task(working.pump(stopping))
            await until_true(lambda: len(working._loops._workers) == 20)
            between.refuse()
            before = tries
            released.set()
            await until_true(lambda: tries > before + 8)
            between.accept()
            await until_true(lambda: not postgresql.queue)
            stopping.set()
            await pump

    put(postgresql, ob, count=20)
    with caplog.at_level(logging.INFO):
        asyncio.run(main())

    first, second = lines(caplog)
    assert first.startswith("database unavailable: the connection was closed (OperationalError); ")
    assert second.startswith("database available again after ")


def test_a_mariadb_that_does_not_answer_is_given_up(
    mariadb: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_database, "MAX_ANSWER_SECONDS", 1)
    store = store_database.DatabaseStore(mariadb.url, ob.configuration)
    patient = store_database.DatabaseStore(mariadb.url.update_query_dict({"read_timeout": "5"}), ob.configuration)

    async def wait() -> DBAPIError:
        await patient.run(lambda connection: connection.execute(sa.text("SELECT SLEEP(1.3)")))
        with pytest.raises(DBAPIError) as caught:
            await store.run(lambda connection: connection.execute(sa.text("SELECT SLEEP(9)")))
        for each in (store, patient):
            await each.close()
        return caught.value

    started = time.monotonic()
    error = asyncio.run(wait())

    assert time.monotonic() - started < 6
    assert (is_outage(error), is_passing(error)) == (True, True)


def test_outcomes_stored_before_a_refused_claim_are_not_reported_as_lost(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    put(postgresql, ob, count=2)
    service = MemoryAdapter()
    settling: set[Any] = set()
    refused: list[str] = []

    def refuse(connection: sa.Connection, cursor: Any, statement: str, values: Any, *rest: Any) -> tuple[str, Any]:
        """The claim in the transaction of a settlement, and some that follow."""
        if "outbox_settlement" in statement and "SKIP LOCKED" not in statement:
            settling.add(connection.get_transaction())
        is_refused = "SKIP LOCKED" in statement and (refused or connection.get_transaction() in settling)
        if not is_refused or len(refused) == REFUSALS:
            return statement, values
        refused.append(statement)
        return CONFLICT, {}

    sa.event.listen(postgresql.dispatchers_engine, "before_cursor_execute", refuse, retval=True)
    with caplog.at_level(logging.INFO):
        working = dispatcher(postgresql, ob, adapters={"crm": service}, concurrency=1)
        asyncio.run(pumping(working, lambda: not postgresql.queue))

    assert len(refused) == REFUSALS
    assert len(service.deliveries) == 2
    logged = [record.getMessage() for record in caplog.records if record.name == "outbox.dispatcher"]
    assert any(line.startswith("transaction conflict") for line in logged)
    assert not [line for line in logged if "lost" in line]
