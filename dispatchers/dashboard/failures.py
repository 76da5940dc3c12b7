"""A request that cannot be answered: its status, code and text, from the error that was raised."""

import logging
from dataclasses import dataclass
from typing import Any

from sqlalchemy.exc import DBAPIError, TimeoutError
from starlette.exceptions import HTTPException

from dispatchers.errors import DecisionRefused, EntryNotFound
from dispatchers.store.connections.outage_log import cause_of, is_outage
from outbox.errors import ConfigurationError, InvalidValue, NotSerializable, OutboxError, SchemaError
from outbox.sql.errors.driver import sqlstate

log = logging.getLogger("outbox.dashboard")

PROBLEM = "application/problem+json"  # RFC 9457, section 3
QUERY_CANCELED = "57014"  # PostgreSQL, appendix A: by statement_timeout
NO_PRIVILEGE = "42501"
CONFLICTS = ("55P03", "40P01", "40001")  # lock_timeout, a deadlock, a serialization failure
NOT_DEFINED = ("42P01", "42703", "42883")  # a table, a column, a function

TITLES = {
    400: "This address cannot be read",
    401: "You are not signed in",
    403: "You may not do this",
    404: "Not found",
    405: "This address does not accept this method",
    409: "The state does not allow this",
    413: "The request is too large",
    415: "The request's media type is not supported",
    422: "A value is not valid",
    500: "The dashboard has an error",
    503: "The database did not answer",
}


@dataclass(slots=True)
class Failure(Exception):
    """status: the HTTP status. code: its name for programs. detail: what happened and what to do. field: the wrong parameter.

    page: where the user reads what is true now, below the dashboard's prefix.
    """

    status: int
    code: str
    detail: str
    field: str | None = None
    page: str | None = None

    @property
    def title(self) -> str:
        return TITLES.get(self.status, "The request was refused")

    def problem(self) -> dict[str, Any]:
        """The problem document."""
        members = {"title": self.title, "status": self.status, "code": self.code, "detail": self.detail}
        return members | ({} if self.field is None else {"field": self.field})


def failure_of(error: Exception) -> Failure:
    """What the user reads about an error. An unexpected one is logged with its traceback."""
    match error:
        case Failure():
            return error
        case HTTPException():
            return Failure(error.status_code, _code(error.status_code), _page_text(error))
        case EntryNotFound():
            return Failure(404, "not_found", str(error))
        case DecisionRefused():
            return Failure(409, "wrong_state", str(error))
        case InvalidValue():
            return Failure(422, "invalid", str(error), error.field)
        case NotSerializable():
            return Failure(422, "invalid", str(error))
        case SchemaError():
            return Failure(503, "schema", str(error))
        case OutboxError() if not isinstance(error, ConfigurationError):
            return Failure(409, "refused", str(error))
        case DBAPIError() | TimeoutError():
            return _of_database(error)
        case _:
            log.error("a page of the dashboard failed: the traceback follows", exc_info=error)
            return Failure(500, "error", "the process that serves the dashboard has logged the error")


def _code(status: int) -> str:
    return {401: "not_signed_in", 403: "forbidden", 404: "not_found", 405: "method"}.get(status, "refused")


def _page_text(error: HTTPException) -> str:
    return "there is no page at this address" if error.status_code == 404 else error.detail


def _of_database(error: DBAPIError | TimeoutError) -> Failure:
    code = sqlstate(getattr(error, "orig", None))
    if code == QUERY_CANCELED:
        return Failure(
            503,
            "too_slow",
            "the query took longer than the dashboard allows: narrow the filter, or search fewer rows, and try again",
        )
    if code in CONFLICTS:
        return Failure(
            503,
            "locked",
            "another transaction holds the row that this decision needs, perhaps a dispatcher's: nothing was changed; try again",
        )
    if code == NO_PRIVILEGE:
        return Failure(
            403,
            "database_role",
            "the database role of this dashboard may not do this: `outbox db roles` prints the rights of each role",
        )
    if code in NOT_DEFINED:
        log.error(
            "the dashboard needs a table or column that does not exist: %s; run `outbox db upgrade`",
            cause_of(error),
            exc_info=error,
        )
        return Failure(503, "schema", "the outbox's tables are of another release: run `outbox db upgrade`")
    if isinstance(error, TimeoutError) or is_outage(error):
        log.warning("the database is unavailable for the dashboard: %s", cause_of(error))
        return Failure(
            503, "database_down", f"the database is unavailable: {cause_of(error)}; reload the page to try again"
        )
    log.error("a statement of the dashboard failed: %s", cause_of(error), exc_info=error)
    return Failure(500, "database", f"the database refused a statement: {cause_of(error)}")
