"""Counts what a dispatcher has sent since its last heartbeat, which writes the counts to the database for all operators to see.

It costs a microsecond for each send, so it needs no setting.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from dispatchers.telemetry.measures import MAX_NAMES, Names

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 3600)
"""Seconds. A duration is counted in the first bucket whose bound it does not exceed; beyond the last one in one more."""

WAITED = "waited"
"""The name, in place of a result, for how long entries had been due, or enqueued, before their first send."""


class Tallied(NamedTuple):
    """What is counted alike: the attempts of one result, and of about one duration. result: as of `Attempt`, or `WAITED`."""

    destination: str
    result: str
    bucket: int


class Tally:
    """The counts since the last `take`."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()  # by the fields of `Tallied`, which take longer to make
        self._names = Names(MAX_NAMES)

    def add(self, destination: str, result: str, seconds: float) -> None:
        self._counts[destination, result, bisect_left(BOUNDS, seconds)] += 1

    def take(self) -> Mapping[Tallied, int]:
        """All counts; from now on it counts from zero. The destinations' names are bounded here, not at each send."""
        taken, self._counts = self._counts, Counter()
        bounded = Counter[Tallied]()
        for (destination, result, bucket), sends in taken.items():
            bounded[Tallied(self._names.destination(destination), result, bucket)] += sends
        return bounded

    def give_back(self, counts: Mapping[Tallied, int]) -> None:
        """What could not be written is written with the next heartbeat."""
        self._counts.update(counts)
