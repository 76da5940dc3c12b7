"""The differences between databases: clock, locks, and the begin of a transaction."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any
from weakref import WeakSet

from sqlalchemy import (
    Column,
    Connection,
    Dialect,
    Engine,
    Function,
    LargeBinary,
    Table,
    TextClause,
    Update,
    bindparam,
    event,
    insert,
    literal,
    quoted_name,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, registry, sqlite
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, TimeoutError
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.functions import FunctionElement

from outbox.errors import ConfigurationError, NoTransaction
from outbox.sql.connections import require_connection
from outbox.sql.mariadb_errors import SAVEPOINT_MISSING, number_of, state_of
from outbox.sql.mariadb_settings import was_undone
from outbox.sql.rendering import renders
from outbox.sql.schema import MAX_STATEMENTS
from outbox.sql.servers import DIALECTS, refused
from outbox.times import Instant

SUPPORTED = ("postgresql", "sqlite", "mariadb", "portable")
SUPPORTED_NAMES = "postgresql, sqlite and mariadb"
LOCK_NOT_AVAILABLE = "55P03"  # PostgreSQL, appendix A: lock_timeout ran out
SERIALIZATION_FAILURE = "40001"  # a concurrent change is not in the snapshot of the transaction
DEADLOCK = "40P01"  # one of the deadlocked transactions is ended
INSUFFICIENT_PRIVILEGE = "42501"
ABORTED = "25P02"  # a statement has failed, and only a rollback is possible
SAVEPOINT_GONE = ("3B001", "25P01", ABORTED)  # no such savepoint; no transaction at all
TIMEOUTS = (LOCK_NOT_AVAILABLE, "57014", DEADLOCK)  # query_canceled, by statement_timeout
CONFLICTS = (
    SERIALIZATION_FAILURE,
    DEADLOCK,
)  # the server ended the transaction in favour of another; a retry may succeed
TRANSACTION_STATUS_INERROR = 3  # libpq, PQtransactionStatus
PASSING = ("08", "40001", "40003", "40P01", "53", "55P03", "57P")
"""Appendix A: connections, victims of a conflict, a commit whose result CockroachDB does not know, resources, a lock that was
unavailable in time, shutdown.
"""
SQLITE_CLOCK = "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)"  # microseconds; 2440587.5 is 1970

for _name, _class in (
    ("portable", "PortablePsycopg"),
    ("portable.psycopg", "PortablePsycopg"),
    ("portable.psycopg_async", "PortableAsyncPsycopg"),
    ("portable.asyncpg", "PortableAsyncpg"),
):
    registry.register(_name, "outbox.sql.portable", _class)

_prepared: WeakSet[Dialect] = WeakSet()


# --- the database's clock, the only one that decides


@renders(postgresql="clock_timestamp()", sqlite=SQLITE_CLOCK, mariadb="UTC_TIMESTAMP(6)")
class clock(FunctionElement[Any]):  # noqa: N801  # named as the SQL function that it renders
    """The database's clock now, not the transaction's start. On MariaDB the statement's start."""

    type = Instant()
    inherit_cache = True


@renders(
    postgresql="{0} + make_interval(secs => {1})",
    portable="{0} + CAST({1} AS double precision) * INTERVAL '1 second'",
    sqlite="{0} + CAST({1} * 1000000 AS INTEGER)",
    mariadb="{0} + INTERVAL ROUND({1} * 1000000) MICROSECOND",
)
class _Later(FunctionElement[Any]):
    type = Instant()
    inherit_cache = True


def clock_plus(delay: timedelta | BindParameter[float]) -> ColumnElement[Any]:
    """The database's clock, `delay` from now; a parameter gives it in seconds."""
    return later(clock(), delay)


def later(instant: ColumnElement[Any], by: timedelta | BindParameter[float]) -> ColumnElement[Any]:
    return _Later(instant, literal(by.total_seconds()) if isinstance(by, timedelta) else by)


def earlier(instant: ColumnElement[Any], by: timedelta) -> ColumnElement[Any]:
    return later(instant, -by)


def database_now(connection: Connection) -> datetime:
    now: datetime = connection.execute(select(clock())).scalar_one()
    return now


