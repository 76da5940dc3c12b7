"""What is crowded in some runs: more destinations than each budget serves, and a server that stalls at times.

Its draws are its own, so that the other runs stay as they are.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

from dispatchers.pipeline import claim_loops, scheduler
from dispatchers.time_limits import FOREVER
from simulation.trace import LEASE, Declared

STALLS = (LEASE.total_seconds() + 0.5, LEASE.total_seconds() + 2)  # the leases of what is being sent end meanwhile


class Crowd:
    """The draws of one seed. is_here: whether anything is crowded.

    idle: destinations with callbacks that nothing is enqueued for; they come before those with entries.
    settings: of each dispatcher, whose budgets serve few of them. is_ordered: whether each entry has an ordering key.
    """

    def __init__(self, seed: int) -> None:
        self._rng = Random(f"crowd {seed}")
        self.is_here = self._rng.random() < 0.25
        count = self._rng.choice([2, 4, 12]) if self.is_here else 0
        self.idle = [f"a{number:02}" for number in range(count)]
        self.settings: dict[str, Any] = {}
        if self.is_here:
            self.settings = {
                "callback_concurrency": self._rng.choice([1, 4]),
                "max_in_flight": self._rng.choice([2, 1000, 1000]),
                "concurrency": self._rng.choice([1, 100, 100]),
            }
        self._max_destinations = self._rng.choice([2, 100])
        self._stalls_often = self.is_here and self._rng.random() < 0.7
        self.is_ordered = self.is_here and self._rng.random() < 0.5

    def declared(self) -> list[Declared]:
        """The idle services."""
        return [Declared(name, FOREVER, False, 12, LEASE * 15) for name in self.idle]

    def stall(self) -> float:
        """For how many seconds the server stalls after a claim: what reaches it meanwhile is done at the end."""
        return self._rng.choice(STALLS) if self._stalls_often and self._rng.random() < 0.5 else 0.0

    @property
    def has_budgets(self) -> bool:
        """Whether a dispatcher may claim more than there ever is, of destinations without callbacks."""
        return bool(self.settings) and min(self.settings["max_in_flight"], self.settings["concurrency"]) >= 100

    @contextmanager
    def around(self) -> Iterator[None]:
        """The budgets that are no settings."""
        with ExitStack() as patches:
            if self.is_here:
                patches.enter_context(patch.object(scheduler, "MAX_DESTINATIONS", self._max_destinations))
                patches.enter_context(patch.object(scheduler, "MAX_LOOKED_AT", self._max_destinations))
                patches.enter_context(patch.object(claim_loops, "CLAIM_LOOPS", 1))
            yield
