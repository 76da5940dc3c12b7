"""When the dispatcher is killed: at given points of the way, and only while it holds entries."""

from dataclasses import dataclass, field

POINTS = (0.08, 0.25, 0.42, 0.60, 0.78)
"""The fractions of all orders that are settled when it strikes: spread out, the last well before the end."""


@dataclass(slots=True)
class Killer:
    """Decides; others kill. `struck`: how many entries were in flight at each kill."""

    orders: int
    struck: list[int] = field(default_factory=list)

    def due(self, settled: int, sending: int) -> bool:
        """Whether to kill now. `sending`: the entries under lease, so that no kill strikes an idle process."""
        return len(self.struck) < len(POINTS) and sending > 0 and settled >= POINTS[len(self.struck)] * self.orders

    def strike(self, in_flight: int) -> None:
        """Note a kill that left `in_flight` entries under its lease. One that struck nothing does not count."""
        if in_flight > 0:
            self.struck.append(in_flight)
