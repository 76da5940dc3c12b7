"""The policy: what a process does with a claimed entry, and the state transition after the answer. Pure.

After a claim, `plan` decides: send the entry, look it up at the service, or end its lease in another way. After a send,
`decide` decides from the outcome; after a status lookup, `decide_lookup` decides from the finding.

Doubt stays until there is proof. Once an attempt may have been executed, only a success or a conclusive rejection ends the
doubt. Until then the entry may be sent again under the same key while the service certainly remembers that key. After that it
is uncertain. If the adapter has a status lookup, a lookup comes first. `decide_lookup.py` holds the rules of lookups.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import assert_never

from dispatchers.decide_lookup import admit_lookup, judge
from dispatchers.delivery import Deferred, Delivered, Finding, InProgress, KeyConflict, Outcome, Rejected, Unknown
from dispatchers.stored_outcome import KEY_CONFLICT, SEND_AGAIN, Known, LookupState
from dispatchers.time_limits import CENTURY, Memory, backoff, last_safe_send, remembered, same_key_is_safe
from dispatchers.transitions import (
    AwaitLookup,
    ClaimedEntry,
    End,
    Lookup,
    MarkUncertain,
    Plan,
    Release,
    Retry,
    RetryCallback,
    Send,
    SendAgain,
    Settle,
    Transition,
)
from outbox.encryption import NO_KEYS, UNOPENED, is_sealed

CANCEL_UNSERVED_AFTER = timedelta(minutes=1)
CANCELLED_DELAY = timedelta(seconds=2)  # until an entry is claimed again that an operator cancelled and others serve
UNOPENED_DELAY = timedelta(seconds=30)  # until an entry is claimed again that could not be decrypted
PINNED_DELAY = timedelta(seconds=2)  # until an entry is claimed again that was sent in another form, as in a deploy
UNREAD_DELAYS = (timedelta(seconds=2), timedelta(minutes=1))  # a quarter of the time that it has waited, within these
FOREIGN_DELAY = timedelta(days=1)  # until an entry of another env is claimed, and reported, again
MAX_CRASHES = 2  # consecutive senders that crashed with an entry; then it is no longer sent with the same others
CANCELLED_IN_DOUBT = "an operator cancelled it after the database was restored, but it may have been sent before"
TOO_LATE = "it may have been sent, and the service may have forgotten its key"
FIRST_SEND = Send()


# --- after the claim


def plan(entry: ClaimedEntry, memory: Memory, now: datetime, jitter: float, *, env: str, alike: bool) -> Plan:
    """Decide what a process does with an entry that it has claimed and serves.

    memory: what its adapter declares.
    now: the database's time.
    jitter: as for `decide`; unused at an entry's first claim.
    env: this deployment's name.
    alike: whether the adapter would send it now in the form in which it may have been sent before.
    """
    stored = entry.outcome
    if entry.env != env and (stored.known is None or stored.known.state == SEND_AGAIN):
        return Release(_foreign(entry, env), FOREIGN_DELAY, shown=True)
    if stored.known is not None:
        return _in_group(conclude(entry, stored.known, memory), memory)
    if stored.lookup is not None:
        refused = admit_lookup(entry, stored.lookup, memory, now)
        return Lookup(stored.lookup) if refused is None else _in_group(refused, memory)
    if entry.in_doubt_since is not None and not alike:
        return _in_group(_wait_for_form(entry, memory, now), memory)
    if entry.deliveries == 1 and not entry.maybe_sent:
        return FIRST_SEND  # no rule can refuse what was never claimed before, if the database remembers everything
    refused = admit(entry, memory, now, jitter)
    if refused is not None:
        return _in_group(refused, memory)
    return Send(before=last_safe_send(entry.in_doubt_since, memory))


def leave(entry: ClaimedEntry, reason: str) -> Settle | Release:
    """The transition of an entry that this process does not serve. Other processes may serve it.

    This process carries out only an operator's cancellation that no other process has carried out for a long time. A claim
    includes cancelled entries, so the entry is due again a moment later, not at once.
    """
    known = entry.outcome.known
    if known is not None and is_left_alone(known, entry.leased_at) and not _is_cancelled_in_doubt(entry, known):
        return Settle("cancelled", entry.attempts, reason=known.reason, decided=True)
    return Release(reason, timedelta(0) if known is None else CANCELLED_DELAY, shown=True)


def leave_unopened(entry: ClaimedEntry, step: Plan, why: str) -> Settle | MarkUncertain | AwaitLookup | Release:
    """The transition of an entry that this process cannot decrypt, or whose result it could not encrypt: nothing is sent.

    step: what `plan` wants. It is made if it needs neither payload nor result, so that an entry whose key is lost can become
    uncertain, or wait for a lookup, and can end as an operator decided. A cancelled one first waits, as in `leave`, for a process
    that has its key.
    why: the reason, which the entry shows.
    """
    change = leave(entry, why)
    if isinstance(change, Settle):
        return change
    if isinstance(step, MarkUncertain | AwaitLookup) or (isinstance(step, Settle) and _needs_no_key(entry, step)):
        return step
    return Release(why, UNOPENED_DELAY, shown=True, served=True)


def _needs_no_key(entry: ClaimedEntry, end: Settle) -> bool:
    """Whether an operator has decided so, and without a result. Only the first try to cancel it has the time of the decision."""
    known = entry.outcome.known
    return end.decided and end.result is None and known is not None and known.decided_at is None


def is_left_alone(known: Known, now: datetime) -> bool:
    """Whether an operator's cancellation has waited so long that no process which serves the entry can be running.

    Such a process would have settled it, with its callbacks; now any process may.
    """
    return (
        known.state == "cancelled" and known.decided_at is not None and now - known.decided_at >= CANCEL_UNSERVED_AFTER
    )


def _is_cancelled_in_doubt(entry: ClaimedEntry, known: Known) -> bool:
    """Whether it was cancelled as never sent, and only then it was found that the database had lost the record of its sends."""
    decided_at, doubted_since = known.decided_at, entry.in_doubt_since
    return (
        known.state == "cancelled"
        and decided_at is not None
        and doubted_since is not None
        and decided_at > doubted_since
    )


def too_late(entry: ClaimedEntry, memory: Memory, now: datetime) -> Transition:
    """The transition of an entry whose time to be sent, `Send.before`, passed between its claim and its send."""
    return _in_group(_look_up_first(entry, _uncertain(entry, entry.attempts, TOO_LATE), memory, now), memory)


def wait_for_reader(entry: ClaimedEntry, memory: Memory, now: datetime, reason: str) -> Transition:
    """The transition of an entry whose payload this process cannot read. It waits for one that can, but not beyond the window."""
    if entry.outcome.lookup is None:
        past = admit(entry, replace(memory, can_look_up=False), now)  # a lookup would need the payload too
        if isinstance(past, MarkUncertain):
            return _in_group(past, memory)
    least, most = UNREAD_DELAYS
    waited = now - max(entry.due_at, entry.created_at)
    return Release(reason, min(max(waited / 4, least), most), shown=True, unread=True)


def admit(entry: ClaimedEntry, memory: Memory, now: datetime, jitter: float = 1.0) -> Transition | None:
    """Return None if `entry` may be sent now, else the transition to make instead. jitter: as for `decide`."""
    change = _refused(entry, memory, now, jitter)
    return change and _look_up_first(entry, change, memory, now)


def _foreign(entry: ClaimedEntry, env: str) -> str:
    """Why it is neither sent nor looked up: the deployment that it names may send it too."""
    return (
        f"it belongs to env {entry.env!r}, but this database to env {env!r}, so no dispatcher sends it: an app with another"
        f" OUTBOX_ENV enqueued it; `outbox cancel {entry.id}` ends it"
    )


def _wait_for_form(entry: ClaimedEntry, memory: Memory, now: datetime) -> Transition:
    """It may have been sent in another form. It waits for a process that sends this form, but not beyond the window."""
    past = admit(entry, replace(memory, can_look_up=False), now)  # a lookup in this form would not find it either
    if isinstance(past, MarkUncertain):
        return past
    reason = f"it was sent as {entry.sent_as!r}; the adapter would now send it as {memory.form!r}"
    return Release(reason, PINNED_DELAY, shown=True, served=True)


def _refused(entry: ClaimedEntry, memory: Memory, now: datetime, jitter: float) -> Transition | None:
    if entry.in_doubt_since is not None:
        if _is_for_one_attempt(memory):
            return _uncertain(entry, entry.attempts, "its sender crashed, and the service keeps no keys")
        last = last_safe_send(entry.in_doubt_since, memory)
        if last is not None and now >= last:
            return _uncertain(entry, entry.attempts, TOO_LATE)
    if entry.attempts >= memory.max_attempts:
        return _end(entry, entry.attempts, f"no answer in {entry.attempts} attempts")
    if _crashes(entry) >= MAX_CRASHES:
        return _wait_apart(entry, memory, now, jitter)
    return None


def _crashes(entry: ClaimedEntry) -> int:
    """How many consecutive senders crashed with it: claims without a result since it was enqueued or last set to wait."""
    stored = entry.outcome.deliveries
    return 0 if stored is None else max(entry.deliveries - stored - 1, 0)


def _wait_apart(entry: ClaimedEntry, memory: Memory, now: datetime, jitter: float) -> Transition:
    """It may have crashed its senders, or only been claimed together with the entry that did: each waits for a different time.

    Its age does not end it here: a pause that this process does not know of yet may have stopped the age.
    """
    reason = f"{MAX_CRASHES} consecutive senders crashed while sending it"
    ageless = replace(memory, max_age=CENTURY)
    return _wait(entry, ageless, now, jitter, reason, None, entry.attempts, entry.maybe_sent, entry.in_doubt_since)


# --- after the answer


def decide(entry: ClaimedEntry, outcome: Outcome, memory: Memory, now: datetime, jitter: float) -> Transition:
    """Return the transition of `entry` after `outcome`, the answer to a send.

    now: the database's time.
    jitter: 0 to 1, the share of the backoff that the entry really waits ("full jitter").
    Source: docs/how-it-works.md.
    """
    change = _decided(entry, outcome, memory, now, jitter)
    return _in_group(_look_up_first(entry, change, memory, now), memory)


def decide_lookup(
    entry: ClaimedEntry, state: LookupState, finding: Finding, memory: Memory, now: datetime, jitter: float
) -> Transition:
    """Return the transition of `entry` after `finding`, the answer to a status lookup that began after the claim."""
    return _in_group(judge(entry, state, finding, memory, now, jitter), memory)


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
            reason = f"{reason}; but an earlier attempt may have been executed"
            return replace(_uncertain(entry, attempts, reason), stored=conclusive)
        case KeyConflict(reason=reason):
            return _doubt(entry, attempts, f"{KEY_CONFLICT}: {reason}", stored=True)
        case Deferred(reason=reason, after=after):
            # Certainly not executed: no attempt, and nothing new about earlier ones.
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


# --- where the outcome is stored already


def conclude(entry: ClaimedEntry, known: Known, memory: Memory) -> Transition:
    """The transition of an entry whose outcome was decided before the claim; it is not sent under this lease."""
    attempts = entry.attempts if known.attempts is None else known.attempts
    if _is_cancelled_in_doubt(entry, known):
        return _uncertain(entry, attempts, CANCELLED_IN_DOUBT)
    match known.state:
        case "send_again":
            return _send_again(entry, known, memory)
        case "uncertain":
            return _still_uncertain(entry, attempts, known.reason or "", known)
        case "delivered" | "failed" | "cancelled" if is_sealed(known.result):
            return Release(f"{UNOPENED}: {NO_KEYS}", UNOPENED_DELAY, shown=True, served=True)
        case "delivered" | "failed" | "cancelled":
            by_operator = known.attempts is None
            end = Settle(known.state, attempts, known.result, known.reason, known.looked_up, decided=by_operator)
            # An operator's decision blocks no group that has resumed; a blocked one stays blocked until it is released.
            return without_block(end) if by_operator else end
        case _:
            assert_never(known.state)


def _send_again(entry: ClaimedEntry, known: Known, memory: Memory) -> SendAgain | MarkUncertain:
    """Under the same key while the service surely remembers it, else under one that it has never seen.

    If the operator has allowed only the other of the two, the entry stays uncertain.
    """
    reason = known.reason or SEND_AGAIN
    sent_at = entry.leased_at + memory.fencing_delay
    last = last_safe_send(entry.in_doubt_since, memory)
    is_same = same_key_is_safe(last, memory, sent_at, stored=known.stored)
    epoch = entry.key_epoch if is_same else entry.key_epoch + 1
    if known.key_epoch not in (None, epoch):
        why = "the service may have forgotten its key since" if not is_same else "the service still remembers its key"
        return _still_uncertain(
            entry, entry.attempts, f"not sent again as an operator decided: {why}; decide again", known
        )
    return SendAgain(epoch, entry.in_doubt_since if is_same else None, memory.fencing_delay, reason)


def _still_uncertain(entry: ClaimedEntry, attempts: int, reason: str, known: Known) -> MarkUncertain:
    """Uncertain, as when `known` was stored. Its group was blocked then, or has been released since."""
    return replace(_uncertain(entry, attempts, reason), stored=known.stored, failure_blocks_group=False)


# --- where the callback or the next entry of the group is in the way


def keep(entry: ClaimedEntry, end: End, problem: str, jitter: float) -> RetryCallback:
    """The outcome is known, but the callback that must commit with it failed: try the callback again later."""
    return RetryCallback(end, backoff(entry.deliveries, jitter), f"{_state(end)}, but {problem}")


def release(end: End, why: str) -> RetryCallback:
    """The outcome is known, but its callback did not run under this lease: it may run under the next one, at once."""
    return RetryCallback(end, timedelta(0), f"{_state(end)}; {why}", failed=False)


def hand_over(end: End, callback: str) -> RetryCallback:
    """The outcome is known, and this process does not have its callback: a process that has it takes the entry over."""
    why = f": {end.reason}" if end.reason else ""
    return RetryCallback(end, CENTURY, f"{_state(end)}{why}; waits for a process that has {callback}", False, callback)


def store_first(change: Transition, delay: timedelta) -> Transition:
    """The outcome is known and must not be lost with the lease: store it, and settle the entry after the next claim."""
    if not isinstance(change, Settle | MarkUncertain):
        return change
    reason = f"{_state(change)}, but another transaction has locked the next one of its ordering group"
    return RetryCallback(change, delay, reason)


def _state(end: End) -> str:
    return end.state if isinstance(end, Settle) else "uncertain"


# --- ordering groups


def _in_group(change: Transition, memory: Memory) -> Transition:
    """The transition, without a block where the adapter lets its ordering groups continue after a failure."""
    return change if memory.failure_blocks_group else without_block(change)


def without_block(change: Transition) -> Transition:
    """The transition, without a block of the entry's ordering group."""
    if isinstance(change, Settle) and change.state == "failed":
        return change._replace(failure_blocks_group=False)
    return replace(change, failure_blocks_group=False) if isinstance(change, MarkUncertain) else change


