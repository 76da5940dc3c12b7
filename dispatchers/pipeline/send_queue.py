"""The queue of entries that were claimed ahead: each waits until a send to its destination has ended. No I/O."""

from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Final

from dispatchers.pipeline.attempt import Attempt

WAIT_SECONDS: Final = 1.0
"""Ten times the usual wait of an entry claimed ahead: its destination has become slow, and others may send it sooner."""


class SendQueue:
    """permits_of: how many entries of a destination may be sent at the same time. clock: the process's clock, in seconds."""

    def __init__(self, permits_of: Callable[[str], int], clock: Callable[[], float]) -> None:
        self._permits_of = permits_of
        self._clock = clock
        self._sending: Counter[str] = Counter()
        self._waiting: dict[str, deque[Attempt]] = {}

    def is_free(self, name: str) -> bool:
        """Whether another entry of this destination may be sent now."""
        return name not in self._waiting and self._sending[name] < self._permits_of(name)

    def begin(self, attempt: Attempt) -> bool:
        """Return True if the entry may be sent now; otherwise put it into the queue."""
        name = attempt.entry.destination
        if self.is_free(name):
            self._sending[name] += 1
            return True
        self.hold(attempt)
        return False

    def hold(self, attempt: Attempt) -> None:
        """Put the entry into the queue."""
        self._waiting.setdefault(attempt.entry.destination, deque()).append(attempt)

    def end(self, name: str) -> None:
        """Note that a send to this destination has ended."""
        self._sending[name] -= 1
        if not self._sending[name]:
            del self._sending[name]

    @property
    def sending(self) -> dict[str, int]:
        """How many sends to each destination are running."""
        return dict(self._sending)

    @property
    def waiting(self) -> dict[str, int]:
        """How many entries wait for each destination."""
        return {name: len(waiting) for name, waiting in self._waiting.items()}

    @property
    def destinations(self) -> Collection[str]:
        """The destinations with waiting entries."""
        return self._waiting.keys()

    def next(self, name: str) -> Attempt | None:
        """Take the next waiting entry of this destination, if it may be sent now."""
        waiting = self._waiting.get(name)
        if waiting is None or self._sending[name] >= self._permits_of(name):
            return None
        self._sending[name] += 1
        attempt = waiting.popleft()
        if not waiting:
            del self._waiting[name]
        return attempt

    def take(self, name: str) -> deque[Attempt]:
        """Take all waiting entries of this destination; they are not sent."""
        return self._waiting.pop(name)

    def take_late(self) -> list[Attempt]:
        """Take the waiting entries of each destination whose first entry has waited too long."""
        since = self._clock() - WAIT_SECONDS
        late = [name for name, waiting in self._waiting.items() if waiting[0].claimed_at < since]
        return [attempt for name in late for attempt in self._waiting.pop(name)]

    def take_all(self) -> list[Attempt]:
        waiting, self._waiting = self._waiting, {}
        return [attempt for attempts in waiting.values() for attempt in attempts]
