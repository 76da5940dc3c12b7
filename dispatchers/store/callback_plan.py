"""What is called in a transaction that settles an entry, or completes an accepted request: in turn, and what goes between."""

import asyncio
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from dispatchers.callbacks import (
    CallbackFailed,
    Calls,
    Completed,
    CompletionFailed,
    Function,
    OnCompleted,
    begin_completed,
    prepare,
    require_intact,
    require_no_awaitable,
)
from dispatchers.transitions import ClaimedEntry, End
from outbox.configuration import Configuration
from outbox.errors import OutboxError
from outbox.requests.accepted import answer_accepted, lock_complete
from outbox.session import flush_all, hint_after_commit
from outbox.sql.dialect import CONFLICTS, LOCK_NOT_AVAILABLE, sqlstate


class Call(NamedTuple):
    """A function of the app's, what it is handed beside the session, and what it is called when it fails."""

    function: Function
    argument: Any
    failure: type[CallbackFailed] = CallbackFailed


Calling: TypeAlias = Generator[Call, None, bool]
"""Yields what must be called next, works on the connection between, and returns whether it has done what it is for."""


def call_settled(
    connection: Connection,
    configuration: Configuration,
    session: Session,
    claimed: ClaimedEntry,
    end: End,
    calls: Calls,
) -> Calling:
    """After the settling of `claimed`: its callback; then, if it was its request's last entry, the completion."""
    if calls.ended is not None:
        yield Call(calls.ended, prepare(connection, configuration, session, claimed, end))
    if calls.completed is not None and claimed.record_id is not None:
        yield from call_completed(connection, configuration, session, claimed.record_id, calls.completed)
    return True


def call_completed(
    connection: Connection, configuration: Configuration, session: Session, record_id: UUID, function: OnCompleted
) -> Calling:
    """Have the accepted request's final response built, if every entry of it has ended, and store it."""
    row = lock_complete(connection, configuration.tables, record_id)
    if row is None:
        return False
    completed: Completed = begin_completed(connection, configuration, session, row)
    yield Call(function, completed, CompletionFailed)
    with named_failures(connection, CompletionFailed):
        response = completed.answer
    answer_accepted(connection, configuration.tables, row, response)
    return True


def call_at_once(session: Session, connection: Connection, call: Call) -> None:
    """Call a sync function, with what it leaves to be flushed. Raises `call.failure` for whatever it raises."""
    with named_failures(connection, call.failure):
        require_no_awaitable(call.function(session, call.argument))
        flush_all(session)
        require_intact(connection)
        hint_after_commit(session)


@contextmanager
def named_failures(connection: Connection, failure: type[CallbackFailed]) -> Iterator[None]:
    """Raise `failure` for what the app's function raises. What the database did to its transaction is raised as it is."""
    try:
        yield
    except asyncio.CancelledError as error:
        if _is_being_cancelled():
            raise
        raise failure from error
    except Exception as error:
        if connection.invalidated and not isinstance(error, DBAPIError):
            raise ConnectionError("the database ended the connection during the callback") from error
        if is_of_the_database(connection, error):
            raise
        raise failure from error
    except (BaseExceptionGroup, SystemExit) as error:
        raise failure from error


def is_of_the_database(connection: Connection, error: Exception) -> bool:
    """Whether the callback may succeed later as it is: the database has ended its connection, is full, or preferred another."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, ConnectionError) and connection.invalidated
    if connection.dialect.name == "sqlite":
        return (getattr(error.orig, "sqlite_errorcode", 0) & 0xFF) in _SQLITE_PASSING
    code = sqlstate(error.orig)
    return connection.invalidated or (code is not None and code.startswith(_PASSING_IN_A_STATEMENT))


# PostgreSQL, appendix A: victims of a conflict, resources, lock_timeout. Of a lost connection our own says so: the callback may
# have another one, to another database.
_PASSING_IN_A_STATEMENT = (*CONFLICTS, "53", LOCK_NOT_AVAILABLE)
_SQLITE_PASSING = (5, 6, 10, 13)  # sqlite.org/rescode.html: BUSY, LOCKED, IOERR, FULL


def _is_being_cancelled() -> bool:
    """Whether a CancelledError is ours; a callback may bring one of its own."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # on a thread without an event loop
        return False
    return task is not None and task.cancelling() > 0


def described(error: BaseException) -> str:
    """The error with its trace, for the log. Others' texts are left out: they show rows, parameters and payloads."""
    text = f": {error}" if isinstance(error, OutboxError) else ""
    code = sqlstate(getattr(error, "orig", None))
    frames = "".join(traceback.format_tb(error.__traceback__))
    return f"{type(error).__name__}{f' {code}' if code else ''}{text}\n{frames}{_cause(error)}".rstrip()


def _cause(error: BaseException) -> str:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None or isinstance(error, SQLAlchemyError):  # below it is the driver's error, whose code is reported
        return ""
    return f"after {described(cause)}"
