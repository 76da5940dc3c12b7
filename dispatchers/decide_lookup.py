"""What becomes of an entry that is being looked for. Pure, as `decide` is for those that are sent.

Nothing is sent while a look is due: `admit_lookup` is asked after the claim, `judge` after the look. A look counts as proof of
absence only if it began when no earlier sender could be at work any more.
"""

from datetime import datetime, timedelta
from typing import assert_never

from dispatchers.decide import CENTURY, backoff, last_safe_send
from dispatchers.delivery import Absent, CannotTell, Finding, Found, Memory
from dispatchers.stored_outcome import LookupState
from dispatchers.transitions import (
    AwaitLookup,
    ClaimedEntry,
    MarkUncertain,
    Release,
    SendAgain,
    Settle,
    Transition,
)

LOOK_FIRST = timedelta(minutes=1)
LOOK_MAX = timedelta(hours=1)
VANISHED_MAX = 3  # looks that took their process along: the next might, too
FOUND = "found at the service"
ABSENT = "not at the service: it will be sent again"
"""How the reasons begin by which those two are known in an entry's history."""


def admit_lookup(
    entry: ClaimedEntry, looks: LookupState, memory: Memory, now: datetime, form: str
) -> Transition | None:
    """Whether this process may look for `entry`: None for yes, else what becomes of it instead.

    form: what its adapter would send it as now. Under another key form or account a look would find nothing.
    """
    if not memory.can_look_up and not looks.made:
        return MarkUncertain(
            f"{looks.why}; this process has no status lookup for it",
            _attempts(entry, looks),
            *_doubt(entry),
            looks.stored,
        )
    if _vanished(entry, looks) >= VANISHED_MAX:
        return _no_look(entry, looks, f"{VANISHED_MAX} consecutive status lookups crashed with their process")
    elsewhere = _elsewhere(entry, memory, form)
    if elsewhere is not None:
        return _no_look(entry, looks, elsewhere) if _is_too_old(looks, memory, now) else Release(elsewhere, LOOK_FIRST)
    return None


def _elsewhere(entry: ClaimedEntry, memory: Memory, form: str) -> str | None:
    """Why only another process may look for it, if so."""
    if not memory.can_look_up:
        return "this process has no status lookup for it"
    if entry.in_doubt_since is not None and entry.sent_as not in (None, form):
        return f"it was sent as {entry.sent_as!r}, and would be looked up as {form!r}"
    return None


def judge(
    entry: ClaimedEntry, looks: LookupState, finding: Finding, memory: Memory, now: datetime, jitter: float
) -> Transition:
    """What becomes of `entry` after a look at the service that began after its claim.

    now: the database's. jitter: as for `decide`. Source: docs/states.md.
    """
    match finding:
        case Found(result=result):
            return Settle("delivered", _attempts(entry, looks), result=result, reason=FOUND, looked_up=True)
        case Absent() if entry.leased_at < looks.quiet_at:
            told = "not at the service yet, but an earlier send may still be in flight"
            return _seek(entry, looks, looks.made, looks.quiet_at - entry.leased_at, told)
        case Absent():
            return _after_absence(entry, looks, memory, now)
        case CannotTell(reason=reason):
            return _still_uncertain(entry, looks, memory, now, jitter, f"status lookup inconclusive: {reason}")
        case _:
            assert_never(finding)


def _after_absence(entry: ClaimedEntry, looks: LookupState, memory: Memory, now: datetime) -> Transition:
    """It is sent again, unless a limit is reached. What was sent under an earlier key may not have been looked for."""
    attempts, proved = _attempts(entry, looks), entry.key_epoch == 0
    limit = _limit(entry, attempts, memory, now)
    if limit is not None and proved:
        return Settle("failed", attempts, reason=f"not at the service, and {limit}", looked_up=True)
    if limit is not None:
        return _no_look(entry, looks, f"it is not at the service under its present key, and {limit}")
    epoch = entry.key_epoch + (not _same_key_is_good(entry, looks, memory, now))
    key = "the same key" if epoch == entry.key_epoch else "a new key"
    told = f"{ABSENT}, under {key}"
    delay = memory.fencing_delay if _may_be_overtaken(entry, looks) else timedelta(0)
    return SendAgain(epoch, None, delay, told, attempts, maybe_sent=not proved, absent=True)


def _may_be_overtaken(entry: ClaimedEntry, looks: LookupState) -> bool:
    """Whether its group may have gone on while it was uncertain: then another one is under way, perhaps, for a lease at most."""
    return entry.position is not None and looks.made > 0


def _same_key_is_good(entry: ClaimedEntry, looks: LookupState, memory: Memory, now: datetime) -> bool:
    """While the service remembers it, or where it knows none: a frozen sender of old then meets the same key."""
    last = last_safe_send(entry.in_doubt_since, memory)
    return not looks.stored and (last is None or now < last)


def _limit(entry: ClaimedEntry, attempts: int, memory: Memory, now: datetime) -> str | None:
    if attempts >= memory.attempts_max:
        return f"{attempts} attempts were allowed"
    if now - entry.first_leased_at >= min(memory.age_max, CENTURY):
        return f"it has been tried for {memory.age_max}"
    return None


def _still_uncertain(
    entry: ClaimedEntry, looks: LookupState, memory: Memory, now: datetime, jitter: float, told: str
) -> Transition:
    if _is_too_old(looks, memory, now):
        return _no_look(entry, looks, told)
    # Half of it at least: a service that could not tell just now cannot tell at once.
    delay = backoff(looks.made + 1, 0.5 + jitter / 2, LOOK_FIRST, LOOK_MAX)
    return _uncertain(entry, looks, delay, told)


def _no_look(entry: ClaimedEntry, looks: LookupState, told: str) -> Transition:
    """A person has to decide. That it was looked for stays on record, so that nobody begins anew."""
    return _uncertain(entry, looks, None, told)


def _uncertain(entry: ClaimedEntry, looks: LookupState, delay: timedelta | None, told: str) -> Transition:
    """It may already be: then nothing ends, and no callback is called again."""
    made = looks.made + 1
    if looks.made:
        return _seek(entry, looks, made, delay, told)
    renewed = looks._replace(made=made, deliveries=entry.deliveries)
    attempts = _attempts(entry, looks)
    return MarkUncertain(f"{looks.why}; {told}", attempts, *_doubt(entry), looks.stored, renewed, delay)


def _seek(entry: ClaimedEntry, looks: LookupState, made: int, delay: timedelta | None, told: str) -> AwaitLookup:
    renewed = looks._replace(made=made, deliveries=entry.deliveries)
    return AwaitLookup(renewed, delay, f"{looks.why}; {told}", _attempts(entry, looks), *_doubt(entry), looked_up=True)


def _doubt(entry: ClaimedEntry) -> tuple[bool, datetime | None]:
    return entry.maybe_sent, entry.in_doubt_since


def _is_too_old(looks: LookupState, memory: Memory, now: datetime) -> bool:
    return now - looks.quiet_at >= min(memory.age_max, CENTURY)


def _vanished(entry: ClaimedEntry, looks: LookupState) -> int:
    """How many looks ended with their process since this was written down: claims that nothing came of."""
    return max(entry.deliveries - looks.deliveries - 1, 0)


def _attempts(entry: ClaimedEntry, looks: LookupState) -> int:
    """Without the looks that vanished, each of which the next claim counted as an attempt."""
    return entry.attempts - _vanished(entry, looks)
