"""How many entries to claim ahead, beyond those that are being sent: it depends on how many sends end in a second. No I/O.

If sends are shorter than a claim, permits would stay unused until the next claim.
"""

from collections.abc import Callable, Collection
from typing import Final

from dispatchers.flow_control.state import limits_of, service_of
from dispatchers.pipeline.routing import Routes
from dispatchers.settings import Settings

AHEAD_SECONDS: Final = 0.1
"""How long an entry that is claimed ahead waits, about: much shorter than a lease, but longer than a claim."""

MAX_AHEAD_SHARE: Final = 0.7
"""The share of `max_in_flight` for one destination. If its sends suddenly become slow, the others need the rest."""

MEASURED_SECONDS: Final = 0.02


class ClaimAhead:
    """Measures how many sends of each destination end in a second.

    is_allowed: whether entries of a destination may be claimed ahead. After a crash every claimed entry may have been sent, so
    a repeated send must be harmless there. max_entries: the limit for one destination.
    """

    def __init__(self, is_allowed: Callable[[str], bool], *, max_entries: int) -> None:
        self._is_allowed = is_allowed
        self._max_entries = max_entries
        self._excluded: set[str] = set()
        self._ended: dict[str, int] = {}
        self._measured: dict[str, tuple[float, float]] = {}  # the start of the present measurement, and the last rate

    def note_end(self, name: str) -> None:
        """Count a send that has ended. Entries that were released without a send do not count, because the service may hang."""
        if name in self._ended:
            self._ended[name] += 1

    def entries(self, name: str, now: float) -> int:
        """How many entries of this destination to claim ahead. now: the process's clock, in seconds."""
        if name in self._excluded or not self._is_allowed(name):
            return 0
        since, rate = self._measured.get(name, (now, 0.0))
        if now - since >= MEASURED_SECONDS:
            rate = self._ended[name] / (now - since)
            since = now
        if since == now:
            self._ended[name] = 0
            self._measured[name] = now, rate
        return min(int(rate * AHEAD_SECONDS), self._max_entries)

    def exclude(self, name: str) -> None:
        """Stop claiming ahead for a destination with an entry for which a repeated send is not harmless."""
        self._excluded.add(name)

    def forget_all_but(self, names: Collection[str]) -> None:
        for name in self._measured.keys() - names:
            del self._measured[name], self._ended[name]
        self._excluded.intersection_update(names)


def claim_ahead_for(settings: Settings, routes: Routes) -> ClaimAhead:
    """Allows it if a repeated send is harmless and the destination shares no limit with other dispatchers."""

    def is_allowed(name: str) -> bool:
        return service_of(name) in routes.repeatable and not limits_of(settings.limits, name).are_shared

    return ClaimAhead(is_allowed, max_entries=int(settings.max_in_flight * MAX_AHEAD_SHARE))
