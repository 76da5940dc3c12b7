"""Requirements for a transaction, and what ends it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection

from outbox.errors import NoTransaction
from outbox.sql.connections.requirements import require_connection
from outbox.sql.dialect import dialect_of
from outbox.sql.mariadb.settings import was_undone

TRANSACTION_STATUS_IDLE, TRANSACTION_STATUS_INERROR = 0, 3  # libpq, PQtransactionStatus


def require_transaction(connection: Connection, schema: str | None) -> None:
    """Raise unless `connection` is on a supported database and in a transaction that commits by itself only.

    schema: of the outbox's tables. The connection must use this schema, and UTF-8.
    """
    dialect_of(connection)  # which refuses other databases
    if is_in_autocommit(connection):
        raise NoTransaction(
            "the connection is in autocommit mode, so an entry could not commit together with the business rows:"
            " use a session whose engine has no isolation_level='AUTOCOMMIT'"
        )
    require_connection(connection, schema)


def is_in_autocommit(connection: Connection) -> bool:
    """Whether each statement commits by itself, by SQLAlchemy's setting or by the driver's."""
    level = connection.get_execution_options().get("isolation_level")
    return level == "AUTOCOMMIT" or dialect_of(connection).is_driver_in_autocommit(connection)


def is_idle(connection: Connection) -> bool:
    """Whether neither SQLAlchemy nor the driver, psycopg or asyncpg, is in a transaction. False for other drivers."""
    if connection.in_transaction():
        return False
    driver: Any = connection.connection.driver_connection
    if connection.dialect.driver == "asyncpg":
        return not driver.is_in_transaction()
    return _is_psycopg(connection) and bool(driver.info.transaction_status == TRANSACTION_STATUS_IDLE)


@contextmanager
def autocommit(connection: Connection) -> Iterator[None]:
    """During the block each statement is a transaction by itself. The connection must be idle; then it is again."""
    if not _is_psycopg(connection):
        with connection.execution_options(isolation_level="AUTOCOMMIT").begin():  # until the connection is closed
            yield
        return
    driver: Any = connection.connection.dbapi_connection
    try:
        driver.autocommit = True  # SQLAlchemy's own way would call the driver four times
        yield
        if connection.in_transaction():  # only SQLAlchemy's: a statement went through Core
            connection.commit()
    finally:
        connection.rollback()
        _leave_autocommit(connection, driver)


def _leave_autocommit(connection: Connection, driver: Any) -> None:
    """The pool must not get a connection in autocommit: the app's transactions would not be transactions."""
    if connection.invalidated:
        return
    try:
        driver.autocommit = False
    except BaseException:
        connection.invalidate()
        raise


def _is_psycopg(connection: Connection) -> bool:
    return connection.dialect.driver in ("psycopg", "psycopg_async")


def is_aborted(connection: Connection) -> bool:
    """Whether a statement has failed, so that PostgreSQL accepts only a rollback. psycopg shows this without a query. On MariaDB,
    whether the server has undone the transaction.
    """
    info = getattr(connection.connection.driver_connection, "info", None)
    status = getattr(info, "transaction_status", None)
    return was_undone(connection) if status is None else status == TRANSACTION_STATUS_INERROR
