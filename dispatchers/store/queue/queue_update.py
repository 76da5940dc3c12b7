"""The new values of a queue row whose lease ends while its entry stays in the queue; for every database. Pure."""

from datetime import datetime, timedelta
from typing import NamedTuple, TypeAlias, assert_never

from dispatchers.stored_outcome import Known, write_outcome
from dispatchers.transitions import (
    AwaitLookup,
    ClaimedEntry,
    End,
    MarkUncertain,
    Release,
    Retry,
    RetryCallback,
    SendAgain,
    Settle,
)

Unsettled: TypeAlias = Retry | MarkUncertain | AwaitLookup | SendAgain | RetryCallback | Release


class QueueUpdate(NamedTuple):
    """The values to write.

    delay: the time until the entry is due; None for never. uncounted: how many deliveries to subtract, because they did not
    take place. reason: for the entry's history. outcome: None keeps the stored one. proof: the effect is known to have
    happened; this is stored even if the lease was lost. by_lookup: a status lookup caused the change. resets_age: the entry's
    age counts from the next claim. callback: the callback that the entry waits for, if this process does not have it.
    known: whether the entry's end is stored, so that nothing is sent.
    """

    state: str
    delay: timedelta | None
    attempts: int
    uncounted: int
    maybe_sent: bool
    in_doubt_since: datetime | None
    key_epoch: int
    reason: str | None
    outcome: str | None
    proof: bool = False
    by_lookup: bool = False
    resets_age: bool = False
    callback: str | None = None
    known: bool = False


def queue_update(entry: ClaimedEntry, change: Unsettled) -> QueueUpdate:
    match change:
        case Release(delay=delay):  # the row becomes what it was before the claim
            state = _state_before(entry)
            outcome = _reason_of_release(entry, change) if change.shown else None
            resets_age = state == "pending"
            return _as_it_was(entry)._replace(
                state=state,
                delay=delay,
                uncounted=1,
                resets_age=resets_age,
                outcome=outcome,
                known=entry.outcome.known is not None,
            )
        case Retry(reason=reason):
            outcome = write_outcome(reason, deliveries=entry.deliveries)
            return _after_attempt(entry, change)._replace(state="retry", outcome=outcome)
        case MarkUncertain(reason=reason, lookup=lookup):
            outcome = write_outcome(reason, stored=change.stored, lookup=lookup)
            return _after_attempt(entry, change)._replace(
                state="uncertain", outcome=outcome, by_lookup=lookup is not None
            )
        case AwaitLookup(reason=reason, lookup=lookup):
            return _after_attempt(entry, change)._replace(
                state="uncertain" if lookup.inconclusive else "retry",
                outcome=write_outcome(reason, lookup=lookup),
                by_lookup=change.looked_up,
            )
        case SendAgain(reason=reason):
            return _after_attempt(entry, change)._replace(
                state="pending",
                key_epoch=change.key_epoch,
                reason=reason if change.absent else None,  # the history has an operator's decision already
                outcome=write_outcome(reason),
                by_lookup=change.absent,
                resets_age=not change.absent,
            )
        case RetryCallback():
            return _callback_retry(entry, change)
        case _:
            assert_never(change)


def _after_attempt(entry: ClaimedEntry, change: Retry | MarkUncertain | AwaitLookup | SendAgain) -> QueueUpdate:
    return _as_it_was(entry)._replace(
        delay=change.delay,
        attempts=change.attempts,
        maybe_sent=change.maybe_sent,
        in_doubt_since=change.in_doubt_since,
        reason=change.reason,
    )


def _callback_retry(entry: ClaimedEntry, change: RetryCallback) -> QueueUpdate:
    end, known = change.end, _known(change.end)
    return _as_it_was(entry)._replace(
        state="uncertain" if known.state == "uncertain" or _is_resolved(entry, known) else "retry",
        delay=change.delay,
        attempts=end.attempts,
        uncounted=0,  # proof may arrive twice, and would be subtracted twice
        maybe_sent=True,  # the effect may have happened, so the app must not cancel the entry
        in_doubt_since=end.in_doubt_since if isinstance(end, MarkUncertain) else entry.in_doubt_since,
        reason=change.reason if change.failed else None,
        outcome=write_outcome(change.reason, stored=known.stored, known=known),
        proof=known.state == "delivered",
        callback=change.callback,
        known=True,
    )


def _as_it_was(entry: ClaimedEntry) -> QueueUpdate:
    return QueueUpdate(
        state="retry",
        delay=None,
        attempts=entry.attempts,
        uncounted=0,
        maybe_sent=entry.maybe_sent,
        in_doubt_since=entry.in_doubt_since,
        key_epoch=entry.key_epoch,
        reason=None,
        outcome=None,
    )


def _state_before(entry: ClaimedEntry) -> str:
    """The entry's state before the claim, which overwrote it: derived from what else is stored."""
    known, lookup = entry.outcome.known, entry.outcome.lookup
    if known is not None and (_is_resolved(entry, known) or (entry.maybe_sent and known.state == "uncertain")):
        return "uncertain"
    if lookup is not None:
        return "uncertain" if lookup.inconclusive else "retry"
    return "pending" if entry.deliveries == 1 else "retry"


def _is_resolved(entry: ClaimedEntry, known: Known) -> bool:
    """Whether an operator has resolved it while it was uncertain. Only an operator's decision has no number of attempts."""
    return entry.maybe_sent and known.attempts is None and known.state != "cancelled"


def _known(end: End) -> Known:
    if isinstance(end, Settle):
        attempts = None if end.decided else end.attempts
        return Known(state=end.state, attempts=attempts, result=end.result, reason=end.reason, looked_up=end.looked_up)
    return Known(state="uncertain", attempts=end.attempts, reason=end.reason, stored=end.stored)


def _reason_of_release(entry: ClaimedEntry, change: Release) -> str | None:
    if change.unread:
        return entry.outcome.with_unread_reason(change.reason)
    if change.served:
        return entry.outcome.with_reason(change.reason)
    return entry.outcome.with_unserved_reason(change.reason)
