"""When the dispatcher is killed: at given points of the way, and only while it holds entries."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

POINTS = (0.08, 0.25, 0.42, 0.60, 0.78)
"""The fractions of all entries that have ended when it strikes: spread out, the last well before the end."""


class Lease(NamedTuple):
    """An entry that is being sent. token: shared by all entries of one claim."""

    entry_id: UUID
    token: str
    destination: str


@dataclass(slots=True)
class Killer:
    """Decides; others kill.

    entries: how many there will be, a charge and a receipt for each order.
    struck: what each kill left under a lease. A killed process's leases outlive it for some seconds, so they are distinguished
        by their tokens: only those of the running process count.
    """

    entries: int
    struck: list[list[Lease]] = field(default_factory=list)
    _orphaned: set[str] = field(default_factory=set)

    def due(self, ended: int, leases: Collection[Lease]) -> bool:
        """Whether to kill now, given what is being sent."""
        if len(self.struck) == len(POINTS):
            return False
        return ended >= POINTS[len(self.struck)] * self.entries and bool(self._of_the_living(leases))

    def strike(self, leases: Collection[Lease]) -> list[Lease]:
        """Note a kill, given the leases that are left after it; returns those that it struck."""
        struck = self._of_the_living(leases)
        if struck:  # else they were settled at the last moment, and the kill hit no send
            self.struck.append(struck)
        self._orphaned.update(lease.token for lease in leases)
        return struck

    def _of_the_living(self, leases: Collection[Lease]) -> list[Lease]:
        return [lease for lease in leases if lease.token not in self._orphaned]
