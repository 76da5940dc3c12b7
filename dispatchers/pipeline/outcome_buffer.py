"""Outcomes that must be settled: with the next exchange, or separately if another transaction has locked a row. No I/O."""

import math
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta

from dispatchers.decide import store_first
from dispatchers.transitions import ClaimedEntry, Ending, Lease, Transition

AGAIN_FIRST_SECONDS = 0.02  # until the first retry: most often a claim, which is short, has locked the row
AGAIN_SECONDS = 0.25  # between later retries: an app's transaction may take long
KEEP = timedelta(seconds=5)  # until the next try to settle, after the outcome was stored


class OutcomeBuffer:
    """Outcomes in the order of their arrival, and postponed ones. clock: in seconds.

    timeout: how long an outcome is postponed. Then it is only stored, which needs no row that another process locks.
    """

    def __init__(self, *, clock: Callable[[], float], timeout: timedelta) -> None:
        self._clock = clock
        self._timeout_seconds = timeout.total_seconds()
        self._waiting: list[Ending] = []
        self._postponed: list[Ending] = []
        self._since: dict[Lease, float] = {}  # when each was first postponed, also of those that are tried now
        self._again_at = math.inf

    def __len__(self) -> int:
        """How many must be settled with the next exchange."""
        return len(self._waiting)

    def add(self, entry: ClaimedEntry, change: Transition) -> None:
        self._waiting.append((entry, change))

    def take(self) -> list[Ending]:
        taken, self._waiting = self._waiting, []
        return taken

    def put_back(self, taken: Iterable[Ending]) -> None:
        """Take back outcomes that were not settled, because the database is unavailable."""
        self._waiting[:0] = taken

    # --- the postponed outcomes

    @property
    def has_postponed(self) -> bool:
        return bool(self._postponed)

    @property
    def again_in(self) -> float:
        """Seconds until the next retry of the postponed outcomes; infinity if there are none."""
        return max(0.0, self._again_at - self._clock()) if self._postponed else math.inf

    def postpone(self, tried: Iterable[Ending], leases: Collection[Lease]) -> None:
        """Note the result of a try: the outcomes of these leases are postponed, the others of `tried` are settled."""
        if not (leases or self._since):
            return
        now = self._clock()
        for ending in tried:
            lease = ending[0].lease
            if lease not in leases:
                self._since.pop(lease, None)
                continue
            again_at = now + (AGAIN_SECONDS if lease in self._since else AGAIN_FIRST_SECONDS)
            self._again_at = min(self._again_at, again_at) if self._postponed else again_at
            self._since.setdefault(lease, now)
            self._postponed.append(ending)

    def take_postponed(self, *, is_final: bool = False) -> list[Ending]:
        """The outcomes whose retry is due. Call `postpone` with the result of the retry."""
        now = self._clock()
        if not self._postponed or (now < self._again_at and not is_final):
            return []
        taken, self._postponed = self._postponed, []
        return [
            (entry, store_first(change, KEEP))
            if is_final or now - self._since[entry.lease] > self._timeout_seconds
            else (entry, change)
            for entry, change in taken
        ]
