"""The limits of destinations over all databases of one process, and how the databases share them. No I/O.

One event loop calls it, so each call is one step. Each database's rows hold the limits over all processes, as always: an entry
needs both. Instants are seconds of the process's clock.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Literal
from uuid import UUID

from dispatchers.flow_control.state import (
    UNTHROTTLED,
    FlowState,
    Limits,
    News,
    admitted,
    claimed,
    closed_until,
    heard,
    limits_of,
    opens_at,
)
from outbox.times import EPOCH

RESERVED_SECONDS = 1.0  # a claim that takes longer keeps no permit from the others: its database may hang
WANTING_SECONDS = 1.0  # a database that does not ask again for this time leaves its share to the others
AGAIN_SECONDS = 1.0  # a refused database asks again after this time at the latest, so no lost wake-up lasts
TURN_SECONDS = 0.02  # the same if only other databases' turn was before its own
MAX_DESTINATIONS = 1000  # names come from rows; more are forgotten while nothing is known about them

NO_TOKEN = UUID(int=0)  # of a claim that has not ended


def fair_share(database: str, wanted: int, free: int, held: Mapping[str, int], waiting: Sequence[str]) -> int:
    """How many of `free` to give to `database`, so that all who want more come to hold the same.

    held: by database. waiting: the databases that want more than they hold, `database` among them. The first ones get what
    cannot be divided.
    """
    if len(waiting) == 1:
        return min(wanted, free)
    level, rest = divmod(free + sum(held.get(each, 0) for each in waiting), len(waiting))
    level += waiting.index(database) < rest
    return max(0, min(wanted, free, level - held.get(database, 0)))


class Permits:
    """A number of permits for all databases. A permit is reserved for a claim, and then used by a send.

    sending: the sends under way, by database. sending_in_all: of all databases.
    """

    def __init__(self) -> None:
        self.sending: Counter[str] = Counter()
        self.sending_in_all = 0
        self._reserved: deque[tuple[str, int, float]] = deque()

    @property
    def are_unused(self) -> bool:
        return not (self.sending or self._reserved)

    def held(self, now: float) -> Counter[str]:
        """The permits in use or reserved, by database."""
        held = self.sending.copy()
        for database, permits, at in self._reserved:
            if now - at < RESERVED_SECONDS:
                held[database] += permits
        return held

    def reserve(self, database: str, permits: int, now: float) -> None:
        self._reserved.append((database, permits, now))

    def unreserve(self, database: str, permits: int) -> None:
        """End the oldest reservation of this size."""
        found = next(each for each in self._reserved if each[:2] == (database, permits))
        self._reserved.remove(found)

    def begin(self, database: str) -> None:
        self.sending[database] += 1
        self.sending_in_all += 1

    def end(self, database: str) -> None:
        self.sending[database] -= 1
        self.sending_in_all -= 1
        if not self.sending[database]:
            del self.sending[database]


@dataclass(slots=True)
class Destination:
    """What all databases share of one destination.

    limits: without those of permits. max_permits: how many sends may be under way. state: cooldown, breaker and rate.
    wanting: when a database was last refused a part. served: how many entries each has claimed since several want more.
    turns: the databases in the order of their last claims. busy: the databases whose last claim brought an entry.
    probing: the database that claims the breaker's probe now.
    """

    limits: Limits
    max_permits: int
    state: FlowState = UNTHROTTLED
    permits: Permits = field(default_factory=Permits)
    wanting: dict[str, float] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)
    turns: dict[str, None] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    probing: str | None = None

    def is_unused(self, now: float) -> bool:
        """Whether nothing is known about it that matters."""
        until = max(filter(None, (self.state.cooldown_until, self.state.rate_at)), default=EPOCH)
        return self.permits.are_unused and self.state.breaker == "closed" and until <= instant(now)

    def waiting(self, database: str, now: float) -> list[str]:
        """The databases that want more, with `database`: first those whose last claim is the longest ago."""
        if self.wanting.keys() <= {database}:
            self.served.clear()
            return [database]
        fresh = {each for each, since in self.wanting.items() if now - since < WANTING_SECONDS} | {database}
        if len(fresh) == 1:
            self.served.clear()
        elif database not in self.served:  # one that comes later has no claim to the past
            self.served[database] = min(self.served.values(), default=0)
        return [*sorted(fresh - self.turns.keys()), *(each for each in self.turns if each in fresh)]

    def reserve(self, database: str, permits: int, now: float) -> None:
        self.permits.reserve(database, permits, now)
        self.served[database] += permits
        self.turns.pop(database, None)
        self.turns[database] = None
        if self.state.breaker != "closed":
            self.probing = database
        soon = timedelta(seconds=RESERVED_SECONDS)
        self.state = claimed(self.state, self.limits, instant(now), permits, NO_TOKEN, soon)

    def end_claim(self, database: str, permits: int, tokens: Collection[UUID], now: float, lease: timedelta) -> None:
        self.permits.unreserve(database, permits)
        (self.busy.add if tokens else self.busy.discard)(database)
        unused = permits - len(tokens)
        if unused and self.limits.rate is not None and self.state.rate_at is not None:
            rate_at = self.state.rate_at - timedelta(seconds=unused / self.limits.rate)
            self.state = replace(self.state, rate_at=rate_at)
            self.served[database] -= unused
        if self.state.breaker == "half_open" and self.probing == database:
            self.probing, token = None, next(iter(tokens), None)
            until = instant(now) if token is None else instant(now) + lease
            breaker: Literal["open", "half_open"] = "open" if token is None else "half_open"
            self.state = replace(self.state, breaker=breaker, breaker_until=until, breaker_token=token)

    def hear(self, news: News, now: float) -> None:
        self.state = heard(self.state, news, self.limits, instant(now))

    def forget(self, database: str) -> None:
        for known in (self.wanting, self.served, self.turns):
            known.pop(database, None)
        self.busy.discard(database)


class SharedLimits:
    """limits: by destination. concurrency: the permits of a destination without limits of its own.

    max_in_flight: the permits of all destinations together. clock: the process's clock, in seconds.
    wake: called with a database that may ask again now.
    """

    def __init__(
        self,
        limits: Mapping[str, Limits],
        *,
        concurrency: int,
        max_in_flight: int,
        clock: Callable[[], float],
        wake: Callable[[str], None],
    ) -> None:
        self._limits = limits
        self._concurrency = concurrency
        self._max_in_flight = max_in_flight
        self._clock = clock
        self.wake = wake
        self._all = Permits()
        self._crowded: dict[str, float] = {}  # when the total had no permit left for a database, the first one first
        self._destinations: dict[str, Destination] = {}

    # --- a claim

    def take(self, database: str, name: str, wanted: int, now: float, *, ahead: int = 0) -> tuple[int, float | None]:
        """How many entries of destination `name` this database may claim, and after how many seconds it may ask again: None if
        it is woken. The permits are reserved until `end_claim`.

        A database that brought no entry lately asks for one first, so that idle databases take nothing from the others.
        ahead: how many of them may wait for a permit.
        """
        known = self._known(name)
        if database not in known.busy:
            wanted = 1
        at, waiting = instant(now), known.waiting(database, now)
        left = admitted(known.state, known.limits, at, self._max_in_flight)
        turn = min(wanted, left)
        if known.limits.rate is not None:
            turn = fair_share(database, wanted, left, known.served, waiting)
        room = self._room(known, database, turn, now, waiting)
        room = min(turn, room + ahead // len(waiting))
        if room < wanted:
            known.wanting[database] = now
        else:
            known.wanting.pop(database, None)
        if room:
            known.reserve(database, room, now)
            self._all.reserve(database, room, now)
        if room or turn:
            return room, None
        opens = None if left else opens_at(known.state, known.limits, at)
        return 0, TURN_SECONDS if opens is None else min(AGAIN_SECONDS, max(0.0, (opens - at).total_seconds()))

    def _room(self, known: Destination, database: str, wanted: int, now: float, waiting: Sequence[str]) -> int:
        held, in_all = known.permits.held(now), self._all.held(now)
        room = fair_share(database, wanted, max(0, known.max_permits - held.total()), held, waiting)
        line = [each for each, since in self._crowded.items() if now - since < WANTING_SECONDS]
        line += [each for each in waiting if each not in line]
        left = fair_share(database, room, max(0, self._max_in_flight - in_all.total()), in_all, line)
        if left:
            self._crowded.pop(database, None)
        elif room:
            self._crowded[database] = now
        return left

    def is_crowded(self, database: str) -> bool:
        """Whether this database waits for a permit of the total."""
        return database in self._crowded

    def waiting(self, database: str) -> list[str]:
        """The destinations of which this database may claim less than it wants."""
        now = self._clock()
        return [
            name
            for name, known in self._destinations.items()
            if now - known.wanting.get(database, -math.inf) < WANTING_SECONDS
        ]

    def end_claim(self, database: str, name: str, permits: int, tokens: Collection[UUID], lease: timedelta) -> None:
        """End the reservation of `permits`. tokens: the lease tokens of the claimed entries. lease: of these."""
        known = self._known(name)
        self._all.unreserve(database, permits)
        known.end_claim(database, permits, tokens, self._clock(), lease)
        if len(tokens) < permits:
            self._wake_waiting(known)
            self._wake_crowded()

    # --- a send

    def is_free(self, name: str) -> bool:
        """Whether another entry of this destination may be sent now."""
        return self._free(self._known(name)) > 0

    def may_begin(self, name: str, token: UUID) -> bool:
        """Whether the breaker lets this entry be sent: it is closed, or the entry is its probe. token: of the entry's lease."""
        state = self._known(name).state
        return state.breaker == "closed" or state.breaker_token == token

    def may_follow(self, database: str, name: str) -> bool:
        """Whether this database may now send an entry that waited for a permit."""
        known, now = self._known(name), self._clock()
        free = self._free(known)
        if free <= 0 or known.state.breaker != "closed" or closed_until(known.state, instant(now)) is not None:
            return False
        return fair_share(database, 1, free, known.permits.sending, known.waiting(database, now)) > 0

    def _free(self, known: Destination) -> int:
        in_all = self._max_in_flight - self._all.sending_in_all
        return min(in_all, known.max_permits - known.permits.sending_in_all)

    def wait(self, database: str, name: str) -> None:
        """Note that an entry waits for a permit."""
        self._known(name).wanting[database] = self._clock()

    def begin(self, database: str, name: str) -> None:
        self._known(name).permits.begin(database)
        self._all.begin(database)

    def end(self, database: str, name: str) -> None:
        """Free the permit of a send that has ended."""
        known = self._known(name)
        known.permits.end(database)
        self._all.end(database)
        self._wake_waiting(known)
        self._wake_crowded()

    def hear(self, name: str, news: News, token: UUID) -> None:
        """Note what an outcome means for the destination. token: of the entry's lease."""
        known = self._known(name)
        breaker = known.state.breaker
        is_news = news.failures or news.cooldown is not None
        if not is_news and breaker == "closed" and not known.state.breaker_failures:
            return
        if known.state.breaker_token == token:
            news = news._replace(probe=token, passed=not news.failures)
        known.hear(news, self._clock())
        if known.state.breaker == "closed" != breaker:
            self._wake_waiting(known)

    def end_probe(self, name: str, token: UUID) -> None:
        """Note that an entry has ended. If it was the probe and had no outcome, another entry can be the probe."""
        known = self._known(name)
        if known.state.breaker_token == token:
            known.hear(News(probe=token), self._clock())

    # --- the databases

    def forget(self, database: str) -> None:
        """Forget a database that is not served any more."""
        self._crowded.pop(database, None)
        for known in self._destinations.values():
            known.forget(database)

    def _wake_crowded(self) -> None:
        """A permit of the total is free: wake the database that has waited the longest for one."""
        if self._crowded:
            self.wake(next(iter(self._crowded)))

    def _wake_waiting(self, known: Destination) -> None:
        for database in list(known.wanting):
            self.wake(database)

    def _known(self, name: str) -> Destination:
        known = self._destinations.get(name)
        if known is None:
            if len(self._destinations) >= MAX_DESTINATIONS:
                now = self._clock()
                self._destinations = {of: each for of, each in self._destinations.items() if not each.is_unused(now)}
            limits = limits_of(self._limits, name)
            most = limits.concurrency or self._concurrency
            most = min(most, limits.total_concurrency or most)
            known = self._destinations[name] = Destination(replace(limits, total_concurrency=None), most)
        return known


def instant(now: float) -> datetime:
    """The time of the process's clock, as the rules take it."""
    return EPOCH + timedelta(seconds=now)
