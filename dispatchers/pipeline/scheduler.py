"""Chooses the next destinations to claim for, how many entries of each, and from which due time on. No I/O."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

from dispatchers.flow_control.quota import Quota
from dispatchers.flow_control.state import service_of
from dispatchers.pipeline.callback_pace import CallbackPace
from dispatchers.pipeline.claim_ahead import ClaimAhead
from dispatchers.pipeline.turns import Turns
from dispatchers.transitions import DUE_FROM_SLACK, ClaimedEntry
from outbox.times import EPOCH

MAX_BATCH_ENTRIES = 500  # a larger claim saves little, and its entries wait longer for their sends
MAX_KNOWN = 250  # entries at a time whose end is stored: nothing is sent, so `max_in_flight` does not count them
MAX_DESTINATIONS = 100  # destinations in one claim; the others follow in the next ones
UNSERVED_SECONDS = 10.0  # between two full reads of a destination with entries that this process does not serve
LATE_SECONDS = 5.0  # an entry whose transaction commits later than this is found by the next full read
MAX_UNSERVED = 500  # operations: their names come from rows, so their number needs a limit

_NONE: Mapping[str, Any] = MappingProxyType({})


def max_entries(quotas: Sequence[Quota]) -> int:
    """The maximal number of entries of a claim with these quotas."""
    return sum(quota.reserved for quota in quotas)


def max_callbacks(quotas: Sequence[Quota]) -> int:
    """The maximal number of entries that may need a callback of a claim with these quotas."""
    return sum(quota.called_back or 0 for quota in quotas)


class Scheduler:
    """Whom to ask next for how many entries: the permits of each destination, and those that all share.

    home: the destinations of registered adapters, for which every round claims.
    permits: how many sends to one destination run at the same time. permits_of: other numbers for single destinations.
    permits_in_all: the total of claimed entries, without those whose end is stored. ahead: how many entries are claimed beyond
        a destination's permits.
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
        self._turns = Turns(home)
        self._permits = permits
        self._own_permits = permits_of
        self._shut_until = shut_until
        self._pace = pace or CallbackPace(1, timedelta(0), destinations=())
        self.ahead = ahead or ClaimAhead(lambda name: False, max_entries=0)
        self._permits_in_all = permits_in_all
        self._taken: Counter[str] = Counter()
        self._taken_in_all = 0
        self._due_from: dict[str, datetime] = {}
        self._alone_until: dict[str, float] = {}
        self._unserved: dict[str, None] = {}
        self._read_at: dict[str, float] = {}  # the last full read of each destination with unserved entries
        self._asked_at: dict[str, float] = {}  # when a full read began
        self._known: dict[str, None] = {}  # destinations with due entries whose end is stored
        self._known_taken = 0
        self._more_known = False  # whether the last claim left out some of them that the next one has room for
        self._is_known_turn = False
        self.claims_ahead = False  # false for `run_once`, which must send all due entries and may release none

    @property
    def home(self) -> Collection[str]:
        return self._turns.home

    @property
    def destinations(self) -> Collection[str]:
        """All known destinations."""
        return self._turns.names

    @property
    def all_asked(self) -> bool:
        """Whether the round is over: every destination was asked that may be asked now, and none brought an entry."""
        return self._turns.are_over and not (self._more_known or (self._turns.held and self._pace.free_in_all))

    @property
    def is_hinted(self) -> bool:
        """Whether hints have named the next destinations."""
        return self._turns.are_hinted

    def begin_round(self) -> None:
        self._turns.begin_round()

    def learn(self, found: Iterable[str], known: Iterable[str] = ()) -> None:
        """Set the destinations with entries. The next round also claims entries that are due before the cursors.

        known: those with due entries whose end is stored.
        """
        self._due_from.clear()
        known = dict.fromkeys(known)
        self._known = {name: None for name in self._known if name in known} | known  # those that wait come first
        self._turns.learn(found)
        self.ahead.forget_all_but(self._turns.names)

    def meet(self, found: Iterable[str]) -> None:
        """Claim next for these destinations, which have new entries. If no round is running, claim for no others."""
        self._turns.meet(found)

    def permits_of(self, name: str) -> int:
        """How many entries of this destination may be sent at the same time."""
        return self._own_permits.get(name) or self._own_permits.get(service_of(name), self._permits)

    @property
    def used_up(self) -> dict[str, list[str]]:
        """The settings whose budgets are used up now, and which destinations wait for them. All wait for `max_in_flight`: none is
        named.
        """
        waiting = {
            "callback_concurrency": [
                name for name in self._taken if self._pace.applies_to(name) and not self._pace.free(name)
            ],
            "concurrency": [name for name, taken in self._taken.items() if taken >= self.permits_of(name)],
        }
        if not self._pace.free_in_all:
            waiting["callback_concurrency"] = [*self._turns.held]
        found = {setting: sorted(names)[:MAX_DESTINATIONS] for setting, names in waiting.items() if names}
        return found | ({"max_in_flight": []} if self._taken_in_all >= self._permits_in_all else {})

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
            if len(self._unserved) >= MAX_UNSERVED and operation not in self._unserved:
                del self._unserved[next(iter(self._unserved))]
            self._unserved[operation] = None

    def leave_alone(self, name: str, until: float) -> None:
        """Do not claim for a destination until this time, because this process serves none of its operations."""
        self._alone_until[name] = until

    def take(self, now: float) -> list[Quota]:
        """The next quotas. Their permits are taken until `give_back`.

        One claim brings entries to send, and the next one those whose end is stored: neither waits for the other, however many
        there are.
        """
        self._is_known_turn = not self._is_known_turn
        if self._is_known_turn:
            return self._take_known(now) or self._take_due(now)
        quotas = self._take_due(now)
        if not quotas:
            return self._take_known(now)
        self._more_known = self._known_taken < MAX_KNOWN and bool(self._known_names(now))
        return quotas

    def _take_due(self, now: float) -> list[Quota]:
        """The quotas for entries to send.

        A quota is at most half of the destination's permits, so that one half is sent while the other half is settled and
        claimed. The sums may be more than what all destinations share, because few destinations have so many due entries.
        """
        quotas: list[Quota] = []
        most = free = min(self._permits_in_all - self._taken_in_all, MAX_BATCH_ENTRIES)
        most_called = free_called = self._pace.free_in_all
        for name in self._turns.next(with_held=most_called > 0) if free > 0 else ():
            if self._is_shut(name, now):
                continue
            is_called = self._pace.applies_to(name)
            if is_called and not most_called:
                self._turns.hold(name)
                continue
            permits = min(self._free_permits(name, now, is_called=is_called), most)
            if is_called:
                permits = min(permits, self._pace.free(name), most_called)
            if permits > 0:
                reserved, called = min(permits, free), min(permits, free_called) if is_called else None
                due_from, recent = self._due_from.get(name, EPOCH), self._recent(name, now)
                quota = Quota(name, permits, due_from, reserved=reserved, called_back=called, recent=recent)
                quotas.append(self._reserved(quota))
                free -= reserved
                free_called -= called or 0
            if len(quotas) >= MAX_DESTINATIONS:
                break
        return quotas

    def _take_known(self, now: float) -> list[Quota]:
        """The quotas for entries whose end is stored. Nothing is sent, so neither a destination's permits nor its pause count.

        All these destinations get equal shares, because a claim may bring nothing for some of them, however often they are asked.
        """
        quotas: list[Quota] = []
        names = self._known_names(now)
        asked = names[: MAX_DESTINATIONS // 2]
        free = MAX_KNOWN - self._known_taken
        share = max(1, free // max(1, len(asked)))
        for name in asked:
            is_called = self._pace.applies_to(name)
            permits = min(share, free)
            if is_called:
                permits = min(permits, self._pace.free(name), self._pace.free_in_all)
            if permits > 0:
                del self._known[name]
                free -= permits
                called = permits if is_called else None
                quota = Quota(name, permits, EPOCH, reserved=permits, admitted=True, called_back=called, known=True)
                quotas.append(self._reserved(quota))
            elif is_called and not self._pace.free_in_all:
                self._turns.hold(name)
        self._more_known = len(names) > len(asked) or (bool(quotas) and free <= 0 and len(quotas) < len(asked))
        return quotas

    def _known_names(self, now: float) -> list[str]:
        return [name for name in self._known if self._alone_until.get(name, 0.0) <= now]

    def _is_shut(self, name: str, now: float) -> bool:
        if self._shut_until.get(service_of(name)) == math.inf:  # a pause of `stripe` pauses its accounts
            return True
        return max(self._alone_until.get(name, 0.0), self._shut_until.get(name, 0.0)) > now

    def _free_permits(self, name: str, now: float, *, is_called: bool) -> int:
        most = self.permits_of(name)
        if self.claims_ahead and not is_called:
            most += self.ahead.entries(name, now)
        return min(most - self._taken[name], (most + 1) // 2)

    def _reserved(self, quota: Quota) -> Quota:
        """Take the permits for a quota."""
        if quota.known:
            self._known_taken += quota.reserved
        else:
            self._taken[quota.destination] += quota.permits
            self._taken_in_all += quota.reserved
        if quota.called_back is not None:
            self._pace.reserve(quota.destination, quota.permits, in_all=quota.called_back)
        return quota

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
        passed_over: how many entries were claimed beside `claimed`.
        """
        self._return(quotas)
        counts = Counter([entry.destination for entry in claimed])
        for entry in claimed:
            self.reserve(entry)
        is_full = len(claimed) + passed_over >= max_entries(quotas)
        more = [quota for quota in quotas if quota.known and (is_full or _is_used_up(quota, claimed))]
        self._known |= {quota.destination: None for quota in more}
        unreached = _unreached(quotas, counts, passed_over)
        self._turns.owe(quota.destination for quota in unreached)
        reached = [quota for quota in quotas if not quota.known and quota not in unreached]
        self._note_reads([quota for quota in reached if not counts[quota.destination]])
        if not claimed:
            return False
        self._remember_due_from(claimed)
        are_few = 2 * len(claimed) < MAX_BATCH_ENTRIES
        if (
            hints_follow
            and are_few
            and not unreached
            and all(2 * counts[quota.destination] < quota.permits for quota in quotas)
        ):
            return False
        self.begin_round()
        return True

    def _note_reads(self, quotas: Sequence[Quota]) -> None:
        """Note full reads that found no entry which this process serves."""
        for quota in quotas:
            if quota.recent is None and quota.destination in self._read_at:
                asked_at = self._asked_at.get(quota.destination, -math.inf)  # unserved entries were unknown then
                self._read_at[quota.destination] = asked_at

    def give_all_back(self, quotas: Sequence[Quota]) -> None:
        """Give back the permits of a claim that failed. Its destinations keep their turns."""
        self._return(quotas)
        self._turns.owe(quota.destination for quota in quotas if not quota.known)
        self._known |= {quota.destination: None for quota in quotas if quota.known}

    def _return(self, quotas: Sequence[Quota]) -> None:
        for quota in quotas:
            if quota.known:
                self._known_taken -= quota.reserved
            else:
                self._free(quota.destination, quota.permits, quota.reserved)
            if quota.called_back is not None:
                self._pace.give_back(quota.destination, quota.permits, in_all=quota.called_back)

    def reserve(self, entry: ClaimedEntry) -> None:
        """Take the permit of an entry that was claimed, or that was sent but is not settled yet."""
        if entry.is_known:
            self._known_taken += 1
        else:
            self._taken[entry.destination] += 1
            self._taken_in_all += 1

    def give_back(self, entry: ClaimedEntry) -> None:
        """Give back the permit of an entry that does not need it any more."""
        if entry.is_known:
            self._known_taken -= 1
        else:
            self._free(entry.destination, 1, 1)

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
            if not entry.is_known and entry.queued_at > latest.get(entry.destination, EPOCH):
                latest[entry.destination] = entry.queued_at
        for name, queued_at in latest.items():
            self._due_from[name] = max(self._due_from.get(name, EPOCH), queued_at - DUE_FROM_SLACK)


def _unreached(quotas: Sequence[Quota], counts: Counter[str], passed_over: int) -> list[Quota]:
    """The quotas that a full claim may not have reached: those without an entry.

    A claim certainly reaches its first quota. So those that are asked first after it become fewer with each full claim, and each
    destination is reached some time, whatever the order in which the database serves them.
    """
    sent = [quota for quota in quotas if not quota.known]
    called = {quota.destination for quota in quotas if quota.called_back is not None}
    if counts.total() + passed_over >= max_entries(quotas):
        asked = sent[1:]
    elif called and sum(counts[name] for name in called) + passed_over >= max_callbacks(quotas):
        asked = [quota for quota in sent if quota.called_back is not None][1:]
    else:
        asked = []
    return [quota for quota in asked if not counts[quota.destination]]


def _is_used_up(quota: Quota, claimed: Sequence[ClaimedEntry]) -> bool:
    """Whether a quota for entries whose end is stored was used up, so that there may be more of them."""
    return sum(entry.is_known and entry.destination == quota.destination for entry in claimed) >= quota.permits