def read_by_index(connection: Connection) -> None:
    """Make the rest of the transaction read its tables by their indexes, in the index's order.

    For a page of rows in an index's order, the planner may choose to read and sort the whole table, because its statistics of a
    queue are seldom right.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(_BY_INDEX)


_BY_INDEX = text("SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true)")


DELETE_BY_INDEX = "SET STATEMENT sql_safe_updates = 1 FOR "
"""Before a DELETE on MariaDB that names ids. Otherwise it may read all rows of a small table, and waits for each that another
transaction has locked or inserted.
"""


@lru_cache(MAX_STATEMENTS)
def deleting_by_index(dialect: Dialect, column: Column[Any]) -> TextClause:
    """The DELETE of the rows with these `ids` on MariaDB."""
    preparer = dialect.identifier_preparer
    named = f"{preparer.format_table(column.table)} WHERE {preparer.format_column(column)} IN :ids"
    ids = bindparam("ids", type_=column.type, expanding=True)
    return text(f"{DELETE_BY_INDEX}DELETE FROM {named}").bindparams(ids)


# --- where a response's body is


@lru_cache(MAX_STATEMENTS)  # every claim uses it, and building it costs about 0.1 ms
def stored_body(record: Table) -> ColumnElement[bytes]:
    """The body of a record: from its row, or on PostgreSQL from its day's partition; NULL if the partition was dropped.

    The SQL function is called only for a record with a partition.
    """
    return _StoredBody(record)


@renders(postgresql="CASE WHEN {1} IS NULL THEN {0} ELSE {2} END", sqlite="{0}", mariadb="{0}", portable="{0}")
class _StoredBody(FunctionElement[bytes]):
    type = LargeBinary()
    inherit_cache = True

    def __init__(self, record: Table) -> None:
        prefix = record.name.removesuffix("record")
        read: Function[bytes] = Function(
            quoted_name(f"{prefix}body_of", quote=None),
            record.c.id,
            record.c.body_day,
            packagenames=None if record.schema is None else (quoted_name(record.schema, quote=None),),
        )
        super().__init__(record.c.body, record.c.body_day, read)


def insert_unless_present(dialect: str, table: Table) -> Any:
    """An INSERT that does nothing if the primary key exists. An error would end the transaction.

    MariaDB's IGNORE also lets pass what is too long or breaks a CHECK: insert only what was checked. ON DUPLICATE KEY UPDATE
    would count an existing row as written, because SQLAlchemy asks the drivers for the number of rows found.
    """
    if dialect == "mariadb":
        return insert(table).prefix_with("IGNORE")
    name: Any = sqlite if dialect == "sqlite" else postgresql
    return name.insert(table).on_conflict_do_nothing(index_elements=list(table.primary_key))


def upsert(
    connection: Connection,
    table: Table,
    rows: Sequence[Mapping[str, Any]],
    *,
    added: Collection[str] = (),
    kept: Collection[str] = (),
) -> None:
    """Insert rows, or change those that exist.

    rows: all with the same columns, the primary key among them. An existing row gets the new values, except in columns that
    are `kept`, and in columns that are `added`, which get the sum of the old and the new value.
    """
    key = table.primary_key.columns.keys()
    if connection.dialect.name == "mariadb":
        connection.execute(_upsert_on_mariadb(table, rows, (*key, *kept), added))
        return
    name: Any = sqlite if connection.dialect.name == "sqlite" else postgresql
    inserting = name.insert(table).values(rows)
    changed = {column: inserting.excluded[column] for column in rows[0] if column not in (*key, *kept)}
    changed |= {column: table.c[column] + inserting.excluded[column] for column in added}
    connection.execute(inserting.on_conflict_do_update(index_elements=list(table.primary_key), set_=changed))


def _upsert_on_mariadb(
    table: Table, rows: Sequence[Mapping[str, Any]], kept: Collection[str], added: Collection[str]
) -> Any:
    from sqlalchemy.dialects import mysql  # it takes 40 ms, so other databases do not load it

    inserting = mysql.insert(table).values(rows)
    changed: dict[str, Any] = {column: inserting.inserted[column] for column in rows[0] if column not in kept}
    changed |= {column: table.c[column] + inserting.inserted[column] for column in added}
    return inserting.on_duplicate_key_update(changed)


def change_in_order(change: Update, values: Mapping[str, Any]) -> Update:
    """An UPDATE that sets the columns in the order of `values`. MariaDB sets one after another: an expression sees the new values
    of those before it. So an expression that reads other columns must be before these.
    """
    return change.ordered_values(*values.items())


# --- requirements for a transaction


def require_transaction(connection: Connection, schema: str | None) -> None:
    """Raise unless `connection` is on a supported database and in a transaction that commits by itself only.

    schema: of the outbox's tables. The connection must use this schema, and UTF-8.
    """
    dialect = connection.dialect
    if dialect.name not in SUPPORTED:
        raise not_supported(dialect.name)
    if is_in_autocommit(connection):
        raise NoTransaction(
            "the connection is in autocommit mode, so an entry could not commit together with the business rows:"
            " use a session whose engine has no isolation_level='AUTOCOMMIT'"
        )
    require_connection(connection, schema)


def not_supported(database: str) -> ConfigurationError:
    if database in DIALECTS:
        return refused(DIALECTS[database])
    hint = (
        ": MySQL, TiDB and Vitess have no INSERT ... RETURNING; write mariadb+pymysql://... in the URL of a MariaDB"
        if database == "mysql"
        else ""
    )
    return ConfigurationError(f"the outbox runs on {SUPPORTED_NAMES}, not on {database!r}{hint}")


def is_in_autocommit(connection: Connection) -> bool:
    """Whether each statement commits by itself, by SQLAlchemy's setting or by the driver's."""
    level = connection.get_execution_options().get("isolation_level")
    return level == "AUTOCOMMIT" or _is_driver_in_autocommit(connection)


def isolation_level(connection: Connection) -> str:
    """The level of the present transaction on PostgreSQL, and of the session on MariaDB, with a space between words."""
    asked = "SELECT @@tx_isolation" if connection.dialect.name == "mariadb" else "SHOW transaction_isolation"
    level: str = connection.execute(text(asked)).scalar_one()
    return level.replace("-", " ").upper()


def leave_autocommit(connection: Connection) -> None:
    """Switch an idle PostgreSQL connection from autocommit to READ COMMITTED, until it returns to its pool."""
    if connection.dialect.name == "postgresql" and is_in_autocommit(connection):
        connection.execution_options(isolation_level="READ COMMITTED")


def _is_driver_in_autocommit(connection: Connection) -> bool:
    pooled: Any = connection.connection
    if not connection.dialect.detect_autocommit_setting(pooled.dbapi_connection):
        return False
    if connection.dialect.name != "sqlite":
        return True
    # There BEGIN may come from us, or from the app, as SQLAlchemy's documentation advises.
    return connection.dialect not in _prepared and not pooled.driver_connection.in_transaction


def prepare_sqlite(engine: Any) -> None:
    """Let the transactions of an Engine or AsyncEngine begin with BEGIN IMMEDIATE, with a write-ahead log.

    Without it, a transaction that reads and then writes fails at once with SQLITE_BUSY_SNAPSHOT if another one wrote in
    between, whatever the timeout. Call it once, before the first connection. Source: sqlite.org/lang_transaction.html.
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
    """The SQLSTATE of a driver's error. Drivers have different names for the attribute; MariaDB's have its own numbers."""
    return state_of(error) or getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


