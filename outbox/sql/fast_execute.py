"""The short way to the database's driver, for the few statements that run all the time."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import Connection, CursorResult, Dialect, Executable
from sqlalchemy.sql import ClauseElement

from outbox.sql.schema import STATEMENTS_MAX
from outbox.sql.statement_errors import hide_values, may_quote


class Executed(NamedTuple):
    """What a statement gave."""

    rowcount: int
    rows: Sequence[Any]


def execute(connection: Connection, statement: Executable, parameters: dict[str, Any]) -> Executed:
    """Like `connection.execute`, in half its time where the driver converts values by itself and nobody listens to statements.

    connection: in a transaction. statement: built once and kept, as all that varies in it is in `parameters`.
    """
    pooled: Any = connection.connection
    cursor = pooled.info.pop(_KEPT, None)
    if cursor is None and not speaks_binary(connection):
        return _executed(connection.execute(statement, parameters))
    sql = _sql(statement, connection.dialect)
    if _has_listeners(connection):
        return _executed(connection.exec_driver_sql(sql, parameters))
    try:
        cursor = cursor or pooled.driver_connection.cursor(binary=True)
        if connection.dialect.is_async:
            executed: Executed = pooled.run_async(lambda driver: _execute_async(cursor, sql, parameters))
        else:
            cursor.execute(sql, parameters)
            executed = Executed(cursor.rowcount, cursor.fetchall() if cursor.pgresult.nfields else ())
    except BaseException as error:
        # SQLAlchemy's own way out: the error's class, the connection's fate, the app's error handlers. It gets no values to show.
        # Without the statement it wraps nothing but the driver's own: a time limit's signal comes out as what it is.
        quotes = may_quote(error, connection.dialect)
        if quotes:
            hide_values(error)
        connection._handle_dbapi_exception(error, sql if quotes else None, None, None, None)
    if _holds_nothing(cursor):
        pooled.info[_KEPT] = cursor
    return executed


_KEPT = "sqlalchemy-outbox cursor"
"""Where a connection keeps a cursor for the next statement: making one takes psycopg as long as converting its values."""


def _holds_nothing(cursor: Any) -> bool:
    """No rows; nor, once psycopg has prepared its statement, the values that were sent."""
    return not cursor.pgresult.nfields and cursor.connection.prepare_threshold is not None


def forget_cursor(connection: Connection) -> None:
    """For who changes what the driver's connection knows of types: a cursor knows what it did when the cursor was made."""
    connection.info.pop(_KEPT, None)


async def _execute_async(cursor: Any, sql: str, parameters: dict[str, Any]) -> Executed:
    await cursor.execute(sql, parameters)
    return Executed(cursor.rowcount, await cursor.fetchall() if cursor.pgresult.nfields else ())


def speaks_binary(connection: Connection) -> bool:
    """Whether the driver is psycopg and exchanges values with the server in binary, several times as fast as in text.

    A `ClientCursor`, which some use behind PgBouncer, writes them into the statement's text.
    """
    if connection.dialect.driver not in ("psycopg", "psycopg_async"):
        return False
    psycopg, driver_connection = connection.dialect.loaded_dbapi, connection.connection.driver_connection
    ordinary: bool = driver_connection.cursor_factory in (psycopg.Cursor, psycopg.AsyncCursor)  # type: ignore[union-attr]  # typed as any driver's
    return ordinary


def _executed(result: CursorResult[Any]) -> Executed:
    return Executed(result.rowcount, result.all() if result.returns_rows else ())


def _has_listeners(connection: Connection) -> bool:
    """Whether statements are logged or reported to listeners: `echo`, an event, a tracing library."""
    return connection._has_events or connection.engine._has_events or bool(connection._echo)


@lru_cache(STATEMENTS_MAX)
def _sql(statement: Executable, dialect: Dialect) -> str:
    compiled: ClauseElement = statement  # type: ignore[assignment]  # every statement is both
    return str(compiled.compile(dialect=dialect))
