"""A simulation of dispatchers that drain databases, from measured service times: a closed queueing network.

Each dispatcher has two claim loops for each of its databases. A loop repeats one exchange: its process prepares it, the server
settles and claims a batch, and the commit waits for a flush of the WAL. The process works on one thing at a time, a server's
cores are shared by all that it executes, and one flush serves every commit that waited for it. A claim walks over the rows
that others have claimed since this dispatcher's last claim. The queue never becomes empty.

Pure: the same times, layout and seed give the same rate.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from dispatchers.pipeline.claim_loops import CLAIM_LOOPS
from dispatchers.pipeline.destinations import AHEAD_SECONDS, MAX_AHEAD_SHARE, MEASURED_SECONDS
from dispatchers.pipeline.scheduler import MAX_BATCH_ENTRIES
from dispatchers.settings import Settings

EXCHANGES = 4_000  # of a simulation; with many loops, `EXCHANGES_OF_A_LOOP` of each
EXCHANGES_OF_A_LOOP = 16
WARM_UP = 0.25  # of the exchanges
TRIPS_BEFORE, TRIPS_AFTER = 3, 1  # round trips of an exchange before its rows are locked, and until its commit

Then = Callable[[], None]
Step = Callable[[Then], None]
"""Something that takes time. It calls its argument when it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Microseconds. client, server: CPU of an exchange, and of each entry in it. locked, leased: CPU of the server to pass over
    a row that an open transaction has claimed, and one that another dispatcher has leased. flush: of the WAL.
    """

    client_exchange: float
    client_entry: float
    server_exchange: float
    server_entry: float
    locked_row: float
    leased_row: float
    flush: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """databases: each on a server of its own, with so many cores. A dispatcher serves as many databases as any other.

    is_one_machine: whether the dispatchers share the cores of the only server; otherwise each has a core of its own.
    round_trip: microseconds between a dispatcher and a server.
    """

    dispatchers: int
    databases: int = 1
    cores: float
    is_one_machine: bool = False
    round_trip: float = 0.0

    def databases_of(self, dispatcher: int) -> list[int]:
        if self.dispatchers >= self.databases:
            return [dispatcher % self.databases]
        return list(range(dispatcher, self.databases, self.dispatchers))


def entries_per_second(times: Times, layout: Layout, seed: int = 0) -> float:
    """Of all dispatchers together."""
    return Simulation(times, layout, random.Random(seed)).run()


class Events:
    """What happens when. now: microseconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._heap: list[tuple[float, int, Then]] = []

    def after(self, delay: float, then: Then) -> None:
        heappush(self._heap, (self.now + delay, next(self._numbers), then))

    def next(self) -> None:
        self.now, _, then = heappop(self._heap)
        then()

    def start(self, steps: Iterator[Step]) -> None:
        """Take the steps, each when the one before has ended."""

        def resume() -> None:
            next(steps)(resume)

        resume()


