"""Errors of the database: whether one row caused them, and what to store instead of a refused outcome. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, StatementError

from dispatchers.transitions import ClaimedEntry, MarkUncertain, Release, RetryCallback, Settle, Transition
from outbox.sql.errors.driver import CONFLICTS, sqlstate

MOMENTARY = ("55P03", "57014")
"""PostgreSQL, appendix A: lock_timeout expired; the statement was cancelled, for example by statement_timeout."""

FEATURE_NOT_SUPPORTED = "0A000"
"""PostgreSQL's code for `cached plan must not change result type`. Source: plancache.c."""

OF_ONE_ROW = ("22", "23", "44", "54", "P0", "XX")
"""Errors of one row: data, constraints, views' conditions, limits of a row or an index, triggers, corruption."""


def is_of_the_moment(error: BaseException) -> bool:
    """Whether the statement waited too long, for example for the lock of one row."""
    return sqlstate(getattr(error, "orig", None)) in MOMENTARY


def is_conflict(error: BaseException) -> bool:
    """Whether the server ended the transaction because of another one, so it may succeed now. On Galera also at the COMMIT."""
    return sqlstate(getattr(error, "orig", None)) in CONFLICTS


def is_of_stale_plan(error: BaseException) -> bool:
    """Whether a statement that the driver has prepared no longer fits a table, which was altered. It is prepared again."""
    return sqlstate(getattr(error, "orig", None)) == FEATURE_NOT_SUPPORTED


def is_of_one_row(error: BaseException) -> bool:
    """Whether the statement may succeed without one of its rows, because the server itself is not the cause."""
    if isinstance(error, DBAPIError):
        code = sqlstate(error.orig)
        if code is not None:
            return not error.connection_invalidated and code.startswith(OF_ONE_ROW)
        # asyncpg checks values itself, before the server sees them.
        is_of_driver = isinstance(getattr(error.orig, "__cause__", None), ValueError | TypeError)
        is_of_value = is_of_driver or not isinstance(error, OperationalError | InterfaceError)
        return is_of_value and not error.connection_invalidated
    return isinstance(error, StatementError | ValueError | TypeError | ArithmeticError)


def code_of(error: BaseException) -> str:
    """The error's class and its SQLSTATE, without its text, which may quote a row."""
    original = getattr(error, "orig", None) or error
    return " ".join(filter(None, (type(original).__name__, sqlstate(original))))


def substitutes(entry: ClaimedEntry, change: Transition, code: str) -> Iterator[Transition]:
    """The transitions to try instead of `change`: first without the service's texts, then as uncertain."""
    text = f"the database refused its outcome ({code})"
    if isinstance(change, Settle):
        result = None if change.result is None else {"unstorable": code}
        yield change._replace(result=result, reason=None if change.reason is None else text)
    elif isinstance(change, RetryCallback):
        for end in substitutes(entry, change.end, code):
            if isinstance(end, Settle | MarkUncertain):
                yield replace(change, end=end, reason=text)
    else:
        yield replace(change, reason=text)
    if not isinstance(change, Release):
        attempts = getattr(change, "attempts", entry.attempts + 1)
        yield MarkUncertain(text, attempts, True, entry.in_doubt_since or entry.leased_at)
