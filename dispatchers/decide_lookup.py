"""The policy of status lookups, for an entry that may have been executed and whose service can be asked. Pure.

Nothing is sent while a lookup is due: `admit_lookup` is asked after the claim, `judge` after the lookup. `decide.py` calls both.
A lookup proves absence only if it began when no earlier sender could be running any more.
"""

from datetime import datetime, timedelta
from typing import assert_never

from dispatchers.delivery import Absent, CannotTell, Finding, Found
from dispatchers.stored_outcome import LookupState
from dispatchers.time_limits import CENTURY, Memory, backoff, last_safe_send
from dispatchers.transitions import AwaitLookup, ClaimedEntry, MarkUncertain, Release, SendAgain, Settle, Transition

LOOKUP_FIRST = timedelta(minutes=1)
MAX_LOOKUP = timedelta(hours=1)
MAX_CRASHES = 3  # lookups in turn that ended with their process: the next might crash it, too
FOUND = "found at the service"
ABSENT = "not at the service: it will be sent again"
"""How the reasons begin by which those two are known in an entry's history."""


def admit_lookup(entry: ClaimedEntry, state: LookupState, memory: Memory, now: datetime) -> Transition | None:
    """None if this process may look `entry` up now, else the transition instead.

    Under another key form or account than `memory.form` a lookup would find nothing.
    """
    if not memory.can_look_up and not state.inconclusive:
        reason = f"{state.why}; this process has no status lookup for it"
        return MarkUncertain(reason, _attempts(entry, state), *_doubt(entry), state.stored)
    if _crashes(entry, state) >= MAX_CRASHES:
        return _give_up(entry, state, f"{MAX_CRASHES} consecutive status lookups crashed with their process")
    elsewhere = _elsewhere(entry, memory)
    if elsewhere is None:
        return None
    return _give_up(entry, state, elsewhere) if _is_too_old(state, memory, now) else Release(elsewhere, LOOKUP_FIRST)


def _elsewhere(entry: ClaimedEntry, memory: Memory) -> str | None:
    if not memory.can_look_up:
        return "this process has no status lookup for it"
    if entry.in_doubt_since is not None and entry.sent_as not in (None, memory.form):
        return f"it was sent as {entry.sent_as!r}, and would be looked up as {memory.form!r}"
    return None


def judge(
    entry: ClaimedEntry, state: LookupState, finding: Finding, memory: Memory, now: datetime, jitter: float
) -> Transition:
    """The transition of `entry` after a status lookup that began after its claim.

    now: the database's. jitter: as for `decide`. Source: docs/how-it-works.md.
    """
    match finding:
        case Found(result=result):
            return Settle("delivered", _attempts(entry, state), result=result, reason=FOUND, looked_up=True)
        case Absent() if entry.leased_at < state.fenced_at:
            reason = "not at the service yet, but an earlier send may still be in flight"
            return _await(entry, state, state.inconclusive, state.fenced_at - entry.leased_at, reason)
        case Absent():
            return _after_absence(entry, state, memory, now)
        case CannotTell(reason=reason):
            return _after_no_answer(entry, state, memory, now, jitter, f"status lookup inconclusive: {reason}")
        case _:
            assert_never(finding)


def _after_absence(entry: ClaimedEntry, state: LookupState, memory: Memory, now: datetime) -> Transition:
    """It is sent again, unless a limit is reached. What was sent under an earlier key may not have been looked up."""
    attempts, proved = _attempts(entry, state), entry.key_epoch == 0
    limit = _limit(entry, attempts, memory, now)
    if limit is not None and proved:
        return Settle("failed", attempts, reason=f"not at the service, and {limit}", looked_up=True)
    if limit is not None:
        return _give_up(entry, state, f"it is not at the service under its present key, and {limit}")
    epoch = entry.key_epoch + (not _same_key_is_good(entry, state, memory, now))
    key = "the same key" if epoch == entry.key_epoch else "a new key"
    delay = memory.fencing_delay if _may_be_overtaken(entry, state) else timedelta(0)
    return SendAgain(epoch, None, delay, f"{ABSENT}, under {key}", attempts, maybe_sent=not proved, absent=True)


def _may_be_overtaken(entry: ClaimedEntry, state: LookupState) -> bool:
    """Whether its group may have continued while it was uncertain: then another entry may be in flight, for a lease at most."""
    return entry.position is not None and state.inconclusive > 0


def _same_key_is_good(entry: ClaimedEntry, state: LookupState, memory: Memory, now: datetime) -> bool:
    """While the service remembers it, or has never received it: an old sender that resumes then meets the same key."""
    last = last_safe_send(entry.in_doubt_since, memory)
    return not state.stored and (last is None or now < last)


def _limit(entry: ClaimedEntry, attempts: int, memory: Memory, now: datetime) -> str | None:
    if attempts >= memory.max_attempts:
        return f"the limit of {attempts} attempts is reached"
    if now - entry.first_leased_at >= min(memory.max_age, CENTURY):
        return f"the age limit of {memory.max_age} is reached"
    return None


def _after_no_answer(
    entry: ClaimedEntry, state: LookupState, memory: Memory, now: datetime, jitter: float, reason: str
) -> Transition:
    if _is_too_old(state, memory, now):
        return _give_up(entry, state, reason)
    # At least half of the backoff: a service that could not answer just now cannot answer at once.
    delay = backoff(state.inconclusive + 1, 0.5 + jitter / 2, LOOKUP_FIRST, MAX_LOOKUP)
    return _uncertain(entry, state, delay, reason)


def _give_up(entry: ClaimedEntry, state: LookupState, reason: str) -> Transition:
    """An operator must decide. That it was looked up stays stored, so that no process starts over."""
    return _uncertain(entry, state, None, reason)


def _uncertain(entry: ClaimedEntry, state: LookupState, delay: timedelta | None, reason: str) -> Transition:
    """If it is uncertain already, nothing ends, and no callback is called again."""
    inconclusive = state.inconclusive + 1
    if state.inconclusive:
        return _await(entry, state, inconclusive, delay, reason)
    renewed = state._replace(inconclusive=inconclusive, deliveries=entry.deliveries)
    attempts = _attempts(entry, state)
    return MarkUncertain(f"{state.why}; {reason}", attempts, *_doubt(entry), state.stored, renewed, delay)


def _await(
    entry: ClaimedEntry, state: LookupState, inconclusive: int, delay: timedelta | None, reason: str
) -> AwaitLookup:
    renewed = state._replace(inconclusive=inconclusive, deliveries=entry.deliveries)
    attempts = _attempts(entry, state)
    return AwaitLookup(renewed, delay, f"{state.why}; {reason}", attempts, *_doubt(entry), looked_up=True)


def _doubt(entry: ClaimedEntry) -> tuple[bool, datetime | None]:
    return entry.maybe_sent, entry.in_doubt_since


def _is_too_old(state: LookupState, memory: Memory, now: datetime) -> bool:
    return now - state.fenced_at >= min(memory.max_age, CENTURY)


def _crashes(entry: ClaimedEntry, state: LookupState) -> int:
    """How many lookups ended with their process since the state was stored: claims without a result."""
    return max(entry.deliveries - state.deliveries - 1, 0)


def _attempts(entry: ClaimedEntry, state: LookupState) -> int:
    """Without the lookups that crashed, each of which the next claim counted as an attempt."""
    return entry.attempts - _crashes(entry, state)
