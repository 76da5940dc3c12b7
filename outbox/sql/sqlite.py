"""The dialect of SQLite."""

import os
import re
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID
from weakref import WeakSet

from sqlalchemy import BigInteger, Connection, Engine, Table, event
from sqlalchemy import Dialect as DriverDialect
from sqlalchemy.types import TypeEngine

from outbox.errors import ConfigurationError
from outbox.sql import migration_locks
from outbox.sql.clock import database_now
from outbox.sql.dialect import Lock, dialect_of, first_line
from outbox.sql.on_conflict import OnConflict
from outbox.sql.schema.tables import Tables
from outbox.sql.server_reports import ServerIdentity
from outbox.times import EPOCH, MICROSECOND

_prepared: WeakSet[DriverDialect] = WeakSet()
"""The dialects of engines whose transactions begin with BEGIN IMMEDIATE."""

_UNDEFINED = re.compile(r"no such table: (?:main\.)?(\w+)")
_PASSING = (5, 6, 10, 13)  # sqlite.org/rescode.html: BUSY, LOCKED, IOERR, FULL


class SQLite(OnConflict):
    """One file with one writer. Every statement of the outbox is plain SQL."""

    name = "sqlite"

    clock = "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)"  # microseconds; 2440587.5 is 1970
    later = "{0} + CAST({1} * 1000000 AS INTEGER)"
    json_member = """(CASE json_type(CAST({0} AS TEXT), '$."' || replace({1}, '.', '"."') || '"')
        WHEN 'true' THEN 'true' WHEN 'false' THEN 'false'
        ELSE CAST(json_extract(CAST({0} AS TEXT), '$."' || replace({1}, '.', '"."') || '"') AS TEXT) END)"""

    is_file = True
    isolation = None
    errors_quote_values = False

    def filled_id(self, kept_bytes: int, digit: str) -> str:
        return f"substr({{0}}, 1, {2 * kept_bytes}) || '{digit * (32 - 2 * kept_bytes)}'"

    def instant_type(self) -> TypeEngine[Any]:
        """Whole microseconds since 1970."""
        return BigInteger()

    def stored_instant(self, value: datetime) -> Any:
        return (value - EPOCH) // MICROSECOND

    def read_instant(self, value: Any) -> datetime:
        instant: datetime = EPOCH + value * MICROSECOND
        return instant

    def insert(self, table: Table) -> Any:
        from sqlalchemy.dialects.sqlite import insert  # every app loads this module, but few use SQLite

        return insert(table)

    def lock_key(self, connection: Connection, tables: Tables, id: UUID) -> Lock:
        """After BEGIN IMMEDIATE no other transaction writes."""
        return Lock(taken=True, keeps_snapshot=False)

    def wait_for_key(self, connection: Connection, tables: Tables, id: UUID, budget: timedelta) -> bool:
        return True

    def require_prepared(self, connection: Connection) -> None:
        if connection.dialect not in _prepared:
            raise ConfigurationError(
                "on SQLite a claim reads and then writes in one transaction, which needs BEGIN IMMEDIATE:"
                " call outbox.prepare_sqlite(engine) once after create_engine()"
            )

    def prepare(self, engine: Engine) -> None:
        prepare_sqlite(engine)

    def is_driver_in_autocommit(self, connection: Connection) -> bool:
        """BEGIN may come from us, or from the app, as SQLAlchemy's documentation advises."""
        is_open = connection.dialect in _prepared or connection.connection.driver_connection.in_transaction  # type: ignore[union-attr]
        return super().is_driver_in_autocommit(connection) and not is_open

    def place(self, engine: Engine) -> str:
        database = engine.url.database
        if not database or database == ":memory:":
            return f"sqlite {id(engine.dialect)}"
        return f"sqlite {Path(database).absolute()}"

    def missing_name(self, error: BaseException, statement: str) -> tuple[str, list[str]]:
        found = _UNDEFINED.search(first_line(error))
        return "table", [found[1]] if found else []

    def is_passing_in_statement(self, error: BaseException | None) -> bool:
        return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _PASSING

    def server_identity(self, connection: Connection, meta: Table, *, reads_server: bool) -> ServerIdentity:
        """The identity by the file's number: a copy of the file has another number."""
        (_, _, path), *_ = connection.exec_driver_sql("PRAGMA database_list").all()
        place = f"file {os.stat(path).st_ino}" if path else None
        return ServerIdentity(database_now(connection), place=place)

    def migrating(self, connection: Connection, *, is_callers: bool) -> AbstractContextManager[None]:
        return migration_locks.alone_in_file(connection, is_callers=is_callers)

    def script_frame(self, driver: DriverDialect, schema: str | None) -> tuple[list[str], list[str]]:
        return ["BEGIN IMMEDIATE"], ["COMMIT"]

    def why_no_schema(self, schema: str) -> str | None:
        return f"no database is attached as {schema!r}; on SQLite, leave the schema out or ATTACH one first"


DIALECT = SQLite()


def prepare_sqlite(engine: Any) -> None:
    """Let the transactions of an Engine or AsyncEngine begin with BEGIN IMMEDIATE, with a write-ahead log.

    Without it, a transaction that reads and then writes fails at once with SQLITE_BUSY_SNAPSHOT if another one wrote in
    between, whatever the timeout. Call it once, before the first connection. Source: sqlite.org/lang_transaction.html.
    """
    sync_engine: Engine = getattr(engine, "sync_engine", engine)
    if dialect_of(sync_engine) is not DIALECT:
        raise ConfigurationError(f"prepare_sqlite takes an engine for SQLite, not for {dialect_of(sync_engine).name!r}")
    if sync_engine.dialect in _prepared:
        return
    _prepared.add(sync_engine.dialect)

    @event.listens_for(sync_engine, "connect")
    def connect(dbapi_connection: Any, record: Any) -> None:
        dbapi_connection.isolation_level = None
        cursor = dbapi_connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.close()

    @event.listens_for(sync_engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
