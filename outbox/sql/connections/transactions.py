"""Requirements for a transaction, and what ends it."""

from sqlalchemy import Connection

from outbox.errors import NoTransaction
from outbox.sql.connections.requirements import require_connection
from outbox.sql.dialect import dialect_of
from outbox.sql.mariadb.settings import was_undone

TRANSACTION_STATUS_INERROR = 3  # libpq, PQtransactionStatus


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


def is_aborted(connection: Connection) -> bool:
    """Whether a statement has failed, so that PostgreSQL accepts only a rollback. psycopg shows this without a query. On MariaDB,
    whether the server has undone the transaction.
    """
    info = getattr(connection.connection.driver_connection, "info", None)
    status = getattr(info, "transaction_status", None)
    return was_undone(connection) if status is None else status == TRANSACTION_STATUS_INERROR
