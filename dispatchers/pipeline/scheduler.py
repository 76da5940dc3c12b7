"""Chooses the next destinations to claim for, how many entries of each, and from which due time on. No I/O."""

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from dispatchers.flow_control.quota import Quota, max_callbacks, max_entries
from dispatchers.flow_control.surveys import Share
from dispatchers.pipeline.destinations import Destination, Destinations
from dispatchers.transitions import DUE_FROM_SLACK, ClaimedEntry
from outbox.times import EPOCH

MAX_WAITING_NAMED = 1000  # destinations that a heartbeat names, because they wait for a budget
MAX_BATCH_ENTRIES = 500  # a larger claim saves little, and its entries wait longer for their sends
MAX_DESTINATIONS = 100  # destinations in one claim; the others follow in the next ones
MAX_LOOKED_AT = 1000  # destinations that one claim looks at, if it asks for any: of 100,000 accounts most may be paused
UNSERVED_SECONDS = 10.0  # between two full reads of a destination with entries that this process does not serve
LATE_SECONDS = 5.0  # an entry whose transaction commits later than this is found by the next full read
MAX_UNSERVED = 500  # operations: their names come from rows, so their number needs a limit


class Turns:
    """The order in which a dispatcher asks its destinations. A destination that could not be asked keeps its turn.

    First come those that a claim has left out, then those that hints have named, then the others, round by round.

    own: destinations that are always known.
    """

    def __init__(self, own: Iterable[str]) -> None:
        self.own = frozenset(own)
        self._names = OrderedDict.fromkeys(sorted(self.own))  # in the order of the next claims
        self._held: dict[str, None] = {}  # asked again when a shared budget, which is used up, has room
        self._owed: dict[str, None] = {}  # a full claim may not have reached them
        self._hinted: dict[str, None] = {}
        self._met: set[str] = set()  # named by hints since the last sweep, which may have begun before the commit
        self._unasked = 0  # destinations in `_names` that this round has not asked yet

    @property
    def names(self) -> Collection[str]:
        """All known destinations."""
        return tuple(self._names)

    @property
    def are_hinted(self) -> bool:
        """Whether hints have named destinations that were not asked since."""
        return bool(self._hinted)

    @property
    def held(self) -> Collection[str]:
        """The destinations that wait until a used-up budget has room again."""
        return self._held.keys()

    @property
    def are_over(self) -> bool:
        """Whether every destination was asked, except those that wait for a budget."""
        return self._unasked <= 0 and not (self._hinted or self._owed)

    def begin_round(self) -> None:
        self._unasked = len(self._names)

    def learn(self, found: Iterable[str]) -> None:
        """Set the destinations with entries, and begin a round."""
        known = self.own.union(found, self._met)
        self._met.clear()
        kept = [name for name in self._names if name in known]
        new = sorted(known.difference(kept))
        self._names = OrderedDict.fromkeys([*new, *kept])  # new ones come first, the others keep their order
        for waiting in (self._held, self._owed):
            for name in [name for name in waiting if name not in known]:
                del waiting[name]
        self.begin_round()

    def hint(self, found: Iterable[str]) -> None:
        """Hints have named these destinations. If no round is running, no others are asked."""
        names = sorted(set(found))
        self._met.update(names)
        self._names.update(dict.fromkeys(name for name in names if name not in self._names))
        self._hinted.update(dict.fromkeys(names))

    def hold(self, name: str) -> None:
        """Keep the turn of a destination for which a budget had no room."""
        self._held[name] = None

    def owe(self, names: Iterable[str]) -> None:
        """Ask these destinations first in the next claim: this one may not have reached them."""
        self._owed.update(dict.fromkeys(name for name in names if name in self._names))

    def next(self, *, with_held: bool) -> Iterator[str]:
        """The destinations to ask, each once. A destination has had its turn when the iterator has named it.

        with_held: whether the budget has room again.
        """
        is_round = self._unasked > 0 or not self._hinted
        named: set[str] = set()
        for waiting in (self._held, self._owed, self._hinted) if with_held else (self._owed, self._hinted):
            while waiting:
                name = next(iter(waiting))
                del waiting[name]
                if name not in named:
                    named.add(name)
                    yield name
        for _ in range(len(self._names) if is_round else 0):
            name = next(iter(self._names))
            self._names.move_to_end(name)
            self._unasked -= 1
            if name not in named:
                yield name


