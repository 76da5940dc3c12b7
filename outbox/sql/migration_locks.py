"""Locks of migrations: only one migration runs at a time, and it never blocks others for long."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Dialect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateSchema

from outbox.errors import NoTransaction, SchemaError
from outbox.sql.errors.driver import CONFLICTS, LOCK_NOT_AVAILABLE, sqlstate

MIGRATION_LOCK = int.from_bytes(b"outbox")
"""The advisory lock of PostgreSQL under which a database is migrated; of a transaction, so PgBouncer may be between."""

MIGRATION_WAIT_SECONDS = 60
"""How long a run waits for another one: longer than any migration that holds a table's lock may take."""

TABLE_LOCK_WAIT_SECONDS = 5
"""How long a migration waits for a table. Later statements queue after it, so the timeout is short."""

MARIADB_SESSION = f"SET lock_wait_timeout = {TABLE_LOCK_WAIT_SECONDS}, default_storage_engine = InnoDB"
"""Alembic makes its version table with the server's own engine. Galera would not copy one of MyISAM to the other nodes."""

MET_ANOTHER_RUN = (*CONFLICTS, "23505", "42P01", "42P06", "42P07", "42704", "42710")
"""What a run in the portable mode may get because of another one, which has made or dropped the same thing since it looked.
PostgreSQL, appendix A: unique_violation, and that a table, a schema or an object exists, or does not.
"""


@contextmanager
def alone_in_file(connection: Connection, *, is_callers: bool) -> Iterator[None]:
    """A block in which this connection is the only writer of a SQLite file."""
    with _lock_named("another connection is writing to this SQLite database"):
        _begin_immediate(connection, is_callers=is_callers)
        yield


@contextmanager
def alone_in_transaction(connection: Connection, *, has_advisory_locks: bool) -> Iterator[None]:
    """A block that runs alone on PostgreSQL. The portable mode has no lock: a run that meets another one is repeated."""
    dbapi_connection = connection.connection.dbapi_connection
    if dbapi_connection is not None and connection.dialect.detect_autocommit_setting(dbapi_connection):
        raise NoTransaction(
            "the connection is in autocommit mode: a migration that fails would leave half of its tables"
        )
    waits_before = connection.scalar(text("SELECT current_setting('lock_timeout')"))
    if has_advisory_locks:
        _set_lock_timeout(connection, f"{MIGRATION_WAIT_SECONDS}s")
        with _lock_named(f"another migration has locked this database for {MIGRATION_WAIT_SECONDS} s"):
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
    _set_lock_timeout(connection, f"{TABLE_LOCK_WAIT_SECONDS}s")
    with _lock_named(
        f"another session, perhaps a long transaction, has locked one of the tables for {TABLE_LOCK_WAIT_SECONDS} s"
    ):
        yield
    _set_lock_timeout(connection, waits_before)  # a caller's transaction continues unchanged


@contextmanager
def alone_in_session(connection: Connection) -> Iterator[None]:
    """A block that runs alone on MariaDB."""
    holder = (
        f"another session, perhaps a long transaction, has locked one of the tables for {TABLE_LOCK_WAIT_SECONDS} s"
    )
    left = "What was done before stays; run it again when that has ended, and it continues"
    with _lock_named(holder, left), _alone_on_mariadb(connection):
        yield


def opening_on_postgresql(dialect: Dialect, schema: str | None) -> list[str]:
    """The statements before those of a migration that someone runs by hand."""
    lines = [
        "BEGIN",
        f"SET LOCAL lock_timeout = '{MIGRATION_WAIT_SECONDS}s'",
        f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})",
        f"SET LOCAL lock_timeout = '{TABLE_LOCK_WAIT_SECONDS}s'",
    ]
    return lines if schema is None else [*lines, str(CreateSchema(schema, if_not_exists=True).compile(dialect=dialect))]


def met_another_run(error: DBAPIError) -> bool:
    """Whether another run in the portable mode may be the cause, so that the whole may succeed in a new transaction."""
    return sqlstate(error.orig) in MET_ANOTHER_RUN


@contextmanager
def _alone_on_mariadb(connection: Connection) -> Iterator[None]:
    """A block under a named lock of the session, because each statement that defines a table commits the transaction."""
    asked = {"name": f"outbox {connection.engine.url.database}"[:64], "seconds": MIGRATION_WAIT_SECONDS}
    before = connection.execute(text("SELECT @@lock_wait_timeout, @@default_storage_engine")).one()
    if not connection.scalar(text("SELECT GET_LOCK(:name, :seconds)"), asked):
        raise SchemaError(
            f"cannot lock the tables: another migration has locked this database for {MIGRATION_WAIT_SECONDS} s. Nothing was"
            " changed; try again when it has ended"
        )
    try:
        connection.execute(text(MARIADB_SESSION))
        yield
    finally:
        connection.execute(text("SET lock_wait_timeout = {}, default_storage_engine = {}".format(*before)))
        connection.execute(text("DO RELEASE_LOCK(:name)"), asked)


def _set_lock_timeout(connection: Connection, value: str) -> None:
    connection.execute(text("SELECT set_config('lock_timeout', :value, true)"), {"value": value})


def _begin_immediate(connection: Connection, *, is_callers: bool) -> None:
    """Open a transaction that may write: by itself, Python's sqlite3 opens none for DDL, or one that is refused later."""
    connection.exec_driver_sql("SELECT 1")
    opened = connection.connection.driver_connection
    if opened is not None and opened.in_transaction:
        if is_callers:
            return
        connection.exec_driver_sql("ROLLBACK")
    connection.exec_driver_sql("BEGIN IMMEDIATE")


@contextmanager
def _lock_named(holder: str, left: str = "Nothing was changed; try again when it has ended") -> Iterator[None]:
    """left: what the statements before have changed, and what to do."""
    try:
        yield
    except DBAPIError as error:
        if not _is_lock_denied(error.orig):
            raise
        raise SchemaError(f"cannot lock the tables: {holder}. {left}") from error


def _is_lock_denied(error: BaseException | None) -> bool:
    # 5, 6: SQLITE_BUSY, SQLITE_LOCKED, below extended codes' high bits
    # (sqlite.org/rescode.html)
    return sqlstate(error) == LOCK_NOT_AVAILABLE or getattr(error, "sqlite_errorcode", 0) & 0xFF in (5, 6)
