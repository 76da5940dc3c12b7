"""Logs database outages: the cause once, then a reminder at growing intervals, and the end with its duration."""

import builtins
import logging
import socket
from collections.abc import Callable
from datetime import timedelta

from sqlalchemy.exc import TimeoutError

from outbox.errors import OutboxError
from outbox.sql.errors.driver import is_passing, sqlstate

log = logging.getLogger("outbox.dispatcher")

AGAIN_SECONDS = (60.0, 900.0)  # until an outage is logged again: first this long, then doubled up to the second value

_CAUSES = {
    "08S01": "this Galera node is outside the cluster's majority, or is still receiving the cluster's state",
    "08007": "the server had an error during a COMMIT, so its result is unknown; on Galera this node left the cluster",
    "28P01": "the password is refused",
    "28000": "the server does not admit this user, host or database",
    "3D000": "the database does not exist",
    "53300": "the server has too many connections",
    "53100": "the server's disk is full",
    "25006": "the server or the transaction is read-only, as on a replica",
    "57P01": "the server ended the connection, or is shutting down",
    "57P02": "the server crashed",
    "57P03": "the server is starting up or shutting down",
    "25P03": "the server ended a transaction that was idle for too long",
}
_REFUSED = "the connection is refused"
_UNRESOLVED = "the host's name cannot be resolved"
_LATE = "the server did not answer in time"
_UNKNOWN = "the user or the database does not exist"
_NO_SOCKET = "the server's socket does not exist"
_CLOSED = "the connection was closed"
_MISNAMED = "a parameter of the URL does not exist"
_INVALID = "a value in the URL is invalid"
_LOST = {"08001": "no connection to the server could be made", "08006": _CLOSED}
"""The causes for errors of MariaDB's drivers, if no exception of the operating system has more."""

_PHRASES = {
    "password authentication failed": _CAUSES["28P01"],
    "performing authentication": "the driver cannot understand the server's part of the authentication",
    "no pg_hba.conf entry": _CAUSES["28000"],
    **dict.fromkeys(("starting up", "shutting down"), _CAUSES["57P03"]),
    "not currently accepting connections": "the database accepts no connections",
    **dict.fromkeys(("too many clients", "too many connections", "remaining connection slots"), _CAUSES["53300"]),
    "refused": _REFUSED,
    **dict.fromkeys(("translate host name", "resolve host", "name or service not known"), _UNRESOLVED),
    **dict.fromkeys(("name resolution", "nodename nor servname"), _UNRESOLVED),
    **dict.fromkeys(("unreachable", "no route"), "the host is unreachable"),
    **dict.fromkeys(("timeout expired", "timed out"), _LATE),
    **dict.fromkeys(("invalid connection option", "unrecognized configuration parameter"), _MISNAMED),
    **dict.fromkeys(("connection is bad: invalid", "invalid integer value", "bad value for"), _INVALID),
    "invalid value for parameter": _INVALID,
    "certificate": "TLS failed",
    "does not exist": _UNKNOWN,  # libpq gives no SQLSTATE for this error
    "no such file": _NO_SOCKET,
    "unable to open database file": "the file of the database cannot be opened",
    **dict.fromkeys(("closed", "reset", "terminat", "eof"), _CLOSED),
}
"""Phrases in the connection errors of libpq, asyncpg and the operating system, with our text for each."""

_CLASSES: dict[type[BaseException], str] = {
    ConnectionRefusedError: _REFUSED,
    socket.gaierror: _UNRESOLVED,
    FileNotFoundError: _NO_SOCKET,
    ConnectionError: _CLOSED,
    builtins.TimeoutError: _LATE,
}

_HOPELESS = (_CAUSES["28P01"], _CAUSES["28000"], _CAUSES["3D000"], _UNKNOWN, _MISNAMED, _INVALID)


