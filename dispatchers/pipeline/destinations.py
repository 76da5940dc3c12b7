"""The destinations of a dispatcher, one record each, and their permits: how many entries may be claimed, sent, called back.

No I/O. All instants are seconds of the process's clock.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from dispatchers.flow_control.quota import Quota
from dispatchers.flow_control.state import FlowState, limits_of, service_of
from dispatchers.flow_control.surveys import Share
from dispatchers.pipeline.attempt import Attempt
from dispatchers.pipeline.routing import Routes
from dispatchers.settings import Settings
from dispatchers.transitions import ClaimedEntry
from outbox.times import EPOCH

# --- entries claimed ahead: if sends are shorter than a claim, permits would stay unused until the next claim

AHEAD_SECONDS: Final = 0.1
"""How long an entry that is claimed ahead waits on average: much shorter than a lease, but longer than a claim."""

MAX_AHEAD_SHARE: Final = 0.7
"""The share of `max_in_flight` for one destination. If its sends suddenly become slow, the others need the rest."""

MEASURED_SECONDS: Final = 0.02

WAIT_SECONDS: Final = 1.0
"""Ten times the usual wait of an entry claimed ahead: its destination has become slow, and others may send it sooner."""

MAX_KNOWN: Final = 250
"""How many entries whose end is stored may be claimed at a time. They are not sent, so `max_in_flight` does not count them."""

MAX_REMEMBERED: Final = 1000
"""How many idle destinations without entries are remembered. Their names come from rows, so their number needs a limit."""

# --- callbacks

ASSUMED_SECONDS: Final = 1.0  # assumed duration of a callback, until one was measured
WEIGHT: Final = 0.1  # weight of the newest measurement in the average
UNLIMITED: Final = 1_000_000

OPEN: Final = -math.inf
"""`Destination.shut_until` of a destination that is not shut."""

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Destination:
    """What this process knows of one destination.

    permits: how many sends may run at the same time. can_wait: whether entries may be claimed ahead of their sends.
    has_callbacks: whether its own operations have callbacks, without those of its service.

    claimed: the entries that are claimed, or asked for. called_back: the number of them that may need a callback.
    sending: the sends that run. waiting: the attempts that wait for a permit.
    ended: the sends that have ended since `measured_at`. ends_per_second: the rate before that.

    due_from: entries that are due earlier were seen already. skipped_until: nothing is claimed before, because this process
    serves none of its operations.
    read_at: the last full read, if there are entries that this process does not serve. asked_at: when a full read began.

    flow_state: as read last; None if there is none. shut_until: nothing is claimed before. is_full: whether it is shut only
    because no shared permit is free. throttled: the reason as logged. probe: the lease token of the breaker's probe, if this
    process sends it. failure: the reason of the last outcome here, if it was a failure.
    shared_sends: the sends with a shared permit, by lease token. reporting: failures that exchanges are reporting now.
    """

    name: str
    service: str
    permits: int
    can_wait: bool
    has_callbacks: bool
    claimed: int = 0
    called_back: int = 0
    sending: int = 0
    waiting: list[Attempt] = field(default_factory=list)
    ended: int = 0
    measured_at: float | None = None
    ends_per_second: float = 0.0
    due_from: datetime = EPOCH
    skipped_until: float = 0.0
    read_at: float | None = None
    asked_at: float = -math.inf
    flow_state: FlowState | None = None
    shut_until: float = OPEN
    is_full: bool = False
    throttled: str | None = None
    probe: UUID | None = None
    failure: str | None = None
    shared_sends: dict[UUID, int] = field(default_factory=dict)
    reporting: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether the record may be forgotten and made again."""
        is_free = not (self.claimed or self.called_back or self.sending or self.waiting)
        is_open = self.flow_state is None and self.throttled is None and self.shut_until == OPEN
        return is_free and is_open and self.probe is None and not (self.shared_sends or self.reporting)

    @property
    def is_remembered(self) -> bool:
        """Whether the record stores something that a new one would have to learn again."""
        return self.has_callbacks or self.read_at is not None


class _Records(dict[str, Destination]):
    """The records by name. A missing one is created."""

    def __init__(self, make: Callable[[str], Destination]) -> None:
        self._make = make

    def __missing__(self, name: str) -> Destination:
        made = self[name] = self._make(name)
        return made


