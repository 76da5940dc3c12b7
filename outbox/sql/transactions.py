"""Requirements for a transaction, and what ends it."""

from typing import Any

from sqlalchemy import Connection, text

from outbox.errors import ConfigurationError, NoTransaction
from outbox.sql.connections import require_connection
from outbox.sql.dialect import SUPPORTED, not_supported
from outbox.sql.mariadb_settings import was_undone
from outbox.sql.sqlite import prepared

TRANSACTION_STATUS_INERROR = 3  # libpq, PQtransactionStatus


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
    return connection.dialect not in prepared and not pooled.driver_connection.in_transaction


def require_prepared(connection: Connection) -> None:
    """Raise unless a claim can read and then write in this connection's transactions."""
    if connection.dialect.name == "sqlite" and connection.dialect not in prepared:
        raise ConfigurationError(
            "on SQLite a claim reads and then writes in one transaction, which needs BEGIN IMMEDIATE:"
            " call outbox.prepare_sqlite(engine) once after create_engine()"
        )


def is_aborted(connection: Connection) -> bool:
    """Whether a statement has failed, so that PostgreSQL accepts only a rollback. psycopg shows this without a query. On MariaDB,
    whether the server has undone the transaction.
    """
    info = getattr(connection.connection.driver_connection, "info", None)
    status = getattr(info, "transaction_status", None)
    return was_undone(connection) if status is None else status == TRANSACTION_STATUS_INERROR
