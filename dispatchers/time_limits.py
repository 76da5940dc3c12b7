"""How long a service remembers a key, and what follows for the sends of an entry in doubt. Pure arithmetic."""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import Enum
from typing import Final, Literal, TypeAlias

BACKOFF_FIRST = timedelta(seconds=1)
MAX_BACKOFF = timedelta(minutes=10)
CENTURY = timedelta(days=36_525)  # longer than any limit in practice, and no calendar overflows
MAX_DOUBLINGS = 20  # beyond MAX_BACKOFF already; keeps the power small


class Forever(Enum):
    """The window of a service that never forgets a key (a natural key, an upsert, a PUT)."""

    FOREVER = "forever"


FOREVER: Final = Forever.FOREVER
"""The window of a service that never forgets a key: a natural key, an upsert."""
Window: TypeAlias = timedelta | Literal[Forever.FOREVER] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The adapter's declarations that `decide` needs, as plain values.

    fencing_delay: how long a send that lost its lease may still be in flight. can_look_up: whether there is a `find`.
    form: the key format and what else a send is pinned to.
    """

    window: Window
    timeout: timedelta = timedelta(seconds=30)
    at_least_once: bool = False
    max_attempts: int = 20
    max_age: timedelta = timedelta(days=3)
    failure_blocks_group: bool = True
    margin: timedelta = field(default=timedelta(seconds=5))
    fencing_delay: timedelta = timedelta(seconds=65)
    can_look_up: bool = False
    form: str = ""


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


def backoff(tries: int, jitter: float, first: timedelta = BACKOFF_FIRST, most: timedelta = MAX_BACKOFF) -> timedelta:
    """Exponential with full jitter, capped. Source: AWS Architecture Blog, "Exponential Backoff And Jitter"."""
    doublings = min(max(tries - 1, 0), MAX_DOUBLINGS)
    ceiling: timedelta = min(first * 2**doublings, most)
    return ceiling * jitter


def without_pause(memory: Memory, first_leased_at: datetime, resumed_at: datetime | None) -> Memory:
    """An entry does not age while its destination is paused: the age limit counts from `resumed_at`, if that came later."""
    if resumed_at is None or resumed_at <= first_leased_at:
        return memory
    return replace(memory, max_age=min(memory.max_age, CENTURY) + (resumed_at - first_leased_at))
