"""When the dispatcher is killed: at given points of the way, and only while it holds entries."""

from collections.abc import Collection
from dataclasses import dataclass, field

POINTS = (0.08, 0.25, 0.42, 0.60, 0.78)
"""The fractions of all orders that are settled when it strikes: spread out, the last well before the end."""


@dataclass(slots=True)
class Killer:
    """Decides; others kill.

    struck: how many entries each kill left under a lease. A killed process's leases outlive it for some seconds, so they
    are told apart by their tokens: only those of the process that is now at work count.
    """

    orders: int
    struck: list[int] = field(default_factory=list)
    _orphaned: set[str] = field(default_factory=set)

    def due(self, settled: int, leases: Collection[str]) -> bool:
        """Whether to kill now, given the lease token of every entry that is being sent."""
        if len(self.struck) == len(POINTS):
            return False
        return settled >= POINTS[len(self.struck)] * self.orders and bool(self._of_the_living(leases))

    def strike(self, leases: Collection[str]) -> int:
        """Note a kill, given the tokens that it left behind; returns how many entries it struck."""
        count = len(self._of_the_living(leases))
        if count:  # else they were settled at the last moment, and that was no kill at work
            self.struck.append(count)
        self._orphaned.update(leases)
        return count

    def _of_the_living(self, leases: Collection[str]) -> list[str]:
        return [token for token in leases if token not in self._orphaned]
