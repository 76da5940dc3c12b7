"""The errors of the databases' drivers: their SQLSTATEs, and what they mean."""

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, TimeoutError

from outbox.sql.mariadb.errors import SAVEPOINT_MISSING, number_of, state_of

LOCK_NOT_AVAILABLE = "55P03"  # PostgreSQL, appendix A: lock_timeout ran out
SERIALIZATION_FAILURE = "40001"  # a concurrent change is not in the snapshot of the transaction
DEADLOCK = "40P01"  # one of the deadlocked transactions is ended
INSUFFICIENT_PRIVILEGE = "42501"
ABORTED = "25P02"  # a statement has failed, and only a rollback is possible
SAVEPOINT_GONE = ("3B001", "25P01", ABORTED)  # no such savepoint; no transaction at all
TIMEOUTS = (LOCK_NOT_AVAILABLE, "57014", DEADLOCK)  # query_canceled, by statement_timeout
CONFLICTS = (
    SERIALIZATION_FAILURE,
    DEADLOCK,
)  # the server ended the transaction in favour of another; a retry may succeed
PASSING = ("08", "40001", "40003", "40P01", "53", "55P03", "57P")
"""Appendix A: connections, victims of a conflict, a commit whose result CockroachDB does not know, resources, a lock that was
unavailable in time, shutdown.
"""


def sqlstate(error: BaseException | None) -> str | None:
    """The SQLSTATE of a driver's error. Drivers have different names for the attribute; MariaDB's have its own numbers."""
    return state_of(error) or getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


def is_busy(error: DBAPIError) -> bool:
    """Whether SQLite gave up waiting for another writer."""
    return isinstance(error, OperationalError) and "database is locked" in str(error.orig)


def lost_savepoint(error: DBAPIError) -> bool:
    """Whether a savepoint could not be released: a statement in it had failed, or its transaction was ended without SQLAlchemy,
    for example by a ROLLBACK as text. SQLAlchemy then treats the savepoint as ended, and does not roll back to it.
    """
    is_missing = number_of(error.orig) == SAVEPOINT_MISSING  # also where `sqlstate` is that of an earlier error
    return is_missing or sqlstate(error.orig) in SAVEPOINT_GONE or "no such savepoint" in str(error.orig)


def is_timeout(error: DBAPIError) -> bool:
    """Whether PostgreSQL ended a wait: for a lock timeout, a statement timeout, or a deadlock with another transaction."""
    return sqlstate(error.orig) in TIMEOUTS


def is_passing(error: Exception) -> bool:
    """Whether the same transaction may commit later: the database was unavailable or busy, or preferred another transaction."""
    code = sqlstate(getattr(error, "orig", None) or error)
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    if code is not None:  # asyncpg's own errors of a failed connection have a code too
        return code.startswith(PASSING)
    if isinstance(error, DBAPIError):
        is_of_a_value = isinstance(
            getattr(error.orig, "__cause__", None), ValueError | TypeError
        )  # asyncpg's errors of values
        return isinstance(error, OperationalError | InterfaceError) and not is_of_a_value
    return isinstance(error, TimeoutError | OSError)  # the pool has no free connection, or the server is unreachable
