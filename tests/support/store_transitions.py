"""What is done to a database and to the reference store alike: settings, answers, and the transitions that follow from them."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from dispatchers import Breaker, Deferred, Delivered, InProgress, KeyConflict, Limits, Outcome, Rejected, Unknown
from dispatchers.decide import conclude, decide, keep, without_block
from dispatchers.decide_lookup import admit_lookup, judge
from dispatchers.delivery import Absent, CannotTell, Finding, Found
from dispatchers.flow_control.state import News
from dispatchers.time_limits import Memory
from dispatchers.transitions import ClaimedEntry, MarkUncertain, Release, Settle, Transition

HOUR = timedelta(hours=1)
LEASE = 1.5 * HOUR  # time passes by whole hours, and waits take no seconds: nothing ever happens on the stroke of one
NEAR = timedelta(minutes=10)  # how far apart two instants may be that are the same: a step takes no such time
MEMORY = Memory(window=timedelta(hours=10, minutes=30), max_attempts=4, max_age=timedelta(hours=30, minutes=30))
START = datetime(2026, 1, 31, tzinfo=UTC)
INSTANTS = (
    *("due_at", "created_at", "queued_at", "waiting_since"),
    *("lease_until", "leased_at", "first_leased_at", "in_doubt_since"),
    *("cooldown_until", "breaker_until", "rate_at"),
)
OPERATIONS = ("crm.upsert", "mail.send")
FENCING_DELAY = 1.5 * LEASE
MEMORIES = {"crm": MEMORY, "mail": replace(MEMORY, can_look_up=True, fencing_delay=FENCING_DELAY)}

ANSWERS: dict[str, Outcome] = {
    "delivered": Delivered({"id": 1}),
    "rejected": Rejected("400"),
    "declined": Rejected("402", conclusive=True),
    "conflict": KeyConflict("another request"),
    "deferred": Deferred("429", after=HOUR / 2),
    "in progress": InProgress(),
    "unknown": Unknown("no answer", after=2.5 * HOUR),
    "stored 500": Unknown("500", final=True),
}


# An hour of a destination's is like a second elsewhere.
LIMITS = {
    "crm": Limits(
        total_concurrency=3,
        rate=2 / HOUR.total_seconds(),
        burst=2,
        breaker=Breaker(failures=2, wait=1.5 * HOUR, max_wait=6 * HOUR),
    )
}
NEWS: dict[str, dict[str, News]] = {
    "nothing": {},
    "it answers": {"crm": News(answered=True)},
    "it fails": {"crm": News(failures=1)},
    "it asks for quiet": {"crm": News(cooldown=1.5 * HOUR)},
    "a send ended": {"crm": News(left={UUID(int=1): 1, UUID(int=2): 1})},
    "all sends ended": {"crm": News(left={UUID(int=1): 0, UUID(int=2): 0})},
}


def finding(outcome: Outcome) -> Finding:
    """What a status lookup finds instead."""
    if isinstance(outcome, Delivered):
        return Found(outcome.result)
    return Absent() if isinstance(outcome, Rejected) else CannotTell("not now")


def unhurried(change: Transition) -> Transition:
    """The transition, with no wait so short that the test itself may outlast it."""
    delay = getattr(change, "delay", None)
    return replace(change, delay=max(delay, HOUR / 2)) if delay else change  # type: ignore[type-var]


def transition(kind: str, entry: ClaimedEntry) -> Transition:
    """What the dispatcher makes of an answer, or of a callback that failed, or of what is on record."""
    known, lookup, memory = entry.outcome.known, entry.outcome.lookup, MEMORIES[entry.destination]
    answer, now = ANSWERS.get(kind.removeprefix("keep ").removeprefix("unblocked after ")), entry.leased_at
    if answer is None:
        return Release("not here", HOUR / 2, shown=True)
    if known is not None:
        change = conclude(entry, known, replace(memory, fencing_delay=LEASE))
    elif lookup is not None:
        seen = judge(entry, lookup, finding(answer), memory, now, 0.0)
        change = unhurried(admit_lookup(entry, lookup, replace(memory, form="native"), now) or seen)
    else:
        change = decide(entry, answer, memory, now, 0.0)
    if kind.startswith("unblocked after "):
        return without_block(change)
    return (
        keep(entry, change, "it broke", 0.0)
        if kind.startswith("keep ") and isinstance(change, Settle | MarkUncertain)
        else change
    )


KINDS = [
    *("release", *ANSWERS),
    *(f"keep {answer}" for answer in ("delivered", "rejected", "stored 500")),
    *(f"unblocked after {answer}" for answer in ("rejected", "stored 500")),
]
