"""How long a service remembers a key, when the dispatcher gives up, and what follows for an entry in doubt. Pure arithmetic."""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import Enum
from typing import Final, Literal, TypeAlias

from outbox.errors import ConfigurationError

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
class RetryPolicy:
    """When the dispatcher gives up on an entry that gets no final answer: it is then failed, or uncertain if it is in doubt.

    max_attempts: after this number of sends that may have left.
    max_age: after this time since the first claim. The wait for the first claim has no limit.
    Raises `ConfigurationError` for a limit that allows nothing.
    """

    max_attempts: int = 20
    max_age: timedelta = timedelta(days=3)

    def __post_init__(self) -> None:
        if not isinstance(self.max_attempts, int) or self.max_attempts < 1:
            raise ConfigurationError(f"max_attempts={self.max_attempts!r} must be an int of at least 1")
        if not isinstance(self.max_age, timedelta) or self.max_age <= timedelta(0):
            raise ConfigurationError(f"max_age={self.max_age!r} must be a positive timedelta")


DEFAULT_RETRY: Final = RetryPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The adapter's declarations that `decide` needs, as plain values.

    fencing_delay: how long a send that lost its lease may still be in flight. can_look_up: whether there is a `find`.
    form: the key format and what else a send is pinned to.
    """

    window: Window
    timeout: timedelta = timedelta(seconds=30)
    at_least_once: bool = False
    max_attempts: int = DEFAULT_RETRY.max_attempts
    max_age: timedelta = DEFAULT_RETRY.max_age
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
