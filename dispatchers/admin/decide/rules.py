"""Which decision an operator may make about an entry in which state, and why not. Pure.

One decision and a decision in bulk ask here. Each function takes the entry's row of the queue, or its settlement, and returns
None if the decision is allowed, else the reason why not.
"""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Literal, TypeAlias

from sqlalchemy import Row

from dispatchers.stored_outcome import SEND_AGAIN, MalformedOutcome, read_outcome
from outbox.encryption import UNOPENED
from outbox.times import NEVER

Verdict: TypeAlias = Literal["happened", "did_not_happen", "send_again"]

RESOLVED_STATES: Mapping[Verdict, Any] = {"happened": "delivered", "did_not_happen": "failed", "send_again": SEND_AGAIN}
"""What the entry becomes."""

SUSPENDED_DATABASE = (
    "sending is suspended and the database may have lost the record of a send:"
    " run `outbox resume --after-restore` first"
)
ENDED = "it has ended, and that is final"
MALFORMED = "what the queue has stored of it cannot be read: `outbox verify` reports it"


def why_not(action: str, row: Row[Any], verdict: Verdict | None = None, *, is_suspended: bool) -> str | None:
    """The rule for retry, cancel, resolve or release. verdict: of resolve. is_suspended: whether all sending is suspended."""
    match action:
        case "retry":
            return why_not_retry(row)
        case "cancel":
            return why_not_cancel(row, is_suspended=is_suspended)
        case "resolve":
            return why_not_resolve(row, verdict)
        case _:
            return why_not_release(row)


def why_not_in_bulk(
    action: str, row: Row[Any], now: datetime, verdict: Verdict | None = None, *, is_suspended: bool
) -> str | None:
    """`why_not`, or that it is decided already: so a decision in bulk may be repeated, or made by two operators."""
    try:
        if (why := why_not(action, row, verdict, is_suspended=is_suspended)) is not None:
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


def why_not_resolve(row: Row[Any], verdict: Verdict | None = None) -> str | None:
    """verdict: None for any. Of an entry whose key is lost, what is recorded already is kept."""
    if not is_unopened(row):
        return _why_not_in(row, {"uncertain"}, "only an uncertain entry can be resolved")
    if verdict == "send_again":
        return "it cannot be decrypted, so it cannot be sent again"
    known = read_outcome(row.outcome).known
    recorded = None if known is None or known.attempts is None else known.state
    if verdict is not None and recorded in RESOLVED_STATES.values() and RESOLVED_STATES[verdict] != recorded:
        return f"its outcome is recorded as {recorded}, and only its callback is due"
    return _why_not_in(row, {"pending", "retry"}, "")


def is_unopened(row: Row[Any]) -> bool:
    """Whether it waits because it cannot be decrypted, although it may have been sent, or its outcome is stored."""
    is_waiting = row.state in ("pending", "retry") and row.maybe_sent
    return is_waiting and (read_outcome(row.outcome).reason or "").startswith(UNOPENED)


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
