"""How the permits of a fair destination are shared out over the scopes that wait there. No I/O.

The scopes form a ring, in the order of their names; at its end are the entries without a scope, which were enqueued before
the destination was fair, as if they were one scope more. A claim deals its permits out one at a time, round after round, and
the next claim continues where it stopped. A scope without entries is skipped, so that the others get its share.

A claim checks `SCOPES_MAX` scopes at most. If there are more, it deals to those, and the next claim continues after the last of
them: each scope is checked within as many claims as that takes.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from dispatchers.flow_control.quota import Quota
from dispatchers.transitions import DUE_FROM_SLACK
from outbox.times import EPOCH

SCOPES_MAX = 500
"""Each costs about 8 us where nothing of it is due, and 20 where something is: PostgreSQL 18, 2 cores."""


class Waiting(NamedTuple):
    """How many entries of one scope may be claimed, counted up to `counted_max`; None for those without a scope."""

    scope: str | None
    entries: int


class Backlog(NamedTuple):
    """What a claim finds at a fair destination.

    oldest: the due time of the first entry that may be claimed; None if there is none.
    entries: how many there are, counted up to one more than there are permits. unscoped: how many of those have no scope.
    after, before: the scopes after the place where the last claim stopped, and those up to it. Only where there are more
    entries than permits; and no more of them than it takes to find one with entries for each permit.
    """

    oldest: datetime | None
    entries: int = 0
    unscoped: int = 0
    behind: Sequence[Waiting] = ()
    before: Sequence[Waiting] = ()


class Share(NamedTuple):
    """What a claim takes of each scope; what is left of its permits goes to the oldest, of any scope.

    after: where it stopped. None for the ring's end.
    """

    of: Mapping[str, int]
    after: str | None


def counted_max(permits: int, scopes: int) -> int:
    """How many entries of each scope are worth counting, where so many have any. Who has as many may have more."""
    return permits // max(scopes, 1) + 1


def share_out(permits: int, backlog: Backlog, after: str | None) -> Share:
    """What the scopes get of so many permits, from after the place `after`."""
    walked = [*backlog.behind, *backlog.before]
    waiting = sum(scope.entries > 0 for scope in walked)
    ring = [*backlog.behind, Waiting(None, backlog.unscoped), *backlog.before]
    dealt = deal(permits, ring, counted_max(permits, waiting))
    is_cut = len(walked) >= SCOPES_MAX and waiting < permits
    stopped = walked[-1].scope if is_cut else dealt[-1] if dealt else after
    return Share(Counter(scope for scope in dealt if scope is not None), stopped)


def deal(permits: int, ring: Sequence[Waiting], many: int) -> list[str | None]:
    """Whose each permit is, one after another. many: who has so many entries may have any number."""
    dealt: list[str | None] = []
    rounds = 0
    while (ring := [scope for scope in ring if scope.entries > rounds or scope.entries >= many]) and len(
        dealt
    ) < permits:
        dealt += [scope.scope for scope in ring[: permits - len(dealt)]]
        rounds += 1
    return dealt


class FairCursor:
    """Where this process's last claims of the fair destinations stopped, and from which due time on they had seen all."""

    def __init__(self, fair: Collection[str] = ()) -> None:
        self._fair = frozenset(fair)
        self._after: dict[str, str | None] = {}
        self._oldest: dict[str, datetime] = {}

    def __contains__(self, destination: str) -> bool:
        return destination in self._fair

    def after(self, destination: str) -> str | None:
        return self._after.get(destination)

    def due_from(self, quota: Quota) -> datetime:
        """No entry due before this was skipped; the quota's own cursor counts only what comes oldest first."""
        return min(quota.due_from, self._oldest.get(quota.destination, EPOCH))

    def share_out(self, quota: Quota, backlog: Backlog) -> Mapping[str, int]:
        """How many entries of each scope to claim; the rest of the permits is for the oldest."""
        name = quota.destination
        if backlog.oldest is not None:
            self._oldest[name] = backlog.oldest - DUE_FROM_SLACK
        if backlog.entries <= quota.permits:  # there is nothing to share out
            return {}
        share = share_out(quota.permits, backlog, self.after(name))
        self._after[name] = share.after
        return share.of


NO_CURSOR = FairCursor()
