"""How long an entry may be sent again under its key, and how long it waits before that. Pure arithmetic."""

from dataclasses import replace
from datetime import datetime, timedelta

from dispatchers.delivery import FOREVER, Memory

BACKOFF_FIRST = timedelta(seconds=1)
BACKOFF_MAX = timedelta(minutes=10)
CENTURY = timedelta(days=36_525)  # longer than any limit in practice, and no calendar overflows
DOUBLINGS_MAX = 20  # beyond BACKOFF_MAX already; keeps the power small


def remembered(in_doubt_since: datetime | None, memory: Memory, now: datetime) -> bool:
    """Whether the service surely still knows a key that it may first have received at `in_doubt_since`."""
    if memory.window is None:
        return False
    last = last_safe_send(in_doubt_since, memory)
    return last is None or now < last + memory.timeout


def last_safe_send(in_doubt_since: datetime | None, memory: Memory) -> datetime | None:
    """The instant from which on an entry in doubt must not be sent again, or None if there is none.

    A send may take `timeout` to reach the service, and clocks drift: both are subtracted from the window.
    """
    if in_doubt_since is None or memory.window is None or memory.window is FOREVER:
        return None
    return in_doubt_since + min(memory.window, CENTURY) - memory.timeout - memory.margin


def same_key_is_safe(last: datetime | None, memory: Memory, sent_at: datetime, *, stored: bool) -> bool:
    """Whether a send at `sent_at` under the present key cannot make it happen twice. last: as `last_safe_send` returns.

    stored: the service has an answer on record under this key, and would only repeat it.
    """
    return memory.window is not None and not stored and (last is None or sent_at < last)


def backoff(tries: int, jitter: float, first: timedelta = BACKOFF_FIRST, most: timedelta = BACKOFF_MAX) -> timedelta:
    """Exponential with full jitter, capped. Source: AWS Architecture Blog, "Exponential Backoff And Jitter"."""
    doublings = min(max(tries - 1, 0), DOUBLINGS_MAX)
    ceiling: timedelta = min(first * 2**doublings, most)
    return ceiling * jitter


def without_pause(memory: Memory, first_leased_at: datetime, resumed_at: datetime | None) -> Memory:
    """An entry does not age while its destination is paused: the age limit counts from `resumed_at`, if that came later."""
    if resumed_at is None or resumed_at <= first_leased_at:
        return memory
    return replace(memory, age_max=min(memory.age_max, CENTURY) + (resumed_at - first_leased_at))
