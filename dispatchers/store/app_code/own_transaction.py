"""Keeps a callback from ending the transaction that settles its entry, and notices if it did.

A savepoint is the proof: every COMMIT and ROLLBACK removes it, on each database, also the driver's. It is made before the
callback and released after it. Statements that would end the transaction are refused before they are sent, and so is every
statement that would commit by itself.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, event, text
from sqlalchemy.exc import DBAPIError

from dispatchers.errors import CallbackError
from outbox.sql.connections.transactions import is_in_autocommit
from outbox.sql.dialect import dialect_of
from outbox.sql.errors.driver import ABORTED, CONFLICTS, lost_savepoint, sqlstate
from outbox.sql.mariadb.settings import was_undone

_BEGIN = text("SAVEPOINT outbox_callback")
_END = text("RELEASE SAVEPOINT outbox_callback")

_ENDED = "sqlalchemy-outbox ended"
"""The key in a connection's `info` for one whose transaction a callback has ended, or has tried to commit."""

_NOTHING = r"(?:[\s;(]|--[^\n]*(?:\n|\Z)|\#[^\n]*(?:\n|\Z)|/\*.*?\*/)*"
_ENDS = re.compile(
    _NOTHING
    + r"""(?:
        COMMIT | END | ABORT | XA
        | ROLLBACK (?! \s+ (?:(?:WORK|TRANSACTION)\s+)? TO\b)
        | BEGIN (?! \s+ NOT \s+ ATOMIC\b)
        | (?:START|PREPARE) \s+ TRANSACTION
        | SET \s+ (?:SESSION\s+|LOCAL\s+|@@(?:session\.|local\.)?)? autocommit
    )\b""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)


def begin(connection: Connection) -> None:
    """Make the proof for `require_intact`."""
    connection.execute(_BEGIN)


@contextmanager
def guarded(connection: Connection) -> Iterator[None]:
    """Refuse, in the block, each statement that would end the transaction, and each that would not be in it."""
    event.listen(connection, "before_cursor_execute", _refuse)
    event.listen(connection, "commit", _refuse_commit)
    try:
        yield
    finally:
        event.remove(connection, "commit", _refuse_commit)
        event.remove(connection, "before_cursor_execute", _refuse)


def _refuse(connection: Connection, cursor: Any, statement: str, *context: Any) -> None:
    if ends_transaction(statement):
        raise CallbackError(_MUST_NOT)
    if _commits_each_statement(connection):
        raise _ended(connection)


def _refuse_commit(connection: Connection) -> None:
    """Refuse `Connection.commit()`. SQLAlchemy has then forgotten the transaction, which the driver still has open."""
    connection.info[_ENDED] = True
    raise CallbackError(_MUST_NOT)


_MUST_NOT = (
    "a callback must not send a COMMIT, a ROLLBACK or another statement that ends or begins a transaction, because its"
    " transaction also settles the entry or completes the request: raise an exception to undo everything, and use"
    " session.begin_nested() to undo a part"
)


def ends_transaction(statement: str) -> bool:
    """Whether it begins with words that end a transaction, or begin one."""
    return _ENDS.match(statement) is not None


def _commits_each_statement(connection: Connection) -> bool:
    """Whether the driver has no transaction open, and would not open one for a statement."""
    if is_in_autocommit(connection):
        return True
    driver: Any = connection.connection.driver_connection
    if dialect_of(connection).is_file:
        return not driver.in_transaction
    is_in_transaction = getattr(driver, "is_in_transaction", None)  # of asyncpg
    return is_in_transaction is not None and not is_in_transaction()


def require_intact(connection: Connection) -> None:
    """Raise unless the transaction is the one of `begin`, and would really commit.

    A callback may have ended it, or caught a statement's error without a savepoint: PostgreSQL then answers COMMIT with a silent
    ROLLBACK. That the server has ended the connection, or the transaction in favour of another one, is no fault of the
    callback's: that is raised as it is.
    """
    if connection.invalidated:
        raise ConnectionError("the database ended the connection during the callback")
    if not connection.in_transaction():
        raise CallbackError(
            "a callback must not roll back, and must not catch a failed flush without session.begin_nested(), because its"
            " transaction also settles the entry. Raise an exception instead: the dispatcher then calls the callback again"
        )
    if was_undone(connection):  # MariaDB would commit what came after
        raise CallbackError(
            "a callback caught a statement's error, such as a deadlock, after which MariaDB had undone its transaction: let the"
            " error through, and the dispatcher calls the callback again"
        )
    try:
        connection.execute(_END)
    except DBAPIError as error:
        if connection.invalidated or sqlstate(error.orig) in CONFLICTS:
            raise
        if lost_savepoint(error) and sqlstate(error.orig) != ABORTED:
            raise _ended(connection) from error
        raise CallbackError(
            "a callback caught a statement's error, and its transaction can no longer commit: put the statement into"
            " session.begin_nested()"
        ) from error


def _ended(connection: Connection) -> CallbackError:
    connection.info[_ENDED] = True
    return CallbackError(
        "a callback has ended its transaction itself, by a COMMIT or ROLLBACK of its own, by the driver's connection, or by a"
        " statement after which the database commits, such as CREATE TABLE on MariaDB. The transaction also settles the entry or"
        " completes the request: raise an exception to undo everything"
    )


def discard_ended(connection: Connection) -> None:
    """Close the connection if its callback has ended the transaction: its session may have other settings, or still be in it."""
    if not connection.invalidated and _ENDED in connection.info:
        connection.invalidate()
