"""Chooses the next destinations to claim for, how many entries of each, and from which due time on. No I/O."""

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

from dispatchers.flow_control.quota import Quota
from dispatchers.flow_control.state import service_of
from dispatchers.pipeline.callback_pace import CallbackPace
from dispatchers.pipeline.claim_ahead import ClaimAhead
from dispatchers.transitions import DUE_FROM_SLACK, ClaimedEntry
from outbox.times import EPOCH

BATCH_ENTRIES_MAX = 500  # a larger claim saves little, and its entries wait longer for their sends
DESTINATIONS_MAX = 100  # destinations in one claim; the others follow in the next ones
UNSERVED_SECONDS = 10.0  # between two full reads of a destination with entries that this process does not serve
LATE_SECONDS = 5.0  # an entry whose transaction commits later than this is found by the next full read
UNSERVED_MAX = 500  # operations: their names come from rows, so their number needs a limit

_NONE: Mapping[str, Any] = MappingProxyType({})


def entries_max(quotas: Sequence[Quota]) -> int:
    """The maximal number of entries of a claim with these quotas."""
    return sum(quota.reserved for quota in quotas)


class Scheduler:
    """The order of the destinations, and the permits of each.

    home: the destinations of registered adapters, for which every round claims.
    permits: how many sends to one destination run at the same time. permits_of: other numbers for single destinations.
    permits_in_all: the total of claimed entries. ahead: how many entries are claimed beyond a destination's permits.
    shut_until: destinations to which nothing may be sent before a time.
    pace: limits the claims for destinations with callbacks; None if there are no callbacks.
    """

    def __init__(
        self,
        home: Iterable[str],
        *,
        permits: int,
        permits_in_all: int,
        permits_of: Mapping[str, int] = _NONE,
        shut_until: Mapping[str, float] = _NONE,
        pace: CallbackPace | None = None,
        ahead: ClaimAhead | None = None,
    ) -> None:
        self.home = frozenset(home)
        self._names = OrderedDict.fromkeys(sorted(self.home))  # in the order of the next claims
        self._permits = permits
        self._own_permits = permits_of
        self._shut_until = shut_until
        self._pace = pace or CallbackPace(1, timedelta(0), destinations=())
        self.ahead = ahead or ClaimAhead(lambda name: False, entries_max=0)
        self._permits_in_all = permits_in_all
        self._taken: Counter[str] = Counter()
        self._taken_in_all = 0
        self._due_from: dict[str, datetime] = {}
        self._alone_until: dict[str, float] = {}
        self._unserved: dict[str, None] = {}
        self._read_at: dict[str, float] = {}  # the last full read of each destination with unserved entries
        self._asked_at: dict[str, float] = {}  # when a full read began
        self._unasked = 0
        self._hinted: list[str] = []  # these come before all others
        self._met: set[str] = set()  # named by hints since the last sweep, which may have begun before the commit
        self.claims_ahead = False  # false for `run_once`, which must send all due entries and may release none

    @property
    def destinations(self) -> Collection[str]:
        """All known destinations."""
        return tuple(self._names)

    @property
    def all_asked(self) -> bool:
        """Whether the round is over: every destination was asked, and none brought an entry."""
        return self._unasked <= 0 and not self._hinted

    @property
    def is_hinted(self) -> bool:
        """Whether hints have named the next destinations."""
        return bool(self._hinted)

    def begin_round(self) -> None:
        self._unasked = len(self._names)

    def learn(self, found: Iterable[str]) -> None:
        """Set the destinations with entries. The next round also claims entries that are due before the cursors."""
        self._due_from.clear()
        known = self.home.union(found, self._met)
        self._met.clear()
        kept = [name for name in self._names if name in known]
        new = sorted(known.difference(kept))
        self._names = OrderedDict.fromkeys([*new, *kept])  # new ones come first, the others keep their order
        self.ahead.forget_all_but(known)
        self.begin_round()

    def meet(self, found: Iterable[str]) -> None:
        """Claim next for these destinations, which have new entries. If no round is running, claim for no others."""
        names = set(found)
        self._met |= names
        self._names.update(dict.fromkeys(sorted(names.difference(self._names))))
        self._hinted = sorted(names.union(self._hinted))

    def permits_of(self, name: str) -> int:
        """How many entries of this destination may be sent at the same time."""
        return self._own_permits.get(name) or self._own_permits.get(service_of(name), self._permits)

    @property
    def unserved(self) -> list[str] | None:
        """The operations that claims must pass over; None if no unserved entry was met. See `ClaimRequest.unserved`."""
        return list(self._unserved) if self._read_at else None

    def pass_over(self, operation: str | None, destination: str) -> None:
        """Pass over an operation that this process does not serve, so that its entries cost hardly any reads.

        operation: None for an entry that only a newer release can read.
        """
        self._read_at.setdefault(destination, -math.inf)
        if operation is not None:
            if len(self._unserved) >= UNSERVED_MAX and operation not in self._unserved:
                del self._unserved[next(iter(self._unserved))]
            self._unserved[operation] = None

    def leave_alone(self, name: str, until: float) -> None:
        """Do not claim for a destination until this time, because this process serves none of its operations."""
        self._alone_until[name] = until

    def take(self, now: float) -> list[Quota]:
        """The next quotas. Their permits are taken until `give_back`.

        A quota is at most half of the destination's permits, so that one half is sent while the other half is settled and
        claimed. The sum may be more than the free total, because few destinations have so many due entries.
        """
        quotas: list[Quota] = []
        most_in_all = free = min(self._permits_in_all - self._taken_in_all, BATCH_ENTRIES_MAX)
        for name in self._next_names() if free > 0 else ():
            called_back = self._pace.applies_to(name)
            most = self.permits_of(name)
            if self.claims_ahead and not called_back:
                most += self.ahead.entries(name, now)
            permits = min(most - self._taken[name], (most + 1) // 2, most_in_all)
            if called_back:
                permits = min(permits, self._pace.free(name))
            is_paused = self._shut_until.get(service_of(name)) == math.inf  # a pause of `stripe` pauses its accounts
            shut_until = max(self._alone_until.get(name, 0.0), self._shut_until.get(name, 0.0))
            if permits > 0 and not is_paused and shut_until <= now:
                recent = self._recent(name, now)
                due_from = self._due_from.get(name, EPOCH)
                reserved = min(permits, free)
                quotas.append(Quota(name, permits, due_from, reserved=reserved, called_back=called_back, recent=recent))
                if called_back:
                    self._pace.reserve(name, permits)
                self._taken[name] += permits
                self._taken_in_all += reserved
                free -= reserved
        return quotas

    def _next_names(self) -> Iterator[str]:
        """The destinations named by hints; then, while a round is running, the other ones in their order."""
        is_round = self._unasked > 0 or not self._hinted
        asked: set[str] = set()
        while self._hinted and len(asked) < DESTINATIONS_MAX:
            asked.add(self._hinted[-1])
            yield self._hinted.pop()
        for _ in range(min(len(self._names), DESTINATIONS_MAX - len(asked)) if is_round else 0):
            name = next(iter(self._names))
            self._names.move_to_end(name)
            self._unasked -= 1
            if name not in asked:
                yield name

    def _put_first(self, name: str) -> None:
        self._names[name] = None
        self._names.move_to_end(name, last=False)

    def found(
        self,
        quotas: Sequence[Quota],
        claimed: Sequence[ClaimedEntry],
        *,
        passed_over: int = 0,
        hints_follow: bool = False,
    ) -> bool:
        """Note the result of a claim, and give unused permits back. Returns whether the next round begins.

        A round begins after each claim that brought entries, because more may be due. hints_follow: whether hints announce new
        entries; then a round begins only if half of a quota was used (not all of it, because the claim rounds quotas).
        passed_over: how many entries were claimed beside `claimed`. If the claim is full, its last destinations may not have
        been asked, so they come first again.
        """
        self._return(quotas)
        counts = Counter([entry.destination for entry in claimed])
        for name, count in counts.items():
            self.reserve(name, count)
        without = [quota for quota in quotas if not counts[quota.destination]]
        is_full = len(claimed) + passed_over >= entries_max(quotas)
        if is_full:
            self._ask_first(without)
        else:
            self._note_reads(without)
        if not claimed:
            return False
        self._remember_due_from(claimed)
        are_few = 2 * len(claimed) < BATCH_ENTRIES_MAX
        if (
            hints_follow
            and are_few
            and not is_full
            and all(2 * counts[quota.destination] < quota.permits for quota in quotas)
        ):
            return False
        self.begin_round()
        return True

    def _ask_first(self, quotas: Sequence[Quota]) -> None:
        for quota in reversed(quotas):
            if quota.destination in self._names:
                self._put_first(quota.destination)
                self._unasked += 1

    def _note_reads(self, quotas: Sequence[Quota]) -> None:
        """Note full reads that found no entry which this process serves."""
        for quota in quotas:
            if quota.recent is None and quota.destination in self._read_at:
                asked_at = self._asked_at.get(quota.destination, -math.inf)  # unserved entries were unknown then
                self._read_at[quota.destination] = asked_at

    def give_all_back(self, quotas: Sequence[Quota]) -> None:
        """Give back the permits of a claim that failed."""
        self._return(quotas)

    def _return(self, quotas: Sequence[Quota]) -> None:
        for quota in quotas:
            self._free(quota.destination, quota.permits, quota.reserved)
            if quota.called_back:
                self._pace.give_back(quota.destination, quota.permits)

    def reserve(self, name: str, permits: int = 1) -> None:
        """Take permits for entries that were claimed, or that are sent but not settled yet."""
        self._taken[name] += permits
        self._taken_in_all += permits

    def give_back(self, name: str) -> None:
        """Give back the permit of an entry that does not need it any more."""
        self._free(name, 1, 1)

    def _free(self, name: str, permits: int, reserved: int) -> None:
        self._taken[name] -= permits
        self._taken_in_all -= reserved
        if not self._taken[name]:
            del self._taken[name]

    def _recent(self, name: str, now: float) -> timedelta | None:
        """How far back the next claim must read the due times; None for a full read."""
        read_at = self._read_at.get(name)
        if read_at is None:
            return None
        if now - read_at >= UNSERVED_SECONDS:
            self._asked_at[name] = now
            return None
        return timedelta(seconds=now - read_at + LATE_SECONDS)

    def _remember_due_from(self, claimed: Sequence[ClaimedEntry]) -> None:
        latest: dict[str, datetime] = {}
        for entry in claimed:
            if entry.queued_at > latest.get(entry.destination, EPOCH):
                latest[entry.destination] = entry.queued_at
        for name, queued_at in latest.items():
            self._due_from[name] = max(self._due_from.get(name, EPOCH), queued_at - DUE_FROM_SLACK)
