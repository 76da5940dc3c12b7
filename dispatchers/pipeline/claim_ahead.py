"""How many entries are claimed beyond those that are being sent, from how fast sends end. No I/O.

Where sends end fast, the next claim would come too late for them: the database's answer takes longer than they do.
"""

from collections.abc import Callable, Collection
from typing import Final

from dispatchers.flow_control.state import limits_of, service_of
from dispatchers.pipeline.routing import Routes
from dispatchers.settings import Settings

AHEAD_SECONDS: Final = 0.1
"""An entry that is claimed ahead waits about so long: far less than a lease, and no less than a claim takes."""

AHEAD_SHARE_MAX: Final = 0.7
"""Of `in_flight_max`, for one destination: the others need the rest if its sends suddenly take longer."""

MEASURED_SECONDS: Final = 0.02


class ClaimAhead:
    """Measures the sends of each destination.

    is_allowed: whether entries of a destination may be claimed ahead. After a crash each claimed entry may have been sent, so
    only services for which a repeated send is harmless qualify. entries_max: for one destination.
    """

    def __init__(self, is_allowed: Callable[[str], bool], *, entries_max: int) -> None:
        self._is_allowed = is_allowed
        self._entries_max = entries_max
        self._excluded: set[str] = set()
        self._ended: dict[str, int] = {}
        self._measured: dict[str, tuple[float, float]] = {}  # since when, and the rate before

    def note_end(self, name: str) -> None:
        """A send to this destination has ended. An entry that was released without one is no end: the service may hang."""
        if name in self._ended:
            self._ended[name] += 1

    def entries(self, name: str, now: float) -> int:
        """How many entries of this destination to claim ahead now, by our clock in seconds."""
        if name in self._excluded or not self._is_allowed(name):
            return 0
        since, rate = self._measured.get(name, (now, 0.0))
        if now - since >= MEASURED_SECONDS:
            rate = self._ended[name] / (now - since)
            since = now
        if since == now:
            self._ended[name] = 0
            self._measured[name] = now, rate
        return min(int(rate * AHEAD_SECONDS), self._entries_max)

    def exclude(self, name: str) -> None:
        """Entries wait there for which no repeated send is harmless."""
        self._excluded.add(name)

    def forget_all_but(self, names: Collection[str]) -> None:
        for name in self._measured.keys() - names:
            del self._measured[name], self._ended[name]
        self._excluded.intersection_update(names)


def claim_ahead_for(settings: Settings, routes: Routes) -> ClaimAhead:
    """Allowed where a repeated send is harmless, and no limit is shared with other dispatchers."""

    def is_allowed(name: str) -> bool:
        return service_of(name) in routes.repeatable and not limits_of(settings.limits, name).are_shared

    return ClaimAhead(is_allowed, entries_max=int(settings.in_flight_max * AHEAD_SHARE_MAX))
