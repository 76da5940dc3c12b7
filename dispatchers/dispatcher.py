"""The heart of the sending side: claim, send, settle.

A claim is committed before anything is sent, and no transaction is open during a send. What an attempt means is decided in
`decide`; what the database is told stands in `claims`. Time, chance and the store are handed in.
"""

import asyncio
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import Any
from uuid import UUID

from sqlalchemy.exc import SQLAlchemyError

from dispatchers.claims import ClaimRequest, Claims, Settlement, Store, Want
from dispatchers.decide import admit, decide
from dispatchers.delivery import (
    Adapter,
    Deferred,
    Delivered,
    Delivery,
    InProgress,
    KeyConflict,
    Outcome,
    Rejected,
    Unknown,
)
from dispatchers.lifecycle import Claimed, HandBack, Transition
from dispatchers.operations import Operations
from dispatchers.routes import Route, Routes, merge
from outbox.errors import ConfigurationError
from outbox.instance import Outbox, default
from outbox.keys import Keyring, ParentKey, Tag, derive_tag, key_fields
from outbox.schema import EPOCH, NEVER, SCHEMA_VERSION

log = logging.getLogger("outbox.dispatcher")

OUTCOMES = (Delivered, Rejected, KeyConflict, Deferred, InProgress, Unknown)
BATCH_ENTRIES_MAX = 500  # storage.md: beyond it a larger claim gains little and holds its lease longer
DESTINATIONS_MAX = 50  # in one claim; more take turns
SWEEP_SECONDS = 1.0  # what became due behind the hints is found by then
HINT_SLACK = timedelta(
    milliseconds=250
)  # transactions that take so long to commit are seen without waiting for a sweep
LINGER_SECONDS = 0.01  # settling waits so long for company
UNSERVED_DELAY = timedelta(seconds=15)  # how long another process has to take what this one does not serve
STORE_RETRY_SECONDS = (0.1, 5.0)


def steady_clock() -> float:
    """Seconds that never go back, and go on while the machine is suspended."""
    return time.clock_gettime(_STEADY)


