"""Entries that were claimed ahead: each waits until one of its destination's sends has ended. No I/O."""

from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Final, TypeAlias

from dispatchers.pipeline.routing import Route
from dispatchers.transitions import ClaimedEntry, Lookup, Send

Work: TypeAlias = tuple[ClaimedEntry, Route, Send | Lookup, float]
"""An entry that was claimed, its adapter, what to do, and our clock before the claim."""

WAIT_SECONDS: Final = 1.0
"""Ten times what an entry claimed ahead should wait: its destination has become slow, and others may send it sooner."""


class SendQueue:
    """permits_of: how many entries of a destination may be sent at once. clock: ours, in seconds."""

    def __init__(self, permits_of: Callable[[str], int], clock: Callable[[], float]) -> None:
        self._permits_of = permits_of
        self._clock = clock
        self._sending: Counter[str] = Counter()
        self._waiting: dict[str, deque[Work]] = {}

    def is_free(self, name: str) -> bool:
        """Whether another entry of this destination may be sent now."""
        return name not in self._waiting and self._sending[name] < self._permits_of(name)

    def begin(self, work: Work) -> bool:
        """Whether it may be sent now. Else it waits here."""
        name = work[0].destination
        if self.is_free(name):
            self._sending[name] += 1
            return True
        self._waiting.setdefault(name, deque()).append(work)
        return False

    def end(self, name: str) -> None:
        """A send to this destination has ended."""
        self._sending[name] -= 1
        if not self._sending[name]:
            del self._sending[name]

    @property
    def sending(self) -> dict[str, int]:
        """How many sends to each destination have begun and not ended."""
        return dict(self._sending)

    @property
    def waiting(self) -> dict[str, int]:
        """How many entries wait here for each destination."""
        return {name: len(waiting) for name, waiting in self._waiting.items()}

    @property
    def destinations(self) -> Collection[str]:
        """Those for which something waits now."""
        return self._waiting.keys()

    def next(self, name: str) -> Work | None:
        """The next one that waits for this destination, if it may be sent now."""
        waiting = self._waiting.get(name)
        if waiting is None or self._sending[name] >= self._permits_of(name):
            return None
        self._sending[name] += 1
        work = waiting.popleft()
        if not waiting:
            del self._waiting[name]
        return work

    def take(self, name: str) -> deque[Work]:
        """Those that wait for this destination. They are not sent."""
        return self._waiting.pop(name)

    def take_late(self) -> list[Work]:
        """Those that wait for a destination for which one has waited too long."""
        since = self._clock() - WAIT_SECONDS
        late = [name for name, waiting in self._waiting.items() if waiting[0][3] < since]
        return [work for name in late for work in self._waiting.pop(name)]

    def take_all(self) -> list[Work]:
        waiting, self._waiting = self._waiting, {}
        return [work for works in waiting.values() for work in works]
