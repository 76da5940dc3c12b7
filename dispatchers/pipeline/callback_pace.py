"""How many entries with callbacks a dispatcher may claim: as many as its callbacks can settle before the leases end. No I/O."""

from collections import Counter
from collections.abc import Iterable
from datetime import timedelta

from dispatchers.flow_control.state import service_of

ASSUMED_SECONDS = 1.0  # assumed duration of a callback, until one was measured
WEIGHT = 0.1  # weight of the newest measurement in the average
UNLIMITED = 1_000_000


class CallbackPace:
    """Counts the claimed entries that may need a callback, and limits them by the measured duration of callbacks.

    at_once: how many callbacks run at the same time. usable: the lease without the margin; callbacks may use half of it, sends
    the other half. seconds_each: the average duration of a callback.
    destinations: those that have operations with callbacks. `reserve` adds others.
    """

    def __init__(self, at_once: int, usable: timedelta, destinations: Iterable[str]) -> None:
        self._at_once = at_once
        self._seconds_planned = usable.total_seconds() / 2
        self.seconds_each = min(ASSUMED_SECONDS, self._seconds_planned)
        self._is_measured = False
        self._destinations = set(destinations)
        self._taken: Counter[str] = Counter()
        self._taken_in_all = 0

    @property
    def max_entries(self) -> int:
        """How many such entries may be claimed in all: at least two for each running callback, so that none waits for a claim."""
        if self.seconds_each * UNLIMITED <= self._at_once * self._seconds_planned:
            return UNLIMITED
        return max(2 * self._at_once, int(self._at_once * self._seconds_planned / self.seconds_each))

    def measure(self, seconds: float) -> None:
        """Note the duration of a callback; 0 for an entry that ended without one."""
        weight = WEIGHT if self._is_measured else 1.0
        self._is_measured = True
        self.seconds_each += weight * (seconds - self.seconds_each)

    def applies_to(self, destination: str) -> bool:
        return destination in self._destinations or service_of(destination) in self._destinations

    @property
    def free_in_all(self) -> int:
        """How many more entries may be claimed, of all destinations with callbacks."""
        return max(0, self.max_entries - self._taken_in_all)

    def free(self, destination: str) -> int:
        """How many more of its entries may be claimed. One destination gets half of all at most, so that others need not wait."""
        return max(0, (self.max_entries + 1) // 2 - self._taken[destination])

    def reserve(self, destination: str, entries: int = 1, *, in_all: int | None = None) -> None:
        """in_all: how many of the entries count for the total, if not all: a claim asks for more than it may bring."""
        self._destinations.add(destination)
        self._taken[destination] += entries
        self._taken_in_all += entries if in_all is None else in_all

    def give_back(self, destination: str, entries: int = 1, *, in_all: int | None = None) -> None:
        self._taken[destination] -= entries
        self._taken_in_all -= entries if in_all is None else in_all
        if not self._taken[destination]:
            del self._taken[destination]
