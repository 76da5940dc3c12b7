"""Where databases differ: their clock, their locks, how they begin. Nothing else in this package asks which one it talks to."""

from datetime import timedelta
from typing import Any
from uuid import UUID
from weakref import WeakSet

from sqlalchemy import Connection, Dialect, Engine, Table, event, literal, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from outbox.errors import ConfigurationError, NoTransaction
from outbox.schema import Instant

SUPPORTED = ("postgresql", "sqlite")
LOCK_NOT_AVAILABLE = "55P03"  # PostgreSQL, appendix A: lock_timeout ran out
LOCK_TIMEOUT_MAX = 2**31 - 1  # milliseconds: PostgreSQL, pg_settings
SQLITE_CLOCK = "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)"  # microseconds; 2440587.5 is 1970

_prepared: WeakSet[Dialect] = WeakSet()


# --- the database's clock, the only one that decides


class clock(FunctionElement[Any]):  # noqa: N801  # named as the SQL function that it stands for
    """The database's clock now, not the transaction's start."""

    type = Instant()
    inherit_cache = True


@compiles(clock)
def _clock(element: clock, compiler: SQLCompiler, **kw: Any) -> str:
    return "clock_timestamp()"


@compiles(clock, "sqlite")
def _clock_sqlite(element: clock, compiler: SQLCompiler, **kw: Any) -> str:
    return SQLITE_CLOCK


class _later(FunctionElement[Any]):  # noqa: N801
    type = Instant()
    inherit_cache = True


@compiles(_later)
def _later_default(element: _later, compiler: SQLCompiler, **kw: Any) -> str:
    return f"clock_timestamp() + make_interval(secs => {compiler.process(element.clauses, **kw)})"


@compiles(_later, "sqlite")
def _later_sqlite(element: _later, compiler: SQLCompiler, **kw: Any) -> str:
    return f"{SQLITE_CLOCK} + CAST({compiler.process(element.clauses, **kw)} * 1000000 AS INTEGER)"


def clock_plus(delay: timedelta) -> ColumnElement[Any]:
    """The database's clock, `delay` from now."""
    return _later(literal(delay.total_seconds()))


# --- writing


def insert_unless_present(connection: Connection, table: Table) -> Any:
    """An INSERT that does nothing where the primary key exists: no error, so the transaction lives on."""
    dialect: Any = sqlite if connection.dialect.name == "sqlite" else postgresql
    return dialect.insert(table).on_conflict_do_nothing(index_elements=list(table.primary_key))


# --- what a transaction must be


def require_transaction(connection: Connection) -> None:
    """Raise unless `connection` is on a supported database and in a transaction that commits by itself only."""
    dialect = connection.dialect
    if dialect.name not in SUPPORTED:
        raise ConfigurationError(f"the outbox runs on {' and '.join(SUPPORTED)}, not on {dialect.name!r}")
    autocommit = connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
    if (
        not autocommit and dialect not in _prepared
    ):  # a prepared SQLite emits its own BEGIN, in the driver's autocommit mode
        autocommit = _is_driver_in_autocommit(connection)
    if autocommit:
        raise NoTransaction(
            "the connection is in autocommit mode, so an entry could not commit together with the business rows:"
            " use a session whose engine has no isolation_level='AUTOCOMMIT'"
        )


def _is_driver_in_autocommit(connection: Connection) -> bool:
    pooled: Any = connection.connection
    if not connection.dialect.detect_autocommit_setting(pooled.dbapi_connection):
        return False
    # SQLite: the app may emit BEGIN by itself, as SQLAlchemy's documentation advises.
    return connection.dialect.name != "sqlite" or not pooled.driver_connection.in_transaction


def prepare_sqlite(engine: Any) -> None:
    """Make an Engine's (or AsyncEngine's) transactions BEGIN IMMEDIATE, with a write-ahead log.

    A read followed by a write in one SQLite transaction otherwise fails at once with SQLITE_BUSY_SNAPSHOT, whatever the
    timeout. Call it once, before the first connection. Source: sqlite.org/lang_transaction.html.
    """
    sync_engine: Engine = getattr(engine, "sync_engine", engine)
    if sync_engine.dialect.name != "sqlite":
        raise ConfigurationError(f"prepare_sqlite takes an engine for SQLite, not for {sync_engine.dialect.name!r}")
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


def require_prepared(connection: Connection) -> None:
    """Raise unless a claim can read and then write in this connection's transactions."""
    if connection.dialect.name == "sqlite" and connection.dialect not in _prepared:
        raise ConfigurationError(
            "on SQLite a claim reads and then writes in one transaction, which needs BEGIN IMMEDIATE:"
            " call outbox.prepare_sqlite(engine) once after create_engine()"
        )


def sqlstate(error: BaseException | None) -> str | None:
    """The code that PostgreSQL gave a driver's error, under the name that the driver has for it."""
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


def is_busy(error: DBAPIError) -> bool:
    """Whether SQLite gave up waiting for another writer."""
    return isinstance(error, OperationalError) and "database is locked" in str(error.orig)


# --- locks that end with the transaction


def try_lock(connection: Connection, id: UUID) -> bool:
    """Take the transaction-level lock of `id` if nobody holds it. Never waits. SQLite's only writer holds them all."""
    if connection.dialect.name == "sqlite":
        return True
    return bool(connection.execute(_TRY_LOCK, {"key": _lock_number(id)}).scalar_one())


def wait_for_lock(connection: Connection, id: UUID, budget: timedelta) -> bool:
    """The same, waiting up to `budget`. The caller's transaction and its own lock_timeout survive either way."""
    if connection.dialect.name == "sqlite":
        return True
    milliseconds = min(max(1, int(budget.total_seconds() * 1000)), LOCK_TIMEOUT_MAX)
    before = connection.execute(text("SELECT current_setting('lock_timeout')")).scalar_one()
    savepoint = connection.begin_nested()  # a timeout outside of one would end the caller's transaction
    try:
        connection.execute(_SET_LOCK_TIMEOUT, {"value": f"{milliseconds}ms"})
        connection.execute(_LOCK, {"key": _lock_number(id)})
        connection.execute(_SET_LOCK_TIMEOUT, {"value": before})
    except DBAPIError as error:
        savepoint.rollback()
        if sqlstate(error.orig) != LOCK_NOT_AVAILABLE:
            raise
        return False
    savepoint.commit()
    return True


_TRY_LOCK = text("SELECT pg_try_advisory_xact_lock(:key)")
_LOCK = text("SELECT pg_advisory_xact_lock(:key)")
_SET_LOCK_TIMEOUT = text("SELECT set_config('lock_timeout', :value, true)")


def _lock_number(id: UUID) -> int:
    return int.from_bytes(id.bytes[:8], "big", signed=True)
