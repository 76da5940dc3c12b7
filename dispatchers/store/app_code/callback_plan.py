"""The app's functions that run in a transaction which settles an entry or completes an accepted request, and their order."""

import asyncio
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from dispatchers.callbacks import (
    CallbackFailed,
    Calls,
    Completed,
    CompletionFailed,
    Function,
    OnCompleted,
    begin_completed,
    final_response,
    prepare,
    require_no_awaitable,
)
from dispatchers.periodic.schedules import TickFunction
from dispatchers.store.app_code.own_transaction import begin, guarded, require_intact
from dispatchers.transitions import ClaimedEntry, End
from outbox.configuration import Configuration
from outbox.requests.accepted import answer_accepted, lock_complete
from outbox.sessions.session import flush_all, hint_after_commit
from outbox.sql.dialect import dialect_of


class Call(NamedTuple):
    """A call of the app's function with the session and `argument`. failure: the exception class to raise if it fails."""

    function: Function | TickFunction
    argument: Any
    failure: type[CallbackFailed] = CallbackFailed


Calling: TypeAlias = Generator[Call, None, bool]
"""Yields the calls one after another, and uses the connection between them. Returns whether it settled or completed."""


def call_settled(
    connection: Connection,
    configuration: Configuration,
    session: Session,
    claimed: ClaimedEntry,
    end: End,
    calls: Calls,
) -> Calling:
    """Run the callback of the settled entry, and then the completion of its request if this was the last entry."""
    if calls.ended is not None:
        yield Call(calls.ended, prepare(connection, configuration, session, claimed, end))
    if calls.completed is not None and claimed.record_id is not None:
        yield from call_completed(connection, configuration, session, claimed.record_id, calls.completed)
    return True


def call_completed(
    connection: Connection,
    configuration: Configuration,
    session: Session,
    record_id: UUID,
    function: OnCompleted,
) -> Calling:
    """Store the final response of the accepted request, which `function` builds. Do nothing if an entry has not ended yet."""
    row = lock_complete(connection, configuration.tables, record_id)
    if row is None:
        return False
    completed: Completed = begin_completed(connection, configuration, session, row)
    yield Call(function, completed, CompletionFailed)
    with named_failures(connection, CompletionFailed):
        response = final_response(completed)
    answer_accepted(connection, configuration, row, response)
    return True


def call_at_once(session: Session, connection: Connection, call: Call, call_function: Any = None) -> None:
    """Call a sync function, and flush its session. Raises `call.failure` for every exception of the function.

    call_function: calls it otherwise, as the app's framework asks for; see `AppTransactions.call`.
    """
    with named_failures(connection, call.failure):
        begin(connection)
        session.connection()  # so that its rollback is one of the transaction, also before its first statement
        with guarded(connection):
            if call_function is None:
                answer = call.function(session, call.argument)
            else:
                answer = call_function(connection, call.function, session, call.argument)
            require_no_awaitable(answer)
            flush_all(session)
        require_intact(connection)
        hint_after_commit(session)


@contextmanager
def named_failures(connection: Connection, failure: type[CallbackFailed]) -> Iterator[None]:
    """Raise `failure` for whatever the app's function raises. Errors of the database pass through unchanged."""
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
    except KeyboardInterrupt:  # the process's own
        raise
    except BaseException as error:  # such as gevent's Timeout; with an Engine, a thread's end hides them anyway
        raise failure from error


def is_of_the_database(connection: Connection, error: Exception) -> bool:
    """Whether the callback may succeed later without a change: the database closed the connection, is full, or had a conflict."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, ConnectionError) and connection.invalidated
    return connection.invalidated or dialect_of(connection).is_passing_in_statement(error.orig)


def _is_being_cancelled() -> bool:
    """Whether our own task is being cancelled: a callback may also raise a CancelledError of its own."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # on a thread without an event loop
        return False
    return task is not None and task.cancelling() > 0
