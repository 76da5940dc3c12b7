"""What becomes of an entry. Pure: every rule about what happened stands here, and nothing else does.

`admit` is asked after a claim, before anything is sent; `decide` after the adapter's answer; `conclude` instead of both where
it is known already, by a person's word or from an earlier claim. Doubt is sticky: once an
attempt may have been executed, only proof ends it (success, or a conclusive rejection); until then the entry may be sent
again under the same key while the service surely remembers that key, and is uncertain after that; where the service can be
looked at, not before a look, of which `looking` decides.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import assert_never

from dispatchers.delivery import (
    FOREVER,
    Deferred,
    Delivered,
    InProgress,
    KeyConflict,
    Memory,
    Outcome,
    Rejected,
    Unknown,
)
from dispatchers.stored_outcome import KEY_CONFLICT, SEND_AGAIN, Known, LookupState
from dispatchers.transitions import (
    AwaitLookup,
    ClaimedEntry,
    End,
    MarkUncertain,
    Retry,
    RetryCallback,
    SendAgain,
    Settle,
    Transition,
)

CANCEL_UNSERVED_AFTER = timedelta(minutes=1)
BACKOFF_FIRST = timedelta(seconds=1)
BACKOFF_MAX = timedelta(minutes=10)
CENTURY = timedelta(days=36_525)  # as good as for ever, and no calendar overflows
VANISHED_MAX = (
    2  # senders in turn that vanished with an entry, until it is no longer sent at once beside the same others
)
DOUBLINGS_MAX = 20  # beyond BACKOFF_MAX already; keeps the power small


def admit(entry: ClaimedEntry, memory: Memory, now: datetime, jitter: float = 1.0) -> Transition | None:
    """Whether `entry` may be sent now: None for yes, else what becomes of it instead. jitter: as for `decide`."""
    change = _refused(entry, memory, now, jitter)
    return change and _look_first(entry, change, memory, now)


def _refused(entry: ClaimedEntry, memory: Memory, now: datetime, jitter: float) -> Transition | None:
    if entry.in_doubt_since is not None:
        if _is_for_one_attempt(memory):
            return _park(entry, entry.attempts, "its sender crashed, and the service keeps no keys")
        last = last_safe_send(entry.in_doubt_since, memory)
        if last is not None and now >= last:
            return _park(entry, entry.attempts, "it may have been sent, and the service may have forgotten its key")
    if entry.attempts >= memory.attempts_max:
        return _end(entry, entry.attempts, f"no answer in {entry.attempts} attempts")
    if crashed_senders(entry) >= VANISHED_MAX:
        return _wait_apart(entry, memory, now, jitter)
    return None


def crashed_senders(entry: ClaimedEntry) -> int:
    """How many senders in turn crashed with it: claims without a result since it was enqueued or last set to wait."""
    stored = entry.outcome.deliveries
    return 0 if stored is None else max(entry.deliveries - stored - 1, 0)


def _wait_apart(entry: ClaimedEntry, memory: Memory, now: datetime, jitter: float) -> Transition:
    """It may be what ends its senders, or only have been under way beside that: each waits for a time of its own.

    No age ends it here: a pause may have stopped that a moment ago, of which nobody here knows yet.
    """
    told = f"{VANISHED_MAX} consecutive senders crashed while sending it"
    ageless = replace(memory, age_max=CENTURY)
    return _wait(entry, ageless, now, jitter, told, None, entry.attempts, entry.maybe_sent, entry.in_doubt_since)


def decide(entry: ClaimedEntry, outcome: Outcome, memory: Memory, now: datetime, jitter: float) -> Transition:
    """What becomes of `entry` after `outcome`.

    now: the database's. jitter: 0 to 1, the share of the backoff that is really waited ("full jitter").
    Source: docs/states.md.
    """
    return _look_first(entry, _decided(entry, outcome, memory, now, jitter), memory, now)


def _decided(entry: ClaimedEntry, outcome: Outcome, memory: Memory, now: datetime, jitter: float) -> Transition:
    attempts = entry.attempts + 1
    match outcome:
        case Delivered(result=result):
            return Settle("delivered", attempts, result=result)
        case Rejected(reason=reason, conclusive=conclusive, result=result):
            # A stored answer speaks for every attempt under this key, not for those under an earlier one.
            proves = conclusive and entry.key_epoch == 0 and remembered(entry.in_doubt_since, memory, now)
            if proves or not entry.maybe_sent:
                return Settle("failed", attempts, result=result, reason=reason)
            told = f"{reason}; but an earlier attempt may have been executed"
            return replace(_park(entry, attempts, told), stored=conclusive)
        case KeyConflict(reason=reason):
            return _doubt(entry, attempts, f"{KEY_CONFLICT}: {reason}", stored=True)
        case Deferred(reason=reason, after=after):
            # Certainly not executed: no attempt, and no news about earlier ones.
            return _wait(
                entry, memory, now, jitter, reason, after, entry.attempts, entry.maybe_sent, entry.in_doubt_since
            )
        case InProgress(after=after):
            reason = "the service is executing this key now"
            return _wait(entry, memory, now, jitter, reason, after, attempts, True, _doubt_began(entry))
        case Unknown(reason=reason, final=True):
            return _doubt(entry, attempts, reason, stored=True)
        case Unknown(reason=reason, after=after):
            if _is_for_one_attempt(memory):
                return _doubt(entry, attempts, f"{reason}; the service keeps no keys")
            return _wait(entry, memory, now, jitter, reason, after, attempts, True, _doubt_began(entry))
        case _:
            assert_never(outcome)


def conclude(entry: ClaimedEntry, known: Known, memory: Memory, fencing_delay: timedelta) -> Transition:
    """What becomes of an entry whose fate is on record; it is not sent.

    quiescence: how long a sender may still be at work that lost its lease; nothing is sent again before.
    """
    attempts = entry.attempts if known.attempts is None else known.attempts
    match known.state:
        case "send_again":
            return _requeue(entry, known, memory, fencing_delay)
        case "uncertain":  # its group blocked when that was written down
            return MarkUncertain(
                known.reason or "",
                attempts,
                entry.maybe_sent,
                entry.in_doubt_since,
                known.stored,
                failure_blocks_group=False,
            )
        case "delivered" | "failed" | "cancelled":
            by_person = known.attempts is None
            end = Settle(known.state, attempts, known.result, known.reason, decided=by_person)
            # By a person's word no group blocks that goes on already; one that has blocked stays so, until it is released.
            return without_block(end) if by_person else end
        case _:
            assert_never(known.state)


def has_no_taker(known: Known, now: datetime) -> bool:
    """Whether an operator's cancellation has waited so long that no process which serves the entry can be at work.

    Such a process would have settled it, with its callbacks; now any process may.
    """
    return (
        known.state == "cancelled" and known.decided_at is not None and now - known.decided_at >= CANCEL_UNSERVED_AFTER
    )


def without_block(change: Transition) -> Transition:
    """The same, but the group of the entry goes on behind it."""
    if isinstance(change, Settle) and change.state == "failed":
        return change._replace(failure_blocks_group=False)
    return replace(change, failure_blocks_group=False) if isinstance(change, MarkUncertain) else change


def keep(entry: ClaimedEntry, end: End, problem: str, jitter: float) -> RetryCallback:
    """What became of it is known, but the callback that must commit with it failed: try that again later."""
    return RetryCallback(end, backoff(entry.deliveries, jitter), f"{_word(end)}, but {problem}")


def release(end: End, why: str) -> RetryCallback:
    """Its outcome is known, but its callback had no turn under this lease: it may have one under the next, at once."""
    return RetryCallback(end, timedelta(0), f"{_word(end)}; {why}", failed=False)


def hand_over(end: End, callback: str) -> RetryCallback:
    """Its outcome is known, and this process does not have its callback: those that have it look for such entries."""
    why = f": {end.reason}" if end.reason else ""
    return RetryCallback(end, CENTURY, f"{_word(end)}{why}; {callback} runs in a process that has it", False, callback)


def _word(end: End) -> str:
    return end.state if isinstance(end, Settle) else "uncertain"


def _requeue(entry: ClaimedEntry, known: Known, memory: Memory, fencing_delay: timedelta) -> SendAgain:
    """The same key while that is worth something, else one that the service has never seen."""
    reason = known.reason or SEND_AGAIN
    sent_at = entry.leased_at + fencing_delay
    last = last_safe_send(entry.in_doubt_since, memory)
    if memory.window is not None and not known.stored and (last is None or sent_at < last):
        return SendAgain(entry.key_epoch, entry.in_doubt_since, fencing_delay, reason)
    return SendAgain(entry.key_epoch + 1, None, fencing_delay, reason)


def remembered(in_doubt_since: datetime | None, memory: Memory, now: datetime) -> bool:
    """Whether the service surely still knows a key that it may first have seen at `in_doubt_since`."""
    if memory.window is None:
        return False
    last = last_safe_send(in_doubt_since, memory)
    return last is None or now < last + memory.timeout


def last_safe_send(in_doubt_since: datetime | None, memory: Memory) -> datetime | None:
    """From when on an entry in doubt is never sent again, or None if there is no such time.

    A send may take `timeout` to reach the service, and clocks drift: both come off the window.
    """
    if in_doubt_since is None or memory.window is None or memory.window is FOREVER:
        return None
    return in_doubt_since + min(memory.window, CENTURY) - memory.timeout - memory.margin


def backoff(tries: int, jitter: float, first: timedelta = BACKOFF_FIRST, most: timedelta = BACKOFF_MAX) -> timedelta:
    """Exponential with full jitter, capped. Source: AWS Architecture Blog, "Exponential Backoff And Jitter"."""
    doublings = min(max(tries - 1, 0), DOUBLINGS_MAX)
    ceiling: timedelta = min(first * 2**doublings, most)
    return ceiling * jitter


def _look_first(entry: ClaimedEntry, change: Transition, memory: Memory, now: datetime) -> Transition:
    """A look before it is given up, where there can be one; by then no sender can be at work any more."""
    if not (isinstance(change, MarkUncertain) and memory.can_look_up) or change.reason.startswith(KEY_CONFLICT):
        return change
    looks = LookupState(change.reason, 0, now + memory.fencing_delay, entry.deliveries, change.stored)
    return AwaitLookup(
        looks, memory.fencing_delay, change.reason, change.attempts, change.maybe_sent, change.in_doubt_since
    )


def _is_for_one_attempt(memory: Memory) -> bool:
    """Whether nothing in doubt is sent again as it is: no key would keep it from happening twice."""
    return memory.window is None and (memory.can_look_up or not memory.at_least_once)


def _wait(
    entry: ClaimedEntry,
    memory: Memory,
    now: datetime,
    jitter: float,
    reason: str,
    after: timedelta | None,
    attempts: int,
    maybe_sent: bool,
    in_doubt_since: datetime | None,
) -> Transition:
    """Send again later, unless a limit is reached; what the service asked for is honoured as far as the limits go."""
    doubtful = entry._replace(maybe_sent=maybe_sent, in_doubt_since=in_doubt_since)
    if attempts >= memory.attempts_max:
        return _end(doubtful, attempts, f"{reason}; {attempts} attempts were allowed")
    age_left = min(memory.age_max, CENTURY) - (now - entry.first_leased_at)
    if age_left <= timedelta(0):
        return _end(doubtful, attempts, f"{reason}; it has been tried for {memory.age_max}")
    delay = min(max(backoff(entry.deliveries, jitter), after or timedelta(0)), age_left)
    last = last_safe_send(in_doubt_since, memory) if maybe_sent else None
    if last is not None:
        before_the_last = last - memory.margin - now
        if before_the_last > timedelta(0):
            delay = min(delay, before_the_last)
        elif now + delay >= last:
            return _park(doubtful, attempts, f"{reason}; the service may forget its key before another attempt")
    return Retry(delay, reason, attempts, maybe_sent, in_doubt_since)


def _end(entry: ClaimedEntry, attempts: int, reason: str) -> Transition:
    """A limit is reached: failed if it certainly did not happen, else uncertain."""
    return _park(entry, attempts, reason) if entry.maybe_sent else Settle("failed", attempts, reason=reason)


def _park(entry: ClaimedEntry, attempts: int, reason: str) -> MarkUncertain:
    return MarkUncertain(reason, attempts, entry.maybe_sent, entry.in_doubt_since)


def _doubt(entry: ClaimedEntry, attempts: int, reason: str, *, stored: bool = False) -> MarkUncertain:
    """Uncertain, with this attempt itself in doubt."""
    return MarkUncertain(reason, attempts, True, _doubt_began(entry), stored)


def _doubt_began(entry: ClaimedEntry) -> datetime:
    """The FIRST attempt under this key whose fate is unknown: its lease's start, which came before its send."""
    return entry.in_doubt_since or entry.leased_at