# --- doubt and limits


def _look_up_first(entry: ClaimedEntry, change: Transition, memory: Memory, now: datetime) -> Transition:
    """A status lookup before the entry becomes uncertain, where one is possible; by then no sender can be running."""
    if not (isinstance(change, MarkUncertain) and memory.can_look_up) or change.reason.startswith(KEY_CONFLICT):
        return change
    state = LookupState(change.reason, 0, now + memory.fencing_delay, entry.deliveries, change.stored)
    return AwaitLookup(
        state, memory.fencing_delay, change.reason, change.attempts, change.maybe_sent, change.in_doubt_since
    )


def is_repeatable(memory: Memory) -> bool:
    """Whether an entry that was claimed when its sender crashed is sent again by itself, even if that happens repeatedly."""
    return memory.max_attempts > MAX_CRASHES and not _is_for_one_attempt(memory)


def _is_for_one_attempt(memory: Memory) -> bool:
    """Whether an entry in doubt is never sent again as it is: no key would keep it from happening twice."""
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
    """Send it again later, unless a limit is reached. `after`, which the service asked for, counts within the limits."""
    doubtful = entry._replace(maybe_sent=maybe_sent, in_doubt_since=in_doubt_since)
    if attempts >= memory.max_attempts:
        return _end(doubtful, attempts, f"{reason}; the limit of {attempts} attempts is reached")
    age_left = min(memory.max_age, CENTURY) - (now - entry.first_leased_at)
    if age_left <= timedelta(0):
        return _end(doubtful, attempts, f"{reason}; the age limit of {memory.max_age} is reached")
    delay = min(max(backoff(entry.deliveries, jitter), after or timedelta(0)), age_left)
    last = last_safe_send(in_doubt_since, memory) if maybe_sent else None
    if last is not None:
        before_the_last = last - memory.margin - now
        if before_the_last > timedelta(0):
            delay = min(delay, before_the_last)
        elif now + delay >= last:
            reason = f"{reason}; the service may forget its key before another attempt"
            return _uncertain(doubtful, attempts, reason)
    return Retry(delay, reason, attempts, maybe_sent, in_doubt_since)


def _end(entry: ClaimedEntry, attempts: int, reason: str) -> Transition:
    return _uncertain(entry, attempts, reason) if entry.maybe_sent else Settle("failed", attempts, reason=reason)


def _uncertain(entry: ClaimedEntry, attempts: int, reason: str) -> MarkUncertain:
    return MarkUncertain(reason, attempts, entry.maybe_sent, entry.in_doubt_since)


def _doubt(entry: ClaimedEntry, attempts: int, reason: str, *, stored: bool = False) -> MarkUncertain:
    """Uncertain, with this attempt itself in doubt."""
    return MarkUncertain(reason, attempts, True, _doubt_began(entry), stored)


def _doubt_began(entry: ClaimedEntry) -> datetime:
    """The FIRST attempt under this key whose result is unknown: its lease's start, which came before its send."""
    return entry.in_doubt_since or entry.leased_at
