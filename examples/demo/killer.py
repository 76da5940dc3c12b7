"""When the dispatcher is killed: after given fractions of all entries, and only while it is sending."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

POINTS = (0.08, 0.25, 0.42, 0.60, 0.78)
"""The fractions of all entries that have ended at each kill. The last kill is long before the end of the run."""


class Lease(NamedTuple):
    """An entry that is being sent. token: shared by all entries of one claim."""

    entry_id: UUID
    token: str
    destination: str


@dataclass(slots=True)
class Killer:
    """Decides when to kill the dispatcher. The caller kills it.

    entries: how many there will be, a charge and a receipt for each order.
    interrupted: by kill, the leases of the entries that the dispatcher was sending. The leases of a killed process remain for
        some seconds. Their tokens distinguish them from those of the running process, and only the latter count.
    """

    entries: int
    interrupted: list[list[Lease]] = field(default_factory=list)
    _orphaned: set[str] = field(default_factory=set)

    def due(self, ended: int, leases: Collection[Lease]) -> bool:
        """Whether to kill now, given what is being sent."""
        if len(self.interrupted) == len(POINTS):
            return False
        return ended >= POINTS[len(self.interrupted)] * self.entries and bool(self._of_the_living(leases))

    def record_kill(self, leases: Collection[Lease]) -> list[Lease]:
        """Record a kill, given the leases that remain after it. Returns the leases of the killed process."""
        interrupted = self._of_the_living(leases)
        if interrupted:  # else all were settled just before the kill, and it interrupted no send
            self.interrupted.append(interrupted)
        self._orphaned.update(lease.token for lease in leases)
        return interrupted

    def _of_the_living(self, leases: Collection[Lease]) -> list[Lease]:
        return [lease for lease in leases if lease.token not in self._orphaned]
