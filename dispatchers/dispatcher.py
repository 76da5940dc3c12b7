"""The heart of the sending side: claim, send, settle.

A claim is committed before anything is sent, and no transaction is open during a send. What an attempt means is decided in
`decide`; what the database is told stands in `claims`. Time, chance and the store are handed in.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from dispatchers.claims import Claims, Exchange, Store
from dispatchers.decide import admit
from dispatchers.delivery import Adapter
from dispatchers.lifecycle import Claimed, ClaimRequest, HandBack, Park, Settlement, Transition, Want
from dispatchers.operations import Operations
from dispatchers.routes import Route, Routes, merge
from dispatchers.sending import Sends
from dispatchers.turns import BATCH_ENTRIES_MAX, Turns
from outbox.errors import ConfigurationError
from outbox.instance import Outbox, default
from outbox.keys import Keyring
from outbox.schema import NEVER, SCHEMA_VERSION

log = logging.getLogger("outbox.dispatcher")

LANES = 2  # exchanges with the database at once
SWEEP_SECONDS = 1.0  # what became due behind the hints is found by then
LINGER_SECONDS = 0.01  # settling waits so long for company
UNSERVED_DELAY = timedelta(seconds=2)  # until what this process does not serve is looked at again
UNSERVED_SECONDS = 5.0  # how long it leaves a destination alone of which it serves nothing
STORE_RETRY_SECONDS = (0.1, 5.0)


class Progress(NamedTuple):
    """What an exchange brought. asked: whether it asked for anything."""

    asked: bool = False
    claimed: int = 0
    settled: int = 0


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
        self._turns = Turns(self._routes.destinations, slots=concurrency, slots_in_all=in_flight_max)
        self._poll_seconds = poll.total_seconds()
        self.grace = grace
        self.store: Store = store or Claims(target, self._outbox.configuration)
        self._clock = clock
        self._chance = chance or random.SystemRandom()
        self._sends = Sends(
            store=self.store,
            keyring=lambda: self.keyring,
            lease=lease,
            margin=margin,
            clock=clock,
            chance=self._chance,
            settle=self._settle_later,
            back=self._slot_is_free,
        )
        self._settlements: list[Settlement] = []
        self._news = asyncio.Event()  # something to settle, a free slot, or the end of an exchange
        self._exchanging = 0
        self._swept_at = -SWEEP_SECONDS
        self._cutoff = NEVER

    @property
    def keyring(self) -> Keyring:
        return self._keyring or self._outbox.configuration.keyring

    async def run_once(self) -> int:
        """Claim, send and settle whatever is due now; returns how many entries it settled, whatever their outcome.

        What comes due again meanwhile is left for the next call. Raises what the database raises.
        """
        self._news = asyncio.Event()  # of this event loop: each `asyncio.run` brings another
        self._cutoff = NEVER
        await self._sweep()
        settled = await self._claim_first()
        counts = await asyncio.gather(*(self._drain_what_is_due() for _ in range(LANES)), return_exceptions=True)
        for count in counts:
            if isinstance(count, BaseException):
                raise count
        await self._sends.abandon()  # nothing is under way: this only sends the workers home
        return settled + sum(count for count in counts if isinstance(count, int))

    async def pump(self, stopping: asyncio.Event) -> None:
        """Claim, send and settle until `stopping` is set; then finish what is in flight and settle it.

        A database that is away is waited for; outcomes are kept meanwhile.
        """
        self._news = asyncio.Event()
        await asyncio.gather(*(self._pump_lane(stopping) for _ in range(LANES)))
        await self._drain()

    async def check(self) -> None:
        """Raise what would keep this dispatcher from working: missing tables, entries of an unknown key id or env."""
        await self.store.check()
        kid = await self.store.unknown_kid(self.keyring.kids)
        if kid is not None:
            raise ConfigurationError(
                f"unsettled entries were enqueued under kid {kid!r}, which is not in the key ring {self.keyring.kids}:"
                " keep an old secret until its last entry has settled"
            )
        env = self._outbox.configuration.env
        foreign = await self.store.foreign_env(env)
        if foreign is not None:
            raise ConfigurationError(
                f"unsettled entries belong to env {foreign!r}, this dispatcher is of {env!r}: it would send them under keys"
                " of the other deployment; is this a copy of its database?"
            )

    def run(self) -> None:
        """Work until SIGTERM or Ctrl-C, then drain. Needs the extra `dispatcher`."""
        from dispatchers import daemon  # loads apscheduler, which a single `run_once()` can do without

        daemon.run(self)

    # --- the lanes: while one waits for the database, what the other has claimed is sent

    async def _claim_first(self) -> int:
        """One lane alone, until the first claim says what "now" is: the other's claim could otherwise come so late that it
        finds what has come due again meanwhile.
        """
        settled, asked = 0, True
        while self._cutoff == NEVER and asked and not self._turns.all_asked:
            progress = await self._exchange(self._turns.take(self._clock()), NEVER)
            settled, asked = settled + progress.settled, progress.asked
        return settled

    async def _drain_what_is_due(self) -> int:
        settled = 0
        while True:
            progress = await self._exchange(self._turns.take(self._clock()), self._cutoff)
            settled += progress.settled
            if progress.claimed or self._settlements or (progress.asked and not self._turns.all_asked):
                continue
            if self._sends or self._exchanging:
                self._news.clear()
                await self._news.wait()
            elif self._turns.all_asked:
                return settled

    async def _pump_lane(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            progress = await self._exchange_patiently(stopping)
            if not (progress.claimed or (progress.asked and not self._turns.all_asked)):
                await self._rest(stopping)

    # --- claiming and settling

    async def _exchange(self, wants: Sequence[Want], cutoff: datetime) -> Progress:
        """Settle what has come back, claim what is wanted, start the sending of what was claimed."""
        settlements, self._settlements = self._settlements, []
        if not (wants or settlements):
            return Progress()
        started = self._clock()
        self._exchanging += 1
        exchange = Exchange()
        try:
            exchange = await self.store.exchange(settlements, self._request(wants, cutoff))
        except BaseException:
            self._settlements[:0] = settlements  # kept until the database is back
            raise
        finally:
            self._exchanging -= 1
            self._turns.found(wants, exchange.claimed)
            self._news.set()
        if exchange.claimed:
            self._cutoff = min(self._cutoff, exchange.claimed[0].leased_at)
        self._report_lost(settlements, exchange.settled)
        self._sends.start(self._routed(exchange.claimed, started))
        outcomes = [entry for entry, change in settlements if not isinstance(change, HandBack)]
        settled = sum(entry.id in exchange.settled for entry in outcomes)
        return Progress(asked=bool(wants), claimed=len(exchange.claimed), settled=settled)

    def _request(self, wants: Sequence[Want], cutoff: datetime) -> ClaimRequest:
        return ClaimRequest(
            wants=wants,
            entries_max=BATCH_ENTRIES_MAX,
            token=UUID(int=self._chance.getrandbits(128)),
            lease=self._lease,
            forms=self._routes.forms,
            cutoff=cutoff,
        )

    async def _exchange_patiently(self, stopping: asyncio.Event) -> Progress:
        first, most = STORE_RETRY_SECONDS
        tries = 0
        while not stopping.is_set():
            try:
                if self._clock() - self._swept_at >= SWEEP_SECONDS:
                    await self._sweep()
                return await self._exchange(self._turns.take(self._clock()), NEVER)
            except Exception as error:
                self._report_away(error)
                delay = min(first * 2 ** min(tries, 10), most) * (0.5 + self._chance.random() / 2)
                tries += 1
                await _first_set(stopping, seconds=delay)
        return Progress()

    async def _sweep(self) -> None:
        """Look for new destinations, and for what became due behind the hints."""
        self._swept_at = self._clock()
        self._turns.learn(await self.store.destinations())

    def _report_away(self, error: Exception) -> None:
        # Not the error's text: it shows the statement's parameters, what services answered among them.
        log.warning("the database is away; %d outcomes are kept: %s", len(self._settlements), type(error).__name__)

    def _report_lost(self, settlements: Sequence[Settlement], settled: set[UUID]) -> None:
        for entry, change in settlements:
            if entry.id not in settled:
                log.warning("entry %s: its lease was lost before it settled (%s)", entry.id, type(change).__name__)

    def _routed(self, claimed: Sequence[Claimed], started: float) -> Iterator[tuple[Claimed, Route, float]]:
        """The claims that this process may send, each with its route; the others are handed back."""
        for entry in claimed:
            route = self._routes.find(entry.operation)
            if route is None:
                self._leave_unserved(entry)
            elif entry.schema_version > SCHEMA_VERSION:
                self._leave(entry, "a newer release wrote it")
            elif entry.maybe_sent and entry.sent_as not in (None, route.form):
                self._leave_pinned(entry, route)
            else:
                yield entry, route, started

    def _leave_unserved(self, entry: Claimed) -> None:
        """Another process may serve it. A destination that is none of ours is left alone, for those whose it is."""
        if entry.destination not in self._turns.home:
            self._turns.leave_alone(entry.destination, self._clock() + UNSERVED_SECONDS)
            self._leave(entry, "no adapter here serves it", timedelta(0))
        else:
            self._leave(entry, "no adapter here serves it")

    def _leave_pinned(self, entry: Claimed, route: Route) -> None:
        """It may have been sent in another form. That waits for a process of that form, but not past the window."""
        past = admit(entry, route.memory, entry.leased_at)
        if isinstance(past, Park):
            self._slot_is_free(entry)
            self._settle_later(entry, past)
        else:
            self._leave(entry, f"it was sent as {entry.sent_as!r}; the adapter would now send it as {route.form!r}")

    def _leave(self, entry: Claimed, reason: str, delay: timedelta = UNSERVED_DELAY) -> None:
        log.warning("entry %s (%s) waits: %s", entry.id, entry.operation, reason)
        self._slot_is_free(entry)
        self._settle_later(entry, HandBack(reason, delay))

    def _settle_later(self, entry: Claimed, change: Transition) -> None:
        self._settlements.append((entry, change))
        self._news.set()

    def _slot_is_free(self, entry: Claimed) -> None:
        self._turns.give_back(entry.destination)
        self._news.set()

    # --- waiting

    async def close(self) -> None:
        """Close the adapters' and the store's connections."""
        for closing in (*self._routes.closing(), self.store.close):
            await closing()

    async def _rest(self, stopping: asyncio.Event) -> None:
        """Wait until there is something to settle, or it is time to poll; then a moment longer, for company."""
        waiting = self._poll_seconds * (0.5 + self._chance.random() / 2)
        if not self._settlements:
            self._news.clear()
            await _first_set(self._news, stopping, seconds=waiting)
            self._turns.begin_round()
        if self._settlements and self._sends and len(self._settlements) < BATCH_ENTRIES_MAX:
            await _first_set(stopping, seconds=LINGER_SECONDS)

    async def _drain(self) -> None:
        """Finish what is in flight within the grace, settle it, and leave the rest to their leases' end."""
        until = self._clock() + self.grace.total_seconds()
        await self._sends.finish(self.grace)
        while self._settlements:
            try:
                await self._exchange([], NEVER)
            except Exception as error:
                self._report_away(error)
                if self._clock() > until:
                    raise
                await asyncio.sleep(STORE_RETRY_SECONDS[0])

    async def abandon(self) -> None:
        """Stop sending at once. What was in flight is in doubt, and found so when its lease ends."""
        await self._sends.abandon()


async def _first_set(*events: asyncio.Event, seconds: float) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
