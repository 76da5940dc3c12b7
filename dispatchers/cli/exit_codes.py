"""How a command ends: its exit status, and which error ends with which. The table in docs/cli.md is this one."""

import json
from typing import NamedTuple

import click

DONE = 0
REFUSED = 1  # by the outbox or the database: the text says why
USAGE = 2  # the command line itself is wrong; click's own number for it
NOT_FOUND = 3
WRONG_STATE = 4  # the entry's state does not allow the decision
UNCERTAIN = 5  # `outbox status --exit-code` found an uncertain entry, or sending is suspended

VIOLATED = 6  # `outbox verify` found a row that breaks a rule
UNHEALTHY = 7  # `outbox doctor` found an error or a warning, or a check failed

JSON = "outbox.json"
"""The key in click's context that says whether the output is JSON."""


class NothingFound(click.ClickException):
    """The requested object does not exist."""

    exit_code = NOT_FOUND


class Failure(NamedTuple):
    """status: the exit status. code: its name in JSON. message: what the user reads."""

    status: int
    code: str
    message: str

    def text(self, *, as_json: bool) -> str:
        if as_json:
            return json.dumps({"error": {"code": self.code, "message": self.message}})
        return f"outbox: {self.message}"


def failure_of(error: Exception) -> Failure | None:
    """The message for an error that a user can fix; None if the error needs its traceback."""
    if isinstance(error, click.ClickException):
        codes = {REFUSED: "refused", USAGE: "usage", NOT_FOUND: "not_found"}
        return Failure(error.exit_code, codes[error.exit_code], error.format_message())
    from sqlalchemy.exc import DBAPIError

    from dispatchers.errors import DecisionRefused, EntryNotFound
    from dispatchers.store.connections.outage_log import cause_of
    from dispatchers.store.queue.row_errors import is_conflict
    from outbox.errors import OutboxError
    from outbox.sql.mariadb.errors import leaves_cluster

    match error:
        case EntryNotFound():
            return Failure(NOT_FOUND, "not_found", str(error))
        case DecisionRefused():
            return Failure(WRONG_STATE, "wrong_state", str(error))
        case OutboxError():
            return Failure(REFUSED, "refused", str(error))
        case DBAPIError():
            if leaves_cluster(error.orig):
                return Failure(REFUSED, "database", f"database unavailable: {cause_of(error)}")
            # Not the whole: SQLAlchemy's text shows the statement's parameters, and a driver's further lines show values.
            first_line = (str(error.orig).strip() or type(error.orig).__name__).splitlines()[0]
            again = "; another transaction was preferred, and this one undone: run the command again"
            return Failure(REFUSED, "database", f"database error: {first_line}{again if is_conflict(error) else ''}")
        case _:
            return None