class CallbackPace:
    """How many entries with callbacks may be claimed: as many as callbacks can settle before the leases end.

    at_once: how many callbacks run at the same time. usable: the lease without the margin: callbacks may use half of it, sends
    the other half. most: how many entries may be claimed in all, however short the callbacks are, unless fewer than the callbacks
    need. seconds_each: the average duration of a callback. claimed: how many such entries are claimed, or asked for.
    """

    def __init__(self, at_once: int, usable: timedelta, most: int = UNLIMITED) -> None:
        self._at_once = at_once
        self._most = most
        self._seconds_planned = usable.total_seconds() / 2
        self.seconds_each = min(ASSUMED_SECONDS, self._seconds_planned)
        self._is_measured = False
        self.claimed = 0

    @property
    def max_entries(self) -> int:
        """How many such entries may be claimed in all: at least two for each running callback, so that none waits for a claim."""
        most = self._most
        if self.seconds_each * most > self._at_once * self._seconds_planned:
            most = int(self._at_once * self._seconds_planned / self.seconds_each)
        return max(2 * self._at_once, most)

    def measure(self, seconds: float) -> None:
        """Note the duration of a callback; 0 for an entry that ended without one."""
        weight = WEIGHT if self._is_measured else 1.0
        self._is_measured = True
        self.seconds_each += weight * (seconds - self.seconds_each)

    @property
    def free(self) -> int:
        """How many more entries may be claimed, of all destinations with callbacks."""
        return max(0, self.max_entries - self.claimed)

    def free_of(self, destination: Destination) -> int:
        """How many more of its entries may be claimed. One destination gets half of all at most, so that others need not wait."""
        return max(0, (self.max_entries + 1) // 2 - destination.called_back)


class Destinations:
    """The records of all destinations, and the permits that they share.

    permits: how many sends to one destination run at the same time. permits_of: other numbers for single ones.
    permits_in_all: the total of claimed entries, without those whose end is stored. pace: limits the entries with callbacks.
    called_back: the destinations that have operations with callbacks. can_wait: whether entries of a destination may be claimed
    ahead. After a crash every claimed entry may have been sent, so a repeated send must be harmless there. max_ahead: the limit
    for one destination. share: this database's part of limits that several databases share; None without them.

    of: the record of a name. pace: of the callbacks.
    claims_ahead: false for `run_once`, which must send all due entries and may release none.
    """

    def __init__(
        self,
        *,
        permits: int,
        permits_in_all: int,
        permits_of: Mapping[str, int] = _NONE,
        pace: CallbackPace | None = None,
        called_back: Iterable[str] = (),
        can_wait: Callable[[str], bool] = lambda name: False,
        max_ahead: int = 0,
        share: Share | None = None,
    ) -> None:
        self._permits = permits
        self._permits_of = permits_of
        self._permits_in_all = permits_in_all
        self._claimed = 0
        self._known = 0  # claimed entries whose end is stored
        self._called_back = frozenset(called_back)
        self._can_wait = can_wait
        self._max_ahead = max_ahead
        self.share = share
        self._waiting: dict[str, Destination] = {}  # in the order in which their attempts began to wait
        self.pace = pace or CallbackPace(1, timedelta(0))
        self.claims_ahead = False
        self.of = _Records(self._record)

    def _record(self, name: str) -> Destination:
        service = service_of(name)
        permits = self._permits_of.get(name) or self._permits_of.get(service, self._permits)
        return Destination(name, service, permits, self._can_wait(name), name in self._called_back)

    def forget_all_but(self, names: Collection[str]) -> None:
        """Forget what was measured of other destinations. Of the idle ones, keep the newest that are remembered."""
        kept = frozenset(names)
        others = [each for name, each in self.of.items() if name not in kept]
        for destination in others:
            destination.measured_at, destination.can_wait = None, self._can_wait(destination.name)
        idle = [each for each in others if each.is_idle]
        remembered = [each for each in idle if each.is_remembered][-MAX_REMEMBERED:]
        for destination in set(idle).difference(remembered):
            del self.of[destination.name]

    def is_paused(self, destination: Destination) -> bool:
        """Whether an operator has paused its service: a pause of `stripe` pauses its accounts."""
        service = self.of.get(destination.service)
        return service is not None and service.shut_until == math.inf

    # --- claimed entries

    @property
    def free(self) -> int:
        """How many more entries may be claimed, of all destinations."""
        return self._permits_in_all - self._claimed

    def free_of(self, destination: Destination, now: float) -> int:
        """How many of its entries the next claim may ask for: at most half, so that others are sent meanwhile."""
        most = destination.permits
        if self.claims_ahead and not self.has_callbacks(destination):
            most += self.ahead(destination, now)
        return min(most - destination.claimed, (most + 1) // 2)

    @property
    def free_known(self) -> int:
        """How many more entries whose end is stored may be claimed, of all destinations."""
        return MAX_KNOWN - self._known

    def reserve(self, entry: ClaimedEntry, *, is_sent: bool = False) -> None:
        """Take the permit of an entry that was claimed. is_sent: that waits for its callback: then its destination gets no other
        entry instead, but the other destinations do.
        """
        if entry.is_known:
            self._known += 1
        else:
            self.of[entry.destination].claimed += 1
            self._claimed += not is_sent

    def release(self, entry: ClaimedEntry, *, is_sent: bool = False) -> None:
        """Give back the permit of an entry that does not need it any more. is_sent: as it was taken."""
        if entry.is_known:
            self._known -= 1
        else:
            self.of[entry.destination].claimed -= 1
            self._claimed -= not is_sent

    def _reserve(self, name: str, permits: int, *, in_all: int) -> None:
        """in_all: how many of them count for the total. A claim may ask for more entries than it can bring."""
        self.of[name].claimed += permits
        self._claimed += in_all

    def has_callbacks(self, destination: Destination) -> bool:
        """Whether its entries may need callbacks."""
        if destination.has_callbacks or destination.service == destination.name:
            return destination.has_callbacks
        service = self.of.get(destination.service)
        return destination.service in self._called_back if service is None else service.has_callbacks

    def reserve_callbacks(self, name: str, entries: int = 1, *, in_all: int | None = None) -> None:
        """Note that entries were claimed or asked for that may need a callback."""
        destination = self.of[name]
        if not self.has_callbacks(destination):
            destination.has_callbacks = True
        destination.called_back += entries
        self.pace.claimed += entries if in_all is None else in_all

    def release_callbacks(self, name: str, entries: int = 1, *, in_all: int | None = None) -> None:
        self.of[name].called_back -= entries
        self.pace.claimed -= entries if in_all is None else in_all

    # --- the quotas of a claim

    def reserve_quota(self, quota: Quota) -> Quota:
        """Take the permits of a quota."""
        if quota.known:
            self._known += quota.reserved
        else:
            self._reserve(quota.destination, quota.permits, in_all=quota.reserved)
        if quota.called_back is not None:
            self.reserve_callbacks(quota.destination, quota.permits, in_all=quota.called_back)
        return quota

    def release_quotas(self, quotas: Iterable[Quota]) -> None:
        for quota in quotas:
            if quota.known:
                self._known -= quota.reserved
            else:
                self._reserve(quota.destination, -quota.permits, in_all=-quota.reserved)
            if quota.called_back is not None:
                self.release_callbacks(quota.destination, quota.permits, in_all=quota.called_back)

    def cut(self, quota: Quota, permits: int, left: int, called_left: int) -> Quota:
        """The quota with so many permits; the others are released. left, called_left: what is left of the claim's totals."""
        reserved = min(left, permits)
        self._reserve(quota.destination, permits - quota.permits, in_all=reserved - quota.reserved)
        if quota.called_back is None:
            return quota._replace(permits=permits, reserved=reserved)
        called = min(called_left, permits)
        self.release_callbacks(quota.destination, quota.permits - permits, in_all=quota.called_back - called)
        return quota._replace(permits=permits, reserved=reserved, called_back=called)

    # --- claiming ahead

    def ahead(self, destination: Destination, now: float) -> int:
        """How many of its entries to claim ahead; it depends on how many sends end in a second."""
        if not destination.can_wait:
            return 0
        if destination.measured_at is None:
            destination.measured_at, destination.ended, destination.ends_per_second = now, 0, 0.0
        seconds = now - destination.measured_at
        if seconds >= MEASURED_SECONDS:
            destination.ends_per_second = destination.ended / seconds
            destination.measured_at, destination.ended = now, 0
        return min(int(destination.ends_per_second * AHEAD_SECONDS), self._max_ahead)

    def note_end(self, name: str) -> None:
        """Count a send that has ended. Entries that were released without a send do not count, because the service may hang."""
        self.of[name].ended += 1

    def exclude(self, name: str) -> None:
        """Stop claiming ahead for a destination with an entry for which a repeated send is not harmless."""
        self.of[name].can_wait = False

    # --- sends

    def is_free(self, name: str) -> bool:
        """Whether another entry of this destination may be sent now."""
        destination = self.of[name]
        if destination.waiting or destination.sending >= destination.permits:
            return False
        return self.share is None or self.share.limits.is_free(name)

    def begin(self, attempt: Attempt) -> bool:
        """Return True if the attempt may run now; otherwise it waits.

        It waits too if it was claimed before another database's failure opened the breaker.
        """
        name, share = attempt.entry.destination, self.share
        is_closed = share is None or share.limits.may_begin(name, attempt.entry.lease_token)
        begins, destination = is_closed and self.is_free(name), self.of[name]
        if begins:
            destination.sending += 1
        else:
            destination.waiting.append(attempt)
            self._waiting[name] = destination
        if share is not None:
            (share.limits.begin if begins else share.limits.wait)(share.database, name)
        return begins

    def end(self, name: str) -> bool:
        """Note that a send to this destination has ended. Returns whether attempts wait for its permit."""
        destination = self.of[name]
        destination.sending -= 1
        if self.share is not None:
            self.share.limits.end(self.share.database, name)
        return bool(destination.waiting)

    @property
    def sending(self) -> dict[str, int]:
        """How many sends to each destination are running."""
        return {name: each.sending for name, each in self.of.items() if each.sending}

    # --- attempts that wait for a permit

    @property
    def waiting(self) -> Mapping[str, Destination]:
        """The destinations with waiting attempts."""
        return self._waiting

    def next(self, name: str) -> Attempt | None:
        """Take the next waiting attempt of this destination, if it may run now."""
        destination, share = self._waiting.get(name), self.share
        may_follow = share is None or share.limits.may_follow(share.database, name)
        if destination is None:
            return None
        if not may_follow or destination.sending >= destination.permits:
            if share is not None:
                share.limits.wait(share.database, name)
            return None
        destination.sending += 1
        attempt = destination.waiting.pop(0)
        if not destination.waiting:
            del self._waiting[name]
        if share is not None:
            share.limits.begin(share.database, name)
        return attempt

    def take_waiting(self, name: str) -> list[Attempt]:
        """Take all waiting attempts of this destination; they do not run."""
        destination = self._waiting.pop(name)
        taken, destination.waiting = destination.waiting, []
        return taken

    def take_late(self, now: float) -> list[Attempt]:
        """Take the waiting attempts of each destination whose first one has waited too long."""
        since = now - WAIT_SECONDS
        late = [name for name, each in self._waiting.items() if each.waiting[0].claimed_at < since]
        return [attempt for name in late for attempt in self.take_waiting(name)]

    def take_all(self) -> list[Attempt]:
        """Take all waiting attempts."""
        return [attempt for name in list(self._waiting) for attempt in self.take_waiting(name)]


def destinations_for(
    settings: Settings, routes: Routes, called_back: Iterable[str], share: Share | None
) -> Destinations:
    """Entries may be claimed ahead if a repeated send is harmless and the destination shares no limit with other dispatchers."""

    def can_wait(name: str) -> bool:
        return service_of(name) in routes.repeatable and not limits_of(settings.limits, name).are_shared

    return Destinations(
        permits=settings.concurrency,
        permits_in_all=settings.max_in_flight,
        permits_of=settings.concurrency_of,
        pace=CallbackPace(
            settings.callback_concurrency, settings.usable, 2 * settings.max_in_flight
        ),  # half are of one
        called_back=called_back,
        can_wait=can_wait,
        max_ahead=int(settings.max_in_flight * MAX_AHEAD_SHARE),
        share=share,
    )