_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Dispatcher:
    """Sends what the outbox holds.

    target: a database URL, an Engine or an AsyncEngine. adapters: by operation prefix; the longest dotted prefix wins.
    include: the app's own `Operations`. keyring, outbox: by default the configured ones.
    lease: how long a claim holds; a crashed process's entries are free again after that. margin: what clocks and pauses
        may take off it. concurrency: sends at once to one destination; in_flight_max: to all of them.
    poll: how long an idle dispatcher waits. grace: how long a drain waits for what is in flight.
    store, clock, chance: what it works with, for tests and simulations.

    Raises `ConfigurationError` for adapters under which the promises could not be kept.
    """

    def __init__(
        self,
        target: Any = None,
        *,
        adapters: Mapping[str, Adapter] | None = None,
        include: Sequence[Operations] = (),
        keyring: Keyring | None = None,
        outbox: Outbox | None = None,
        lease: timedelta = timedelta(seconds=60),
        margin: timedelta = timedelta(seconds=5),
        concurrency: int = 100,
        in_flight_max: int = 1000,
        poll: timedelta = timedelta(seconds=1),
        grace: timedelta = timedelta(seconds=30),
        store: Store | None = None,
        clock: Callable[[], float] = steady_clock,
        chance: random.Random | None = None,
    ) -> None:
        if concurrency < 1 or in_flight_max < 1:
            raise ConfigurationError("concurrency and in_flight_max must be at least 1")
        self._outbox = outbox or default
        self._keyring = keyring
        self._routes = Routes(merge(adapters or {}, *(o.adapters for o in include)), lease=lease, margin=margin)
        self._lease = lease
        self._margin = margin.total_seconds()
        self._concurrency = concurrency
        self._in_flight_max = in_flight_max
        self._poll = poll.total_seconds()
        self.grace = grace
        self.store: Store = store or Claims(target, self._outbox.configuration)
        self._clock = clock
        self._chance = chance or random.SystemRandom()
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight: Counter[str] = Counter()
        self._settlements: list[Settlement] = []
        self._settled_some = asyncio.Event()
        self._hints: dict[str, datetime] = {}
        self._destinations: list[str] = list(self._routes.destinations)
        self._swept_at = -SWEEP_SECONDS

    @property
    def keyring(self) -> Keyring:
        return self._keyring or self._outbox.configuration.keyring

    async def run_once(self) -> int:
        """Claim, send and settle whatever is due now; returns how many entries it settled, whatever their outcome.

        What comes due again meanwhile is left for the next call. Raises what the database raises.
        """
        settled, cutoff = 0, NEVER
        await self._sweep()
        while True:
            count, claimed = await self._exchange(self._wants(), cutoff)
            settled += count
            if not claimed:
                return settled
            cutoff = min(cutoff, claimed[0].now)
            await self._finish()

    async def pump(self, stopping: asyncio.Event) -> None:
        """Claim, send and settle until `stopping` is set; then finish what is in flight and settle it.

        A database that is away is waited for; outcomes are kept meanwhile.
        """
        while not stopping.is_set():
            claimed = await self._exchange_patiently(stopping)
            await asyncio.sleep(0)  # what needs no waiting is done here, before anyone is asked to wait
            if not claimed or not self._wants():
                await self._rest(stopping)
        await self._drain()

    async def check(self) -> None:
        """Raise what would keep this dispatcher from working: missing tables, an unknown key id among the entries."""
        await self.store.check()
        kid = await self.store.unknown_kid(self.keyring.kids)
        if kid is not None:
            raise ConfigurationError(
                f"unsettled entries were enqueued under kid {kid!r}, which is not in the key ring {self.keyring.kids}:"
                " keep an old secret until its last entry has settled"
            )

    def run(self) -> None:
        """Work until SIGTERM or Ctrl-C, then drain. Needs the extra `dispatcher`."""
        from dispatchers import daemon  # loads apscheduler, which a single `run_once()` can do without

        daemon.run(self)

    # --- claiming and settling

    async def _exchange(self, wants: Sequence[Want], cutoff: datetime) -> tuple[int, list[Claimed]]:
        """Settle what has come back, claim what is wanted, start its sending. Returns the count settled, the claims."""
        settlements, self._settlements = self._settlements, []
        self._settled_some.clear()
        request = ClaimRequest(
            wants=wants,
            entries_max=min(self._in_flight_max - len(self._tasks), BATCH_ENTRIES_MAX),
            token=UUID(int=self._chance.getrandbits(128)),
            lease=self._lease,
            forms=self._routes.forms,
            cutoff=cutoff,
        )
        started = self._clock()
        try:
            exchange = await self.store.exchange(settlements, request)
        except BaseException:
            self._settlements[:0] = settlements  # kept until the database is back
            raise
        self._report_lost(settlements, exchange.settled)
        self._remember_hints(exchange.claimed)
        for entry in exchange.claimed:
            self._start(entry, started)
        outcomes = [entry for entry, change in settlements if not isinstance(change, HandBack)]
        return sum(entry.id in exchange.settled for entry in outcomes), exchange.claimed

    async def _exchange_patiently(self, stopping: asyncio.Event) -> list[Claimed]:
        first, most = STORE_RETRY_SECONDS
        for tries in range(1_000_000):
            try:
                if self._clock() - self._swept_at >= SWEEP_SECONDS:
                    await self._sweep()
                _, claimed = await self._exchange(self._wants(), NEVER)
                return claimed
            except SQLAlchemyError as error:
                log.warning("the database is away; %d outcomes are kept: %s", len(self._settlements), error)
                delay = min(first * 2 ** min(tries, 10), most) * (0.5 + self._chance.random() / 2)
                if await _set_within(stopping, delay):
                    break
        return []

    def _wants(self) -> Sequence[Want]:
        """The destinations with free slots, unless all slots together are taken."""
        if len(self._tasks) >= self._in_flight_max:
            return []
        free = ((name, self._concurrency - self._in_flight[name]) for name in self._destinations)
        wants = (Want(name, slots, self._hints.get(name, EPOCH)) for name, slots in free if slots > 0)
        return list(islice(wants, DESTINATIONS_MAX))

    async def _sweep(self) -> None:
        """Look for new destinations, and for what became due behind the hints."""
        found = await self.store.destinations()
        self._hints.clear()
        names = sorted({*self._routes.destinations, *found})
        turn = self._chance.randrange(len(names))  # with many destinations, another one comes first each time
        self._destinations = names[turn:] + names[:turn]
        self._swept_at = self._clock()

    def _remember_hints(self, claimed: Sequence[Claimed]) -> None:
        for entry in claimed:
            hint = entry.queued_at - HINT_SLACK
            if hint > self._hints.get(entry.destination, EPOCH):
                self._hints[entry.destination] = hint

    def _report_lost(self, settlements: Sequence[Settlement], settled: set[UUID]) -> None:
        for entry, change in settlements:
            if entry.id not in settled:
                log.warning("entry %s: its lease was lost before it settled (%s)", entry.id, type(change).__name__)

    # --- sending

    def _start(self, entry: Claimed, started: float) -> None:
        route = self._routes.find(entry.operation)
        if route is None or entry.schema_version > SCHEMA_VERSION:
            self._leave(entry, "no adapter here serves it" if route is None else "a newer release wrote it")
            return
        if entry.maybe_sent and entry.sent_as not in (None, route.form):
            self._leave(entry, f"it was sent as {entry.sent_as!r}, and the adapter would now send it as {route.form!r}")
            return
        self._in_flight[entry.destination] += 1
        task = asyncio.get_running_loop().create_task(self._attempt(entry, route, started))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _leave(self, entry: Claimed, reason: str) -> None:
        """Hand back what this process must not send; another may."""
        log.warning("entry %s (%s) waits: %s", entry.id, entry.operation, reason)
        self._settle_later(entry, HandBack(reason, UNSERVED_DELAY))

    async def _attempt(self, entry: Claimed, route: Route, started: float) -> None:
        try:
            change = admit(entry, route.memory, self._database_now(entry, started))
            if change is None:
                change = await self._send_in_time(entry, route, started)
            self._settle_later(entry, change)
        finally:
            self._in_flight[entry.destination] -= 1

    async def _send_in_time(self, entry: Claimed, route: Route, started: float) -> Transition:
        """Send, unless the lease could end before the answer: then another process may hold the entry already."""
        latest = started + self._lease.total_seconds() - self._margin - route.timeout_seconds
        if self._clock() > latest:
            return HandBack("its lease was too short when its turn came")
        outcome = await self._send(entry, route)
        now = self._database_now(entry, started)
        return decide(entry, outcome, route.memory, now, self._chance.random())

    async def _send(self, entry: Claimed, route: Route) -> Outcome:
        """One attempt. Whatever the adapter does, there is an outcome; an exception says nothing about the far side."""
        deadline = asyncio.get_running_loop().time() + route.timeout_seconds
        try:
            delivery = self._delivery(entry, route, deadline)
        except Exception as error:
            log.exception("entry %s (%s) cannot be made into a delivery", entry.id, entry.operation)
            return Deferred(f"not sent: {type(error).__name__}")
        try:
            async with asyncio.timeout_at(deadline):
                outcome = await route.send(delivery)
        except TimeoutError:
            return Unknown(f"no answer within {route.timeout_seconds:g} s")
        except (Exception, BaseExceptionGroup) as error:
            log.exception("the adapter of %r raised for entry %s", route.name, entry.id)
            return Unknown(f"the adapter raised {type(error).__name__}")
        if not isinstance(outcome, OUTCOMES):
            log.error("the adapter of %r answered with a %s for entry %s", route.name, type(outcome).__name__, entry.id)
            return Unknown(f"the adapter answered with a {type(outcome).__name__}")
        return outcome

    def _delivery(self, entry: Claimed, route: Route, deadline: float) -> Delivery:
        return Delivery(
            id=entry.id,
            operation=entry.operation,
            body=entry.payload,
            key=route.adapter.key_format.encode(self._tag(entry)),
            attempt=entry.attempts + 1,
            options=json.loads(entry.options),
            headers=json.loads(entry.headers),
            deadline=deadline,
        )

    def _tag(self, entry: Claimed) -> Tag:
        """The stored tag; derived anew only for a later key epoch, after a "send again"."""
        if entry.key_epoch == 0:
            return Tag(bytes(entry.tag))
        parent = ParentKey(entry.parent, scope=entry.scope, source=entry.source)
        fields = key_fields(entry.env, parent, entry.operation, entry.discriminator)
        return derive_tag(self.keyring, entry.kid, fields, entry.key_epoch)

    def _database_now(self, entry: Claimed, started: float) -> datetime:
        """The database's time, by its clock at the claim and our own since before it: never too early."""
        return entry.now + timedelta(seconds=self._clock() - started)

    def _settle_later(self, entry: Claimed, change: Transition) -> None:
        self._settlements.append((entry, change))
        self._settled_some.set()

    async def close(self) -> None:
        """Close the adapters' and the store's connections."""
        for closing in (*self._routes.closing(), self.store.close):
            await closing()

    # --- waiting

    async def _rest(self, stopping: asyncio.Event) -> None:
        """Wait until there is something to settle, or it is time to poll; then a moment longer, for company."""
        waiting = self._poll * (0.5 + self._chance.random() / 2)
        if self._tasks:
            waiting = min(waiting, SWEEP_SECONDS)
        if not self._settlements:
            await _first_set(self._settled_some, stopping, seconds=waiting)
        if self._settlements and self._tasks and len(self._settlements) < BATCH_ENTRIES_MAX:
            await _set_within(stopping, LINGER_SECONDS)

    async def _finish(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _drain(self) -> None:
        """Finish what is in flight within the grace, settle it, and leave the rest to their leases' end."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.grace.total_seconds())
        await self.abandon()
        while self._settlements:
            await self._exchange([], NEVER)

    async def abandon(self) -> None:
        """Stop sending at once. What was in flight is in doubt, and found so when its lease ends."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


async def _first_set(*events: asyncio.Event, seconds: float) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
