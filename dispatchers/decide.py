"""What becomes of an entry. Pure: every rule about what happened stands here, and nothing else does.

`admit` is asked after a claim, before anything is sent; `decide` after the adapter's answer. Doubt is sticky: once an
attempt may have been executed, only proof ends it (success, or a conclusive rejection); until then the entry may be sent
again under the same key while the service surely remembers that key, and is uncertain after that.
"""

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
from dispatchers.lifecycle import Claimed, Park, Settle, Transition, Wait

BACKOFF_FIRST = timedelta(seconds=1)
BACKOFF_MAX = timedelta(minutes=10)
CENTURY = timedelta(days=36_525)  # as good as for ever, and no calendar overflows
DOUBLINGS_MAX = 20  # beyond BACKOFF_MAX already; keeps the power small


def admit(entry: Claimed, memory: Memory, now: datetime) -> Transition | None:
    """Whether `entry` may be sent now: None for yes, else what becomes of it instead."""
    if not entry.maybe_sent:
        return _end(entry, entry.attempts, "sent too often") if entry.attempts >= memory.attempts_max else None
    if memory.window is None and not memory.at_least_once:
        return _park(entry, entry.attempts, "its sender vanished, and the service keeps no keys")
    last = last_safe_send(entry.in_doubt_since, memory)
    if last is not None and now >= last:
        return _park(entry, entry.attempts, "it may have been sent, and the service may have forgotten its key")
    if entry.attempts >= memory.attempts_max:
        return _end(entry, entry.attempts, f"no answer in {entry.attempts} attempts")
    return None


def decide(entry: Claimed, outcome: Outcome, memory: Memory, now: datetime, jitter: float) -> Transition:
    """What becomes of `entry` after `outcome`.

    now: the database's. jitter: 0 to 1, the share of the backoff that is really waited ("full jitter").
    Source: docs/states.md.
    """
    attempts = entry.attempts + 1
    match outcome:
        case Delivered(result=result):
            return Settle("delivered", attempts, result=result)
        case Rejected(reason=reason, conclusive=conclusive, result=result):
            if not entry.maybe_sent or (conclusive and remembered(entry.in_doubt_since, memory, now)):
                return Settle("failed", attempts, result=result, reason=reason)
            return _park(entry, attempts, f"{reason}; but an earlier attempt may have been executed")
        case KeyConflict(reason=reason):
            return _doubt(entry, attempts, f"the service holds this key for another request: {reason}")
        case Deferred(reason=reason, after=after):
            # Certainly not executed: no attempt, and no news about earlier ones.
            return _wait(
                entry, memory, now, jitter, reason, after, entry.attempts, entry.maybe_sent, entry.in_doubt_since
            )
        case InProgress(after=after):
            reason = "the service is executing this key now"
            return _wait(entry, memory, now, jitter, reason, after, attempts, True, _doubt_began(entry))
        case Unknown(reason=reason, final=True):
            return _doubt(entry, attempts, reason)
        case Unknown(reason=reason, after=after):
            if memory.window is None and not memory.at_least_once:
                return _doubt(entry, attempts, f"{reason}; the service keeps no keys")
            return _wait(entry, memory, now, jitter, reason, after, attempts, True, _doubt_began(entry))
        case _:
            assert_never(outcome)


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


def backoff(deliveries: int, jitter: float) -> timedelta:
    """Exponential with full jitter, capped. Source: AWS Architecture Blog, "Exponential Backoff And Jitter"."""
    doublings = min(max(deliveries - 1, 0), DOUBLINGS_MAX)
    ceiling: timedelta = min(BACKOFF_FIRST * 2**doublings, BACKOFF_MAX)
    return ceiling * jitter


def _wait(
    entry: Claimed,
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
        if now >= last:
            return _park(doubtful, attempts, f"{reason}; the service may forget its key before another attempt")
        delay = min(delay, max(last - memory.margin - now, timedelta(0)))
    return Wait(delay, reason, attempts, maybe_sent, in_doubt_since)


def _end(entry: Claimed, attempts: int, reason: str) -> Transition:
    """A limit is reached: failed if it certainly did not happen, else uncertain."""
    return _park(entry, attempts, reason) if entry.maybe_sent else Settle("failed", attempts, reason=reason)


def _park(entry: Claimed, attempts: int, reason: str) -> Park:
    return Park(reason, attempts, entry.maybe_sent, entry.in_doubt_since)


def _doubt(entry: Claimed, attempts: int, reason: str) -> Park:
    """Uncertain, with this attempt itself in doubt."""
    return Park(reason, attempts, True, _doubt_began(entry))


def _doubt_began(entry: Claimed) -> datetime:
    """The FIRST attempt under this key whose fate is unknown: its lease's start, which came before its send."""
    return entry.in_doubt_since or entry.leased_at
