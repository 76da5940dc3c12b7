"""How the plugin for pytest reaches a database: with a sync driver, or with an async one if no other is installed."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.pool import NullPool

from dispatchers.testing.loop_thread import LoopThread
from outbox.errors import ConfigurationError
from outbox.sql.connections.engines import engine_of
from outbox.sql.connections.sync_drivers import synchronous
from outbox.sql.dialect import dialect_of, dialect_of_url
from outbox.sql.sqlite import prepare_sqlite

Result = TypeVar("Result")

ASYNC_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+pysqlite": "sqlite+aiosqlite",
    "mariadb+pymysql": "mariadb+asyncmy",
}
"""The async driver for a sync one that does not work with asyncio itself, as psycopg does."""


def sync_url(url: URL) -> URL | None:
    """The URL with a sync driver. None if none is installed."""
    url = synchronous(url)
    is_installed = not url.drivername.startswith("postgresql") or find_spec(driver_name(url)) is not None
    return None if url.get_dialect().is_async or not is_installed else url


def async_url(url: URL) -> URL:
    """The URL with a driver for asyncio, which may not be installed."""
    return url.set(drivername=ASYNC_DRIVERS.get(url.drivername, url.drivername))


def driver_name(url: URL) -> str:
    """The driver that the URL names, for PostgreSQL also if it names none."""
    return url.drivername.partition("+")[2] or "psycopg"


def async_engine(url: URL) -> Any:
    """An AsyncEngine for any event loop: it keeps no connection. Raises `ImportError` for a missing package."""
    try:
        from sqlalchemy.ext.asyncio import create_async_engine

        engine = create_async_engine(async_url(url), poolclass=NullPool)
    except ModuleNotFoundError as error:
        raise ImportError(f"an AsyncEngine needs the package {error.name!r}: pip install {error.name}") from error
    if dialect_of(engine).is_file:
        prepare_sqlite(engine)
    return engine


def sync_engine(url: URL, **settings: Any) -> Engine:
    """An Engine for a URL with a sync driver."""
    engine = engine_of(url, **settings)
    if dialect_of(engine).is_file:
        prepare_sqlite(engine)
    return engine


class DatabaseAccess:
    """Runs work on a database for sync code.

    target: an Engine, which is used itself; or a URL or an AsyncEngine, whose database is opened again, because a connection
        of an AsyncEngine belongs to the test's event loop.
    """

    def __init__(self, target: Any, loop: LoopThread) -> None:
        self._loop = loop
        self.engine: Engine | None = target if isinstance(target, Engine) else None
        self.url: URL = target if isinstance(target, URL) else target.url
        if self.engine is None:
            _require_reachable(self.url)
            url = sync_url(self.url)
            self.engine = None if url is None else sync_engine(url, poolclass=NullPool)
        self.async_engine: Any = async_engine(self.url) if self.engine is None else None

    def run(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in a transaction of its own, which commits."""
        if self.engine is not None:
            with self.engine.begin() as connection:
                return work(connection)

        async def run() -> Result:
            async with self.async_engine.begin() as connection:
                result: Result = await connection.run_sync(work)
                return result

        return self._loop.run(run())

    def execute(self, *statements: str) -> list[Any]:
        """Execute each statement outside of a transaction. Returns the rows of the last one."""
        connection = self.connect()
        try:
            return [connection.execute(statement) for statement in statements][-1]
        finally:
            connection.close()

    def connect(self) -> "OpenConnection":
        """A connection that stays open until it is closed. Each statement commits."""
        options = {"isolation_level": "AUTOCOMMIT"}
        if self.engine is not None:
            opened: Any = self.engine.connect()
            return OpenConnection(opened.execution_options(**options), None)

        async def connect() -> Any:
            connection = await self.async_engine.connect()
            return await connection.execution_options(**options)

        return OpenConnection(self._loop.run(connect()), self._loop)


class OpenConnection:
    """One connection, for sync code. loop: of an async one."""

    def __init__(self, connection: Any, loop: LoopThread | None) -> None:
        self._connection = connection
        self._loop = loop

    def execute(self, statement: str) -> list[Any]:
        """Execute one statement; returns its rows."""
        done = self._wait(self._connection.exec_driver_sql(statement))
        return list(done.all()) if done.returns_rows else []

    def close(self) -> None:
        self._wait(self._connection.close())

    def _wait(self, result: Any) -> Any:
        return result if self._loop is None else self._loop.run(result)


def _require_reachable(url: URL) -> None:
    if dialect_of_url(url).is_file and url.database in (None, "", ":memory:"):
        raise ConfigurationError(
            f"{url!r} is a database in memory, which only its own engine can reach: let outbox_engine return the Engine, or use"
            " a file"
        )
