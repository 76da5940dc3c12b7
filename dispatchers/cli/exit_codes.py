"""How a command ends: its exit status, and which error ends with which. The table in docs/cli.md is this one."""

import json
from typing import NamedTuple

import click

DONE = 0
REFUSED = 1  # by the outbox or the database: the text says why
USAGE = 2  # the command line itself is wrong; click's own number for it
NOT_FOUND = 3
WRONG_STATE = 4  # the entry's state does not allow the decision
UNCERTAIN = 5  # `outbox status --exit-code` found something that needs a look: uncertain, or every dispatcher holds

VIOLATED = 6  # `outbox verify` found a row that breaks a rule

JSON = "outbox.json"
"""Under this name click's context knows whether the answer is to be JSON."""


class NothingFound(click.ClickException):
    """What was asked for is not there."""

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
    """What a user is told of `error`; None if it is one that only its trace explains."""
    if isinstance(error, click.ClickException):
        codes = {REFUSED: "refused", USAGE: "usage", NOT_FOUND: "not_found"}
        return Failure(error.exit_code, codes[error.exit_code], error.format_message())
    from sqlalchemy.exc import DBAPIError

    from outbox.errors import DecisionRefused, EntryNotFound, OutboxError

    match error:
        case EntryNotFound():
            return Failure(NOT_FOUND, "not_found", str(error))
        case DecisionRefused():
            return Failure(WRONG_STATE, "wrong_state", str(error))
        case OutboxError():
            return Failure(REFUSED, "refused", str(error))
        case DBAPIError():
            return Failure(REFUSED, "database", f"the database says: {_first_line(error.orig)}")
        case _:
            return None


def _first_line(error: BaseException | None) -> str:
    """Not the whole: SQLAlchemy's text shows the statement's parameters, and a driver's further lines show values."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
