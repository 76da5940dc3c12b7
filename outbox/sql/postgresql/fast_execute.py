"""The short way to the database's driver, for the few statements that run all the time; else plain SQLAlchemy Core.

`dev.py bench --quick` prints what the short way saves. It calls one private method of SQLAlchemy, for errors only. Where a
release of SQLAlchemy has no such method, or an engine has the option `outbox_plain_core`, every statement runs through Core.
"""

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import Connection, CursorResult, Dialect, Executable

from outbox.sql.errors.statement import hide_values, may_quote
from outbox.sql.schema.tables import MAX_STATEMENTS

PLAIN_CORE = "outbox_plain_core"
"""An execution option: `create_engine(url, execution_options={"outbox_plain_core": True})`."""


class Executed(NamedTuple):
    """The result of a statement."""

    rowcount: int
    rows: Sequence[Any]


def execute(
    connection: Connection, statement: Executable, parameters: dict[str, Any], *, before: Executable | None = None
) -> Executed:
    """Like `connection.execute`, with less CPU where the driver converts values by itself and no listener is registered.

    connection: in a transaction. statement: built once and kept, as all that varies in it is in `parameters`.
    before: a statement without parameters that is executed first, if possible in the same round trip; its rows are dropped.
    """
    pooled: Any = connection.connection
    is_core = not _CONVERTS_ERRORS or connection.get_execution_options().get(PLAIN_CORE)
    cursor = None if is_core else pooled.info.pop(_KEPT, None)
    is_core = is_core or (cursor is None and not speaks_binary(connection))
    is_listened_to = not is_core and _has_listeners(connection)
    if before is not None and (is_core or is_listened_to):
        connection.execute(before)
    if is_core:
        return _executed(connection.execute(statement, parameters))
    sql = _sql(statement, connection.dialect)
    if is_listened_to:
        return _executed(connection.exec_driver_sql(sql, parameters))
    first = None if before is None else _sql(before, connection.dialect)
    try:
        cursor = cursor or pooled.driver_connection.cursor(binary=True)
        if connection.dialect.is_async:
            executed: Executed = pooled.run_async(lambda driver: _execute_async(cursor, sql, parameters, first))
        else:
            executed = _execute(cursor, sql, parameters, first)
    except BaseException as error:
        _raise_as_core_does(connection, error, sql)
        raise
    if _holds_nothing(cursor):
        pooled.info[_KEPT] = cursor
    return executed


def _raise_as_core_does(connection: Connection, error: BaseException, sql: str) -> None:
    """Raise SQLAlchemy's error of the driver's, which decides about the connection, and call the app's error handlers.

    They get no values to show. Without the statement SQLAlchemy wraps only the driver's own errors: the signal of a time limit
    is raised as it is.
    """
    quotes = may_quote(error, connection.dialect)
    if quotes:
        hide_values(error)
    connection._handle_dbapi_exception(error, sql if quotes else None, None, None, None)


_HANDLER = inspect.signature(getattr(Connection, "_handle_dbapi_exception", lambda: None))
_CONVERTS_ERRORS = [*_HANDLER.parameters][:6] == ["self", "e", "statement", "parameters", "cursor", "context"]
"""Whether this release of SQLAlchemy has the method, as it is called here."""

_KEPT = "sqlalchemy-outbox cursor"
"""Where a connection keeps a cursor for the next statement: making one takes psycopg as long as converting its values."""


def _holds_nothing(cursor: Any) -> bool:
    """Whether it holds no rows; nor, once psycopg has prepared its statement, the values that were sent."""
    return not cursor.pgresult.nfields and cursor.connection.prepare_threshold is not None


def forget_cursor(connection: Connection) -> None:
    """Call this after a change of the types that the driver's connection knows: a cursor keeps those of its creation."""
    connection.info.pop(_KEPT, None)


def _execute(cursor: Any, sql: str, parameters: dict[str, Any], first: str | None) -> Executed:
    if first is None:
        cursor.execute(sql, parameters)
    else:
        with cursor.connection.pipeline():
            cursor.connection.execute(first)
            cursor.execute(sql, parameters)
    return Executed(cursor.rowcount, cursor.fetchall() if cursor.pgresult.nfields else ())


async def _execute_async(cursor: Any, sql: str, parameters: dict[str, Any], first: str | None) -> Executed:
    if first is None:
        await cursor.execute(sql, parameters)
    else:
        async with cursor.connection.pipeline():
            await cursor.connection.execute(first)
            await cursor.execute(sql, parameters)
    return Executed(cursor.rowcount, await cursor.fetchall() if cursor.pgresult.nfields else ())


def speaks_binary(connection: Connection) -> bool:
    """Whether the driver is psycopg and exchanges values with the server in binary, several times as fast as in text.

    A `ClientCursor`, which some use after PgBouncer, writes them into the statement's text.
    """
    if connection.dialect.driver not in ("psycopg", "psycopg_async"):
        return False
    psycopg: Any = connection.dialect.loaded_dbapi
    driver_connection: Any = connection.connection.driver_connection
    return driver_connection.cursor_factory in (psycopg.Cursor, psycopg.AsyncCursor)


def _executed(result: CursorResult[Any]) -> Executed:
    return Executed(result.rowcount, result.all() if result.returns_rows else ())


def _has_listeners(connection: Connection) -> bool:
    """Whether statements are logged or reported to listeners: `echo`, an event, a tracing library. SQLAlchemy calls no others for
    a statement in the driver's SQL.
    """
    events: Any = connection.dispatch
    return bool(events.before_cursor_execute or events.after_cursor_execute or connection.engine.echo)


@lru_cache(MAX_STATEMENTS)
def _sql(statement: Any, dialect: Dialect) -> str:
    return str(statement.compile(dialect=dialect))