class Scheduler:
    """Chooses the destinations to ask next, and for how many entries.

    own_destinations: those of registered adapters, for which every round claims.
    destinations: their records, and the permits that a quota takes.
    """

    def __init__(self, own_destinations: Iterable[str], destinations: Destinations) -> None:
        self.destinations, self._of, self._pace = destinations, destinations.of, destinations.pace
        self._turns = Turns(own_destinations)
        self._unserved: dict[str, None] | None = None
        self._known: dict[str, None] = {}  # destinations with due entries whose end is stored
        self._more_known = False  # whether the last claim left out some of them, for which the next one has room
        self._is_known_turn = False
        self._is_short = False  # whether entries may be due that this round has not claimed, for want of permits

    @property
    def own_destinations(self) -> Collection[str]:
        return self._turns.own

    @property
    def names(self) -> Collection[str]:
        """All known destinations."""
        return self._turns.names

    @property
    def all_asked(self) -> bool:
        """Whether the round is over: all destinations that may be asked now were asked, and none brought an entry."""
        return self._turns.are_over and not (self._more_known or (self._turns.held and self._pace.free))

    @property
    def has_all(self) -> bool:
        """Whether claims have brought all due entries, but those that hints announce or that became due by the clock."""
        return self.all_asked and not (self._is_short or self._known)

    @property
    def is_hinted(self) -> bool:
        """Whether hints have named the next destinations."""
        return self._turns.are_hinted

    def begin_round(self) -> None:
        self._is_short = False
        self._turns.begin_round()

    def learn(self, found: Iterable[str], known: Iterable[str] = ()) -> None:
        """Set the destinations with entries. The next round also claims entries that are due before the cursors.

        known: those with due entries whose end is stored.
        """
        for destination in self._of.values():
            destination.due_from = EPOCH
        known = dict.fromkeys(known)
        self._known = {name: None for name in self._known if name in known} | known  # the earlier ones come first
        self._turns.learn(found)
        self.destinations.forget_all_but(self._turns.names)

    def hint(self, found: Iterable[str]) -> None:
        """Claim next for these destinations, which have new entries. If no round is running, claim for no others."""
        self._turns.hint(found)

    @property
    def used_up(self) -> dict[str, list[str]]:
        """The settings whose budgets are used up now, with the destinations that wait for them. `max_in_flight` has no names,
        because all destinations wait for it.
        """
        full = [each.name for each in self._of.values() if each.called_back and not self._pace.free_of(each)]
        waiting = {
            "callback_concurrency": {*full, *(() if self._pace.free else self._turns.held)},
            "concurrency": [each.name for each in self._of.values() if each.claimed and each.claimed >= each.permits],
            "fleet": [] if self.destinations.share is None else self.destinations.share.waiting,
        }
        found = {setting: sorted(names)[:MAX_WAITING_NAMED] for setting, names in waiting.items() if names}
        return found | ({"max_in_flight": []} if self.destinations.free <= 0 else {})

    # --- entries that this process does not serve

    @property
    def unserved(self) -> list[str] | None:
        """The operations that claims must skip; None if no unserved entry was met. See `ClaimRequest.unserved`."""
        return None if self._unserved is None else list(self._unserved)

    def skip_operation(self, operation: str | None, destination: str) -> None:
        """Skip an operation that this process does not serve, so that its entries cost hardly any reads.

        operation: None for an entry that only a newer release can read.
        """
        record = self._of[destination]
        if record.read_at is None:
            record.read_at = -math.inf
        unserved = self._unserved = {} if self._unserved is None else self._unserved
        if operation is not None:
            if len(unserved) >= MAX_UNSERVED and operation not in unserved:
                del unserved[next(iter(unserved))]
            unserved[operation] = None

    def skip_until(self, name: str, until: float) -> None:
        """Do not claim for a destination until this time, because this process serves none of its operations."""
        self._of[name].skipped_until = until

    def _recent(self, destination: Destination, now: float) -> timedelta | None:
        """How far back the next claim must read the due times; None for a full read."""
        if destination.read_at is None:
            return None
        if now - destination.read_at >= UNSERVED_SECONDS:
            destination.asked_at = now
            return None
        return timedelta(seconds=now - destination.read_at + LATE_SECONDS)

    # --- the quotas of a claim

    def next_quotas(self, now: float) -> list[Quota]:
        """The next quotas. Their permits are taken until `note_claim` or `release`.

        One claim brings entries to send, and the next one those whose end is stored: neither waits for the other, however many
        there are.
        """
        self._is_known_turn = not self._is_known_turn
        if self._is_known_turn:
            return self._next_known(now) or self._next_due(now)
        quotas = self._next_due(now)
        if not quotas:
            return self._next_known(now)
        self._more_known = self.destinations.free_known > 0 and bool(self._known_names(now))
        return quotas

    def _next_due(self, now: float) -> list[Quota]:
        """The quotas for entries to send.

        A quota is at most half of the destination's permits, so that one half is sent while the other half is settled and
        claimed. The sums may be more than what all destinations share, because few destinations have so many due entries.
        """
        quotas: list[Quota] = []
        most = free = min(self.destinations.free, MAX_BATCH_ENTRIES)
        self._is_short |= free <= 0
        most_called = free_called = self._pace.free
        names = self._turns.next(with_held=most_called > 0) if free > 0 else ()
        for number, name in enumerate(names, start=1):
            destination = self._of[name]
            is_called = self.destinations.has_callbacks(destination)
            permits = self._permits(destination, most, most_called if is_called else None, now)
            if permits > 0:
                reserved, called = min(permits, free), min(permits, free_called) if is_called else None
                recent = self._recent(destination, now)
                quota = Quota(name, permits, destination.due_from, reserved=reserved, called_back=called, recent=recent)
                quotas.append(self.destinations.reserve_quota(quota))
                free -= reserved
                free_called -= called or 0
            if len(quotas) >= MAX_DESTINATIONS or (quotas and number >= MAX_LOOKED_AT):
                break
        share = self.destinations.share
        return quotas if share is None else self._within(share, quotas, now)

    def _permits(self, destination: Destination, most: int, most_called: int | None, now: float) -> int:
        """How many of its entries a claim asks for. If callbacks have no room for any, the destination keeps its turn.

        most_called: for how many more entries callbacks have room; None for a destination without callbacks.
        """
        if self._is_shut(destination, now):
            self._is_short |= destination.is_full  # it opens when a send ends, and not by the clock
            return 0
        if most_called == 0:
            self._turns.hold(destination.name)
            return 0
        permits = min(self.destinations.free_of(destination, now), most)
        if most_called is not None:
            permits = min(permits, self._pace.free_of(destination), most_called)
        self._is_short |= permits <= 0
        return permits

    def _next_known(self, now: float) -> list[Quota]:
        """The quotas for entries whose end is stored. Nothing is sent, so neither a destination's permits nor its pause count.

        All these destinations get equal shares, because a claim may bring nothing for some of them, however often they are asked.
        """
        quotas: list[Quota] = []
        names = self._known_names(now)
        asked = names[: MAX_DESTINATIONS // 2]
        free = self.destinations.free_known
        share = max(1, free // max(1, len(asked)))
        for name in asked:
            destination = self._of[name]
            is_called = self.destinations.has_callbacks(destination)
            permits = min(share, free)
            if is_called:
                permits = min(permits, self._pace.free_of(destination), self._pace.free)
            if permits > 0:
                del self._known[name]
                free -= permits
                called = permits if is_called else None
                quota = Quota(name, permits, EPOCH, reserved=permits, admitted=True, called_back=called, known=True)
                quotas.append(self.destinations.reserve_quota(quota))
            elif is_called and not self._pace.free:
                self._turns.hold(name)
        self._more_known = len(names) > len(asked) or (bool(quotas) and free <= 0 and len(quotas) < len(asked))
        return quotas

    def _known_names(self, now: float) -> list[str]:
        return [name for name in self._known if self._of[name].skipped_until <= now]

    def _is_shut(self, destination: Destination, now: float) -> bool:
        if self.destinations.is_paused(destination):
            return True
        return max(destination.skipped_until, destination.shut_until) > now

    def _within(self, share: Share, asked: Sequence[Quota], now: float) -> list[Quota]:
        """The quotas, cut to what the limits that several databases share still allow."""
        left, called_left = max_entries(asked), max_callbacks(asked)
        quotas: list[Quota] = []
        for quota in asked:
            quota = self.destinations.cut(quota, self._shared_permits(share, quota, now), left, called_left)
            left -= quota.reserved
            called_left -= quota.called_back or 0
            if quota.permits:
                quotas.append(quota)
            else:
                self._is_short = True
        return quotas

    def _shared_permits(self, share: Share, quota: Quota, now: float) -> int:
        destination, ahead = self._of[quota.destination], 0
        if self.destinations.claims_ahead and quota.called_back is None:
            ahead = self.destinations.ahead(destination, now)
        permits, again_in = share.limits.take(share.database, destination.name, quota.permits, now, ahead=ahead)
        if again_in is not None:
            destination.shut_until = max(destination.shut_until, now + again_in)
        elif not permits and share.limits.is_crowded(share.database):
            self._turns.owe([destination.name])
        return permits

    # --- the result of a claim

    def note_claim(
        self,
        quotas: Sequence[Quota],
        claimed: Sequence[ClaimedEntry],
        *,
        passed_over: int = 0,
        hints_follow: bool = False,
    ) -> bool:
        """Note the result of a claim, and release unused permits. Returns whether the next round begins.

        A round begins after each claim that brought entries, because more may be due. hints_follow: whether hints announce new
        entries; then a round begins only if half of a quota was used (not all of it, because the claim rounds quotas).
        passed_over: how many more entries the claim met, which are not in `claimed`.
        """
        self._end_claim(quotas, claimed)
        self._is_short |= not hints_follow
        counts = Counter([entry.destination for entry in claimed])
        for entry in claimed:
            self.destinations.reserve(entry)
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

    def release(self, quotas: Sequence[Quota]) -> None:
        """Release the permits of a claim that failed. Its destinations keep their turns."""
        self._end_claim(quotas, ())
        self._turns.owe(quota.destination for quota in quotas if not quota.known)
        self._known |= {quota.destination: None for quota in quotas if quota.known}

    def _end_claim(self, quotas: Sequence[Quota], claimed: Sequence[ClaimedEntry]) -> None:
        """Release the permits that the quotas have taken."""
        share = self.destinations.share
        if share is not None:
            tokens: dict[str, list[UUID]] = {}
            for entry in claimed:
                if not entry.is_known:
                    tokens.setdefault(entry.destination, []).append(entry.lease_token)
            for quota in [quota for quota in quotas if not quota.known]:
                share.end_claim(quota.destination, quota.permits, tokens.get(quota.destination, ()))
        self.destinations.release_quotas(quotas)

    def _note_reads(self, quotas: Sequence[Quota]) -> None:
        """Note full reads that found no entry which this process serves."""
        for quota in quotas:
            destination = self._of[quota.destination]
            if quota.recent is None and destination.read_at is not None:
                destination.read_at = destination.asked_at  # it stays None while no unserved entry is known

    def _remember_due_from(self, claimed: Sequence[ClaimedEntry]) -> None:
        latest: dict[str, datetime] = {}
        for entry in claimed:
            if not entry.is_known and entry.queued_at > latest.get(entry.destination, EPOCH):
                latest[entry.destination] = entry.queued_at
        for name, queued_at in latest.items():
            self._of[name].due_from = max(self._of[name].due_from, queued_at - DUE_FROM_SLACK)


def _unreached(quotas: Sequence[Quota], counts: Counter[str], passed_over: int) -> list[Quota]:
    """The quotas that a full claim may not have reached: those without an entry.

    A claim certainly reaches its first quota. The next claim asks the others first. Each full claim makes them fewer, so each
    destination is reached at last, in whatever order the database serves them.
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