def is_busy(error: DBAPIError) -> bool:
    """Whether SQLite gave up waiting for another writer."""
    return isinstance(error, OperationalError) and "database is locked" in str(error.orig)


def lost_savepoint(error: DBAPIError) -> bool:
    """Whether a savepoint could not be released: a statement in it had failed, or its transaction was ended without SQLAlchemy,
    for example by a ROLLBACK as text. SQLAlchemy then treats the savepoint as ended, and does not roll back to it.
    """
    is_missing = number_of(error.orig) == SAVEPOINT_MISSING  # also where `sqlstate` is that of an earlier error
    return is_missing or sqlstate(error.orig) in SAVEPOINT_GONE or "no such savepoint" in str(error.orig)


def is_aborted(connection: Connection) -> bool:
    """Whether a statement has failed, so that PostgreSQL accepts only a rollback. psycopg shows this without a query. On MariaDB,
    whether the server has undone the transaction.
    """
    info = getattr(connection.connection.driver_connection, "info", None)
    status = getattr(info, "transaction_status", None)
    return was_undone(connection) if status is None else status == TRANSACTION_STATUS_INERROR


def is_timeout(error: DBAPIError) -> bool:
    """Whether PostgreSQL ended a wait: for a lock timeout, a statement timeout, or a deadlock with another transaction."""
    return sqlstate(error.orig) in TIMEOUTS


def is_passing(error: Exception) -> bool:
    """Whether the same transaction may commit later: the database was unavailable or busy, or preferred another transaction."""
    code = sqlstate(getattr(error, "orig", None) or error)
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    if code is not None:  # asyncpg's own errors of a failed connection have a code too
        return code.startswith(PASSING)
    if isinstance(error, DBAPIError):
        is_of_a_value = isinstance(
            getattr(error.orig, "__cause__", None), ValueError | TypeError
        )  # asyncpg's errors of values
        return isinstance(error, OperationalError | InterfaceError) and not is_of_a_value
    return isinstance(error, TimeoutError | OSError)  # the pool has no free connection, or the server is unreachable