class Cores:
    """Some cores that all work at hand shares equally, none of it on more than one."""

    def __init__(self, events: Events, cores: float) -> None:
        self._events, self._cores = events, cores
        self._done, self._at = (
            0.0,
            0.0,
        )  # how much of each work was done since the beginning, and until when that was counted
        self._numbers = count()
        self._heap: list[tuple[float, int, Then]] = []
        self._version = 0

    @property
    def _speed(self) -> float:
        return min(1.0, self._cores / len(self._heap))

    def work(self, amount: float) -> Step:
        def step(then: Then) -> None:
            self._advance()
            heappush(self._heap, (self._done + amount, next(self._numbers), then))
            self._plan()

        return step

    def _advance(self) -> None:
        if self._heap:
            self._done += (self._events.now - self._at) * self._speed
        self._at = self._events.now

    def _plan(self) -> None:
        self._version += 1
        if self._heap:
            version, left = self._version, max(0.0, self._heap[0][0] - self._done)
            self._events.after(left / self._speed, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return  # something has begun since: another event was planned
        self._advance()
        _, _, then = heappop(self._heap)
        self._plan()
        then()


class Process:
    """A dispatcher: it works on one thing at a time, on some cores."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._waiting: deque[tuple[float, Then]] = deque()
        self._is_busy = False

    def work(self, amount: float) -> Step:
        def step(then: Then) -> None:
            self._waiting.append((amount, then))
            self._next()

        return step

    def _next(self) -> None:
        if self._is_busy or not self._waiting:
            return
        amount, then = self._waiting.popleft()
        self._is_busy = True

        def end() -> None:
            self._is_busy = False
            self._next()
            then()

        self._cores.work(amount)(end)


class Disk:
    """A commit waits for a flush that begins after it; one flush serves all that wait."""

    def __init__(self, events: Events, flush: float) -> None:
        self._events, self._flush = events, flush
        self._waiting: list[Then] = []
        self._is_busy = False

    def commit(self, then: Then) -> None:
        self._waiting.append(then)
        self._begin()

    def _begin(self) -> None:
        if self._is_busy or not self._waiting:
            return
        served, self._waiting, self._is_busy = self._waiting, [], True

        def end() -> None:
            self._is_busy = False
            self._begin()
            for then in served:
                then()

        self._events.after(self._flush, end)


@dataclass(slots=True)
class Database:
    """claimed: entries so far. locked: of these, those whose claim has not committed."""

    cores: Cores
    disk: Disk
    claimed: int = 0
    locked: int = 0


@dataclass(slots=True)
class Share:
    """What a dispatcher knows of one of its databases. of: how many share its limits. rate: its own entries a second there,
    as `ClaimAhead` measures it.
    """

    of: int = 1
    settings: Settings = field(default_factory=Settings)
    cursor: int = 0
    ended: int = 0
    since: float = 0.0
    rate: float = 0.0

    def batch(self) -> int:
        """The quota of the next claim, as `Scheduler.take` computes it."""
        ahead = min(self.rate * AHEAD_SECONDS, self.settings.max_in_flight * MAX_AHEAD_SHARE / self.of)
        return min(math.ceil((self.settings.concurrency / self.of + ahead) / 2), MAX_BATCH_ENTRIES)

    def note(self, entries: int, now: float) -> None:
        self.ended += entries
        seconds = (now - self.since) / 1e6
        if seconds >= MEASURED_SECONDS:
            self.rate, self.ended, self.since = self.ended / seconds, 0, now


class Simulation:
    def __init__(self, times: Times, layout: Layout, rng: random.Random) -> None:
        self._times, self._layout, self._rng = times, layout, rng
        self._events = events = Events()
        self._databases = [
            Database(Cores(events, layout.cores), Disk(events, times.flush)) for _ in range(layout.databases)
        ]
        self._loops, self._exchanges, self._entries = 0, 0, 0
        for number in range(layout.dispatchers):
            own = self._databases[0].cores if layout.is_one_machine else Cores(events, 1)
            process = Process(own)
            served = layout.databases_of(number)
            for which in served:
                share = Share(len(served))
                for _ in range(CLAIM_LOOPS):
                    self._loops += 1
                    events.start(self._exchange_forever(process, self._databases[which], share))

    def run(self) -> float:
        most = max(EXCHANGES, EXCHANGES_OF_A_LOOP * self._loops)
        self._until(int(most * WARM_UP))
        began, before = self._events.now, self._entries
        self._until(most)
        return (self._entries - before) / (self._events.now - began) * 1e6

    def _until(self, exchanges: int) -> None:
        while self._exchanges < exchanges:
            self._events.next()

    def _exchange_forever(self, process: Process, database: Database, share: Share) -> Iterator[Step]:
        times = self._times
        while True:
            entries = share.batch()
            yield process.work(self._varied(times.client_exchange + entries * times.client_entry))
            yield self._trips(TRIPS_BEFORE)
            passed = database.claimed - share.cursor
            locked = min(passed, database.locked)
            walking = locked * times.locked_row + (passed - locked) * times.leased_row
            database.claimed += entries
            database.locked += entries
            share.cursor = database.claimed
            yield database.cores.work(self._varied(times.server_exchange + entries * times.server_entry) + walking)
            yield self._trips(TRIPS_AFTER)
            yield database.disk.commit
            database.locked -= entries
            share.note(entries, self._events.now)
            self._entries += entries
            self._exchanges += 1

    def _varied(self, mean: float) -> float:
        return self._rng.expovariate(1 / mean)

    def _trips(self, number: int) -> Step:
        return lambda then: self._events.after(number * self._layout.round_trip, then)
