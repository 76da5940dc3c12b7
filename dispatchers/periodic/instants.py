"""Which instants of a schedule are due, and which are skipped after a downtime. Pure.

Instants are whole seconds in UTC. `now` is the database's clock: the clock of a dispatcher decides nothing.
"""

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import NamedTuple

from dispatchers.periodic.schedules import Schedule, Trigger

SECOND = timedelta(seconds=1)

MAX_CAUGHT_UP = 100
"""How many missed instants `catch_up="all"` enqueues at most, the latest ones: they are sent one after another, and a service
that was not called for a year must not get a year's calls."""

ON_TIME = timedelta(minutes=1)
"""How late an instant may be with `catch_up="none"`. A dispatcher checks every 10 s; a deploy or a failover takes longer."""

MAX_COUNTED = 1000  # missed instants, for the log: 30 ms


class Skipped(NamedTuple):
    """Missed instants that are not enqueued. number: how many; if not exact, there are more."""

    number: int
    is_exact: bool
    first: datetime
    last: datetime


class Due(NamedTuple):
    """instants: to be enqueued now, in this order. skipped: those before them that are not.

    wake_at: when the next instant is due, if none is due now; None if there is none.
    """

    instants: list[datetime]
    skipped: Skipped | None
    wake_at: datetime | None


class TriggerFailed(Exception):
    """A trigger raised, as the `__cause__` says, or returned something that is no time in a time zone."""


def next_instant(trigger: Trigger, after: datetime) -> datetime | None:
    """The first instant after `after`; None if there is none. Raises `TriggerFailed`."""
    start = after.astimezone(UTC).replace(microsecond=0) + SECOND
    try:
        found = trigger.get_next_fire_time(None, start)
        if found is None:
            return None
        if found.utcoffset() is None:
            raise ValueError(f"it has returned {found!r}, which has no time zone")
        at = found.astimezone(UTC).replace(microsecond=0)
    except Exception as error:
        raise TriggerFailed from error
    return at if at >= start else None  # a DateTrigger returns its past date


def next_if_known(trigger: Trigger, after: datetime) -> datetime | None:
    """The first instant after `after`, for operators. None also if the trigger raises: the dispatcher reports that."""
    try:
        return next_instant(trigger, after)
    except TriggerFailed:
        return None


def ready_at(schedule: Schedule, instant: datetime) -> datetime:
    """When an instant is enqueued: later by its part of the jitter, which each process computes alike."""
    seconds = schedule.jitter.total_seconds()
    if not seconds:
        return instant
    digest = hashlib.sha256(f"{schedule.name} {instant.timestamp():.0f}".encode()).digest()
    return instant + timedelta(seconds=seconds * (int.from_bytes(digest[:6], "big") / 2**48))


def due(schedule: Schedule, enqueued_to: datetime, now: datetime) -> Due:
    """What is due at `now`, if all instants up to `enqueued_to` were dealt with. A clock that was set back makes nothing due.

    Raises `TriggerFailed`.
    """
    first = next_instant(schedule.trigger, enqueued_to)
    if first is None:
        return Due([], None, None)
    if (wake_at := ready_at(schedule, first)) > now:
        return Due([], None, wake_at)
    ready = [first, *islice(_ready(schedule, first, now), MAX_COUNTED)]
    is_exact = len(ready) <= MAX_COUNTED
    tail = ready[-MAX_CAUGHT_UP:]
    if not is_exact:  # those whose jitter is not over yet follow at the next check
        most = 1 if schedule.catch_up == "latest" else MAX_CAUGHT_UP
        tail = _last(schedule.trigger, enqueued_to, now - schedule.jitter, most) or tail
    match schedule.catch_up:
        case "latest":
            kept = tail[-1:]
        case "all":
            kept = tail
        case "none":
            kept = [at for at in tail if ready_at(schedule, at) >= now - ON_TIME]
    if is_exact:
        before = ready[: len(ready) - len(kept)]
        return Due(kept, Skipped(len(before), True, before[0], before[-1]) if before else None, None)
    last = _latest(schedule.trigger, enqueued_to, kept[0] - SECOND) if kept else tail[-1]
    return Due(kept, Skipped(MAX_COUNTED, False, ready[0], last or ready[0]), None)


def upcoming(trigger: Trigger, after: datetime, count: int) -> list[datetime]:
    """The next instants after `after`. Raises `TriggerFailed`."""
    return list(islice(_following(trigger, after), count))


def _following(trigger: Trigger, after: datetime) -> Iterator[datetime]:
    at = next_instant(trigger, after)
    while at is not None:
        yield at
        at = next_instant(trigger, at)


def _ready(schedule: Schedule, after: datetime, now: datetime) -> Iterator[datetime]:
    """The instants that are ready, in their order: one waits for the one before it."""
    for at in _following(schedule.trigger, after):
        if ready_at(schedule, at) > now:
            return
        yield at


def _last(trigger: Trigger, low: datetime, high: datetime, most: int) -> list[datetime]:
    """The last `most` instants after `low` and up to `high`, oldest first, without computing all before them."""
    found: list[datetime] = []
    while len(found) < most and (at := _latest(trigger, low, high)) is not None:
        found.append(at)
        high = at - SECOND
    return found[::-1]


def _latest(trigger: Trigger, low: datetime, high: datetime) -> datetime | None:
    """The last instant after `low` and up to `high`, by bisection: a trigger has no previous instant."""
    best: datetime | None = None
    while high > low:
        at = next_instant(trigger, low if best is None else low + (high - low) / 2)
        if at is not None and at <= high:
            best = low = at
        elif best is None:
            return None
        else:
            middle = (low + (high - low) / 2).replace(microsecond=0)
            if middle <= low:
                return best
            high = middle
    return best
