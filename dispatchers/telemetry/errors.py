"""Unexpected exceptions, for an app's error reporter: `Dispatcher(report=...)`."""

import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Literal, TypeAlias
from uuid import UUID

from sqlalchemy.exc import SQLAlchemyError

from dispatchers.transitions import ClaimedEntry
from outbox.errors import ConfigurationError, OutboxError
from outbox.sql.errors.driver import sqlstate

log = logging.getLogger("outbox.observer")

MAX_CAUSES = 10

Where: TypeAlias = Literal["adapter", "callback", "completion", "schedule", "job", "dispatcher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """An exception that the dispatcher did not expect. It has no exception and no text of one: they may show a payload or a key.

    where: an `adapter` raised, a `callback`, a `completion` or the function of a `schedule` raised or was too slow, a `job` of
        maintenance failed, or it is an error of the `dispatcher` itself. Not reported are outcomes, and a database that is
        unavailable.
    error: the exception's class, with the SQLSTATE of a database error. text: of the library's own exceptions; else empty.
    frames: where it was raised: files, lines and functions, no values. trace: the same as text, with its causes.
    entry_id, operation, destination: of the entry; None if it is about none. request_id: of a completion that no entry brought.
    """

    where: Where
    error: str
    text: str
    frames: traceback.StackSummary
    trace: str
    entry_id: UUID | None = None
    operation: str | None = None
    destination: str | None = None
    request_id: UUID | None = None


Reporter: TypeAlias = Callable[[ErrorReport], object]


class ErrorReports:
    """Calls an app's error reporter. An exception in it fails no send: the first one is logged."""

    def __init__(self, report: Reporter | None = None) -> None:
        if report is not None and (not callable(report) or iscoroutinefunction(report)):
            raise ConfigurationError(
                "report must be a plain function of one dispatchers.telemetry.errors.ErrorReport,"
                f" not {report!r}: it is called, and not awaited, on the dispatcher's event loop"
            )
        self._report = report
        self._has_failed = False

    def report(
        self,
        where: Where,
        error: BaseException,
        entry: ClaimedEntry | None = None,
        *,
        text: str | None = None,
        request_id: UUID | None = None,
    ) -> None:
        """text: in our own words, in place of the exception's."""
        if self._report is None:
            return
        of_entry = {} if entry is None else {name: getattr(entry, name) for name in ("operation", "destination")}
        try:
            self._report(
                ErrorReport(
                    where=where,
                    error=named(error),
                    text=_text(error) if text is None else text,
                    frames=traceback.extract_tb(error.__traceback__),
                    trace=described(error),
                    entry_id=None if entry is None else entry.id,
                    request_id=request_id,
                    **of_entry,
                )
            )
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                log.exception("report= raised; sending is not affected, and its further errors are not logged")


def described(error: BaseException) -> str:
    """The error with its trace, for the log. Others' texts are left out: they show rows, parameters and payloads."""
    return "after ".join(
        f"{named(each)}{f': {text}' if (text := _text(each)) else ''}\n{''.join(traceback.format_tb(each.__traceback__))}"
        for each in _with_causes(error)
    ).rstrip()


def named(error: BaseException) -> str:
    """Its class, with the SQLSTATE of a database error."""
    code = sqlstate(getattr(error, "orig", None))
    return f"{type(error).__name__}{f' {code}' if code else ''}"


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, OutboxError) else ""


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if cause is None:
            return
        yield cause
        if isinstance(cause, SQLAlchemyError):  # below it is the driver's error, whose code is reported
            return
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