def cause_of(error: BaseException) -> str:
    """The cause in our own words, with the error's class and SQLSTATE: a driver's text may name hosts and users."""
    if isinstance(error, OutboxError):
        return str(error)
    original = getattr(error, "orig", None) or error
    if isinstance(error, TimeoutError):
        return f"timed out waiting for a connection of the pool ({_shown(original)})"
    for found in _chain(original, contexts=False):  # asyncpg: the cause of its error is why the connection closed
        if (code := sqlstate(found) or "") in _CAUSES:
            return f"{_CAUSES[code]} ({_shown(found)})"
    chain = _chain(original, contexts=True)
    for found in chain:
        if (cause := _by_class_or_text(found)) is not None:
            return f"{cause} ({_shown(found)})"
    if (code := sqlstate(original) or "") in _LOST:
        return f"{_LOST[code]} ({_shown(original)})"
    named = [original] if code else chain
    return " from ".join(
        dict.fromkeys(map(_shown, named))
    )  # without repeats: SQLAlchemy's error has the name of the driver's


def _chain(error: BaseException, *, contexts: bool) -> list[BaseException]:
    """The error, its cause, the cause of that, and so on. contexts: if an error has no cause, follow its context instead."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        context = following.__context__ if contexts and not following.__suppress_context__ else None
        following = following.__cause__ or context
    return chain


def _shown(error: BaseException) -> str:
    return " ".join(filter(None, (type(error).__name__, sqlstate(error))))


def _by_class_or_text(error: BaseException) -> str | None:
    # An error with a code is of a statement: a table "does not exist", not the database.
    text = "" if sqlstate(error) else str(error).lower()
    of_class = next((cause for kind, cause in _CLASSES.items() if isinstance(error, kind)), None)
    return of_class or next((cause for phrase, cause in _PHRASES.items() if phrase in text), None)


_AWAY = ("08", "25P03", "28", "3D", "53", "57P")  # PostgreSQL, appendix A
_PREFERRED_ANOTHER = (
    "40001",
    "40P01",
    "55P03",
    "57014",
)  # appendix A: conflicts, and timeouts of a statement or a lock
_SQLITE_AWAY = (5, 6, 10, 13, 14)  # sqlite.org/rescode.html: BUSY, LOCKED, IOERR, FULL, CANTOPEN


def is_outage(error: Exception) -> bool:
    """Whether the database is unavailable. A conflict with another transaction is no outage."""
    original = getattr(error, "orig", None) or error
    code = sqlstate(original)
    sqlite_code: int | None = getattr(original, "sqlite_errorcode", None)
    if sqlite_code is not None:
        return sqlite_code & 0xFF in _SQLITE_AWAY
    if code is None or getattr(error, "connection_invalidated", False):
        return is_passing(error)
    return code.startswith(_AWAY)


def ends_by_itself(error: Exception) -> bool:
    """Whether an outage may end without a change: not with a wrong URL, user or password, or if the database does not exist."""
    cause = cause_of(error)
    return is_outage(error) and not any(cause.startswith(hopeless) for hopeless in _HOPELESS)


class OutageLog:
    """Logs the database errors of all parts of a dispatcher as one outage.


    clock: the process's clock, in seconds. report: called with an error that is no outage, but a defect or a missing right.
    """

    def __init__(self, clock: Callable[[], float], report: Callable[[Exception], None] = lambda error: None) -> None:
        self._clock = clock
        self._report = report
        self._since: float | None = None
        self._again_at = 0.0
        self._again_seconds = 0.0

    def failed(self, error: Exception) -> None:
        """A database operation failed and will be retried."""
        if sqlstate(getattr(error, "orig", None)) in _PREFERRED_ANOTHER:
            log.info("transaction conflict: %s; it will be retried", cause_of(error))
            return
        now, is_new = self._clock(), self._since is None
        if self._since is None:
            self._since, self._again_seconds = now, AGAIN_SECONDS[0]
        elif now < self._again_at:
            return
        else:
            self._again_seconds = min(2 * self._again_seconds, AGAIN_SECONDS[1])
        self._again_at = now + self._again_seconds
        what = "database unavailable" if is_outage(error) else "database error"
        if not is_outage(error):
            self._report(error)
        if is_new:
            log.warning(
                "%s: %s; this process keeps outcomes in memory and tries again until the database answers",
                what,
                cause_of(error),
            )
        else:
            lasted = timedelta(seconds=round(now - self._since))
            log.warning("%s for %s: %s; this process tries again", what, lasted, cause_of(error))

    def answered(self) -> None:
        """A database operation succeeded."""
        if self._since is not None:
            lasted, self._since = timedelta(seconds=round(self._clock() - self._since)), None
            log.warning("database available again after %s", lasted)
