"""Receives hints (LISTEN) on a connection of its own, outside the engine's pool."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, text

from dispatchers.threads import on_own_thread
from outbox.configuration import Configuration
from outbox.sessions.hints import hearing
from outbox.sql.connections.separate_connections import backend_pid, break_off, separate_async_engine, separate_engine
from outbox.sql.dialect import dialect_of
from outbox.sql.postgresql.hint_messages import NOTIFY, Due, Hint, decode, encode

CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 2.0

Hear = Callable[[Hint], None]
Run = Callable[[Callable[[Connection], Any]], Awaitable[Any]]


class CannotListen(Exception):
    """No notification can arrive on this connection."""


class _Opened(NamedTuple):
    """connection: of SQLAlchemy, sync or async. driver: of the driver. pid: the server process that has answered."""

    connection: Any
    driver: Any
    pid: int


class Listener:
    """Listens for one deployment. run: runs work in a transaction on a connection of the engine's pool."""

    def __init__(self, engine: Engine, *, is_async: bool, configuration: Configuration, run: Run) -> None:
        self._engine = engine
        self._is_async = is_async
        self._configuration = configuration
        self._run = run

    @property
    def can_listen(self) -> bool:
        return dialect_of(self._engine).has_notify

    def heard_here(self, hear: Callable[[Due], None]) -> AbstractContextManager[str]:
        """During the block, commits of this process call `hear`, on any thread. Their hints carry the token that it gives."""
        return hearing(self._engine, self._configuration, hear)

    async def probe(self, token: str) -> None:
        """Send this token to all listeners, this one included, over a connection of the pool."""
        parameters = {"channel": self._configuration.hint_channel, "payload": encode(Hint(probe=token))}

        def send_probe(connection: Connection) -> None:
            connection.execute(NOTIFY, parameters)

        await self._run(send_probe)

    @asynccontextmanager
    async def listening(self, hear: Hear) -> AsyncIterator["asyncio.Future[None]"]:
        """Call `hear` on the event loop for each hint. Yields a future that has an exception when the connection is lost.

        Raises what the database raises, and `CannotListen`.
        """
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(CONNECT_SECONDS):
            opened = await self._open()
        try:
            if backend_pid(opened.driver) != opened.pid:
                raise CannotListen("the connection leads to a pooler such as PgBouncer")
            async with _attached(opened, self._configuration.hint_channel, hear, lost):
                yield lost
        finally:
            if lost.done() and not lost.cancelled():
                lost.exception()  # mark the exception as read: no task awaits it any more
            lost.cancel()
            await self._close(opened)

    async def _open(self) -> _Opened:
        url, pool = self._engine.url, self._engine.pool.recreate()
        if not self._is_async:
            opened: _Opened = await on_own_thread("outbox-listen", _open_blocking, separate_engine(url, pool))
            return opened
        connection = await separate_async_engine(url, pool).connect()
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        driver = (await connection.get_raw_connection()).driver_connection
        return _Opened(connection, driver, (await connection.execute(_PID)).scalar_one())

    async def _close(self, opened: _Opened) -> None:
        """Close the connection; if it does not answer, close its socket."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                if self._is_async:
                    await opened.connection.invalidate()
                    await opened.connection.close()
                else:
                    await on_own_thread("outbox-listen", _close_blocking, opened.connection)
        except Exception:
            break_off(opened.driver)


_PID = text("SELECT pg_backend_pid()")


def _open_blocking(engine: Engine) -> _Opened:
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    return _Opened(connection, connection.connection.driver_connection, connection.execute(_PID).scalar_one())


def _close_blocking(connection: Connection) -> None:
    connection.invalidate()
    connection.close()


# --- the drivers


@asynccontextmanager
async def _attached(opened: _Opened, channel: str, hear: Hear, lost: "asyncio.Future[None]") -> AsyncIterator[None]:
    """Listen on a connection that nothing else uses."""
    if hasattr(opened.driver, "add_listener"):
        attached = _attached_to_asyncpg(opened.driver, channel, hear, lost)
    elif hasattr(opened.driver, "pgconn"):
        attached = _attached_to_psycopg(opened, channel, hear, lost)
    else:
        name = type(opened.driver).__module__.partition(".")[0]
        raise CannotListen(f"with the driver {name} only polling is possible: use psycopg or asyncpg")
    async with attached:
        yield


@asynccontextmanager
async def _attached_to_asyncpg(
    driver: Any, channel: str, hear: Hear, lost: "asyncio.Future[None]"
) -> AsyncIterator[None]:
    def heard(connection: Any, pid: int, channel: str, payload: str) -> None:
        hear(decode(payload))

    driver.add_termination_listener(lambda connection: _lose(lost, ConnectionError("the connection has ended")))
    await driver.add_listener(channel, heard)
    yield


@asynccontextmanager
async def _attached_to_psycopg(
    opened: _Opened, channel: str, hear: Hear, lost: "asyncio.Future[None]"
) -> AsyncIterator[None]:
    """For sync and async connections: when the socket is readable, libpq returns the notifications."""
    listen = text(f"LISTEN {channel}")
    if inspect.iscoroutinefunction(opened.connection.execute):
        await opened.connection.execute(listen)
    else:
        await on_own_thread("outbox-listen", opened.connection.execute, listen)
    pgconn, loop, descriptor = opened.driver.pgconn, asyncio.get_running_loop(), opened.driver.fileno()

    def read() -> None:
        try:
            pgconn.consume_input()
            while (notification := pgconn.notifies()) is not None:
                hear(decode(notification.extra.decode(errors="replace")))
        except Exception as error:
            loop.remove_reader(descriptor)
            _lose(lost, error)

    loop.add_reader(descriptor, read)
    read()  # notifications that came with the answer to LISTEN
    try:
        yield
    finally:
        loop.remove_reader(descriptor)


def _lose(lost: "asyncio.Future[None]", error: Exception) -> None:
    if not lost.done():
        lost.set_exception(error)
