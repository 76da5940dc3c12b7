"""SQLite."""

from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, Dialect, Engine, event

from outbox.errors import ConfigurationError

prepared: WeakSet[Dialect] = WeakSet()
"""The dialects of engines whose transactions begin with BEGIN IMMEDIATE."""


def prepare_sqlite(engine: Any) -> None:
    """Let the transactions of an Engine or AsyncEngine begin with BEGIN IMMEDIATE, with a write-ahead log.

    Without it, a transaction that reads and then writes fails at once with SQLITE_BUSY_SNAPSHOT if another one wrote in
    between, whatever the timeout. Call it once, before the first connection. Source: sqlite.org/lang_transaction.html.
    """
    sync_engine: Engine = getattr(engine, "sync_engine", engine)
    if sync_engine.dialect.name != "sqlite":
        raise ConfigurationError(f"prepare_sqlite takes an engine for SQLite, not for {sync_engine.dialect.name!r}")
    if sync_engine.dialect in prepared:
        return
    prepared.add(sync_engine.dialect)

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
