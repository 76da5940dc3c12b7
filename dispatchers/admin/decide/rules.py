"""Which decision an operator may make about an entry in which state, and why not. Pure.

One decision and a decision in bulk ask here. Each function takes the entry's row of the queue, or its settlement, and returns
None if the decision is allowed, else the reason why not.
"""

from collections.abc import Collection
from datetime import datetime
from typing import Any

from sqlalchemy import Row

from dispatchers.stored_outcome import MalformedOutcome, read_outcome
from outbox.times import NEVER

SUSPENDED_DATABASE = (
    "sending is suspended and the database may have lost the record of a send:"
    " run `outbox resume --after-restore` first"
)
ENDED = "it has ended, and that is final"
MALFORMED = "what the queue has stored of it cannot be read: `outbox verify` reports it"


def why_not(action: str, row: Row[Any], *, is_suspended: bool) -> str | None:
    """The rule for retry, cancel, resolve or release. is_suspended: whether sending is, in the whole database."""
    match action:
        case "retry":
            return why_not_retry(row)
        case "cancel":
            return why_not_cancel(row, is_suspended=is_suspended)
        case "resolve":
            return why_not_resolve(row)
        case _:
            return why_not_release(row)


def why_not_in_bulk(action: str, row: Row[Any], now: datetime, *, is_suspended: bool) -> str | None:
    """`why_not`, or that it is decided already: so a decision in bulk may be repeated, or made by two operators."""
    try:
        if (why := why_not(action, row, is_suspended=is_suspended)) is not None:
            return why
        known = read_outcome(row.outcome).known
    except MalformedOutcome:
        return MALFORMED
    if known is not None and known.attempts is None and action != "release":
        return f"an operator has decided that it is {known.state}; a running dispatcher carries that out"
    if action == "retry" and row.due_at <= now:
        return "it is due already"
    return None


def why_not_retry(row: Row[Any]) -> str | None:
    known = read_outcome(row.outcome).known
    if known is not None and known.attempts is None:
        return f"an operator has decided that it is {known.state}; a running dispatcher carries that out"
    if row.state == "uncertain":
        return "it may have happened: check with the service, then `resolve` it"
    if why := _why_not_in(row, {"pending", "retry"}, "only a waiting entry can be retried"):
        return why
    if row.state == "pending" and row.maybe_sent:
        return "it will be sent again, when no earlier send is in flight any more"
    if row.position is not None and row.due_at == NEVER:
        return "it is blocked by an earlier entry of its ordering group, which `show` prints"
    return None


def why_not_cancel(row: Row[Any], *, is_suspended: bool) -> str | None:
    """is_suspended: whether sending is, in the whole database."""
    known = read_outcome(row.outcome).known
    if known is not None and known.attempts is not None:
        return f"its outcome is recorded as {known.state}, and only its callback is due"
    if why := _why_not_in(row, {"pending", "retry"}, "only a waiting entry can be cancelled"):
        return why
    if row.maybe_sent:
        return "it may have been sent, so it cannot be cancelled"
    return SUSPENDED_DATABASE if is_suspended else None


def why_not_resolve(row: Row[Any]) -> str | None:
    return _why_not_in(row, {"uncertain"}, "only an uncertain entry can be resolved")


def why_not_release(row: Row[Any]) -> str | None:
    return "it is not suspended" if row.suspended_reason is None else None


def _why_not_in(row: Row[Any], states: Collection[str], otherwise: str) -> str | None:
    if row.state == "sending":
        return "a send or a status lookup is in flight; try again when it has ended"
    if row.state not in states:
        return otherwise
    if row.suspended_reason is not None:
        return f"it is suspended ({row.suspended_reason}): `release` it first"
    return None
