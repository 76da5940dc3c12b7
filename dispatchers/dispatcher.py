"""The heart of the sending side: claim, send, settle.

A claim is committed before anything is sent, and no transaction is open during a send. What an attempt means is decided in
`decide`; what the database is told stands in `claims`. Time, chance and the store are handed in.
"""

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from dispatchers.callbacks import Callbacks
from dispatchers.decide import hand_over, without_block
from dispatchers.delivery import Adapter
from dispatchers.flow_control.quota import Quota
from dispatchers.flow_control.state import Limits
from dispatchers.maintenance.retention import KEEP, Retention
from dispatchers.operations import Operations
from dispatchers.pipeline.callback_pace import CallbackPace
from dispatchers.pipeline.completion import CompletionWorker
from dispatchers.pipeline.failover_guard import FailoverGuard, IdentityFile
from dispatchers.pipeline.flow_monitor import BUSY_SECONDS, FlowMonitor
from dispatchers.pipeline.outage_log import OutageLog
from dispatchers.pipeline.outcome_buffer import OutcomeBuffer
from dispatchers.pipeline.routing import Routes, merge
from dispatchers.pipeline.scheduler import BATCH_ENTRIES_MAX, Scheduler
from dispatchers.pipeline.sender import Sender
from dispatchers.pipeline.settlement import STORE_RETRY_SECONDS, SettlementWorker
from dispatchers.pipeline.triage import Triage
from dispatchers.pipeline.unmatched_names import unmatched
from dispatchers.pipeline.unserved_log import UnservedLog
from dispatchers.settings import Settings
from dispatchers.store.claim_request import ClaimRequest
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import CallbacksChanged, Exchange, Store
from dispatchers.transitions import ClaimedEntry, Ending, MarkUncertain, Release, RetryCallback, Settle, Transition
from outbox.default_outbox import default
from outbox.errors import ConfigurationError
from outbox.extras import missing
from outbox.instance import Outbox
from outbox.keys import Keyring
from outbox.times import NEVER

log = logging.getLogger("outbox.dispatcher")

CLAIM_LOOPS = 2  # exchanges with the database at once
SWEEP_SECONDS = 1.0  # what became due behind the hints is found by then
LINGER_SECONDS = 0.01  # settling waits so long for company
MISSING = (
    "its outcome is stored, and its callback `{name}`, which is on record, is not registered here: a process that has it settles"
    " the entry; if the callback was removed for good, run `outbox callbacks forget '{name}'`"
)
TELLS_MAX = 20  # tries to tell the others of free slots, `BUSY_SECONDS` apart; then these are left to their lease's end


class Progress(NamedTuple):
    """What an exchange brought. asked: whether it asked for anything. claimed: with what was passed over."""

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
    limits: by destination, where they are others: concurrency, rate, circuit breaker.
    callbacks_at_once: how many callbacks run at the same time; each uses a connection of the engine's pool.
    callback_timeout: after that a callback is given up and its transaction is rolled back; by default half of what the lease is
        longer than the margin.
    poll: how long an idle dispatcher waits. grace: how long a drain waits for what is in flight.
    mark: a file, outside the database, in which the last known state of its history is remembered: see docs/restore.md.
    promotions_lose_nothing: that this fleet's replication is synchronous. After the promotion of a standby, which would
        otherwise stop every dispatcher until an operator resumes, it continues by itself, on record: see docs/restore.md.
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
        limits: Mapping[str, Limits] | None = None,
        callbacks_at_once: int = 4,
        callback_timeout: timedelta | None = None,
        poll: timedelta = timedelta(seconds=1),
        grace: timedelta = timedelta(seconds=30),
        keep: timedelta = KEEP,
        mark: str | os.PathLike[str] | None = None,
        promotions_lose_nothing: bool = False,
        store: Store | None = None,
        clock: Callable[[], float] = steady_clock,
        rng: random.Random | None = None,
    ) -> None:
        settings = Settings(
            lease=lease,
            margin=margin,
            concurrency=concurrency,
            in_flight_max=in_flight_max,
            limits=limits or {},
            callbacks_at_once=callbacks_at_once,
            callback_timeout=callback_timeout,
            poll=poll,
            grace=grace,
            keep=keep,
            mark=mark,
            promotions_lose_nothing=promotions_lose_nothing,
        )
        rng = rng or random.SystemRandom()
        self._set_up(settings, target, adapters or {}, include, keyring, outbox or default, store, clock, rng)

    def _set_up(
        self,
        settings: Settings,
        target: Any,
        adapters: Mapping[str, Adapter],
        include: Sequence[Operations],
        keyring: Keyring | None,
        outbox: Outbox,
        store: Store | None,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        if not isinstance(include, Sequence) or not all(isinstance(each, Operations) for each in include):
            raise ConfigurationError(
                f"include must be a list of dispatchers.Operations, such as [effects], not {include!r}"
            )
        self._settings = settings
        self._outbox = outbox
        self._keyring = keyring
        self._callbacks = Callbacks(operations.callbacks for operations in include)
        self._routes = Routes(
            merge(adapters, *(o.adapters for o in include)), lease=settings.lease, margin=settings.margin
        )
        for warning in unmatched(self._routes, self._callbacks.names, settings.limits):
            log.warning("%s", warning)
        self._flow = FlowMonitor(settings.limits, clock=clock, rng=rng)
        self._pace = CallbackPace(settings.callbacks_at_once, settings.usable, self._callbacks.destinations)
        self._scheduler = Scheduler(
            self._routes.destinations,
            slots=settings.concurrency,
            slots_in_all=settings.in_flight_max,
            slots_of=settings.concurrency_of,
            shut_until=self._flow.shut_until,
            pace=self._pace,
        )
        self.grace = settings.grace
        self.retention = Retention.of(settings.keep, self._routes.windows)
        self.store: Store = store or DatabaseStore(
            target,
            self._outbox.configuration,
            lease=settings.lease,
            callback_timeout=settings.callback_deadline,
            promotions_lose_nothing=settings.promotions_lose_nothing,
        )
        self._require_async_for(self._callbacks.first_async())
        self._clock = clock
        self._rng = rng
        self.outages = OutageLog(clock)
        self._watch = FailoverGuard(
            self.store,
            env=lambda: self._outbox.configuration.env,
            clock=clock,
            file=None if settings.mark is None else IdentityFile(Path(settings.mark)),
        )
        self._triage = Triage(
            self._routes,
            self._scheduler,
            env=lambda: self._outbox.configuration.env,
            fencing_delay=settings.fencing_delay,
            clock=clock,
            memory=self._flow.memory,
            settle=self._settle_later,
            back=self._slot_is_free,
        )
        self._sender = Sender(
            store=self.store,
            keyring=lambda: self.keyring,
            lease=settings.lease,
            margin=settings.margin,
            clock=clock,
            rng=self._rng,
            settle=self._settle_later,
            back=self._slot_is_free,
            hear=self._flow.hear,
            memory=self._flow.memory,
        )
        self._settlement = SettlementWorker(
            self.store,
            self._pace,
            at_once=settings.callbacks_at_once,
            usable=settings.usable,
            clock=clock,
            rng=self._rng,
            settle=self._settle_in_batch,
            callbacks=self._callbacks,
            learn=self._learn_callbacks,
            ended=self._has_settled_alone,
            away=self.outages.failed,
        )
        self._completion = CompletionWorker(
            self.store, self._callbacks, clock=clock, rng=self._rng, away=self.outages.failed
        )
        self._missing = UnservedLog(clock)
        self._sought: UUID | None = None
        self._settled_alone = 0
        self._refusal: ConfigurationError | None = None
        self._outcomes = OutcomeBuffer(clock=clock, patience=settings.lease / 4)
        self._news = asyncio.Event()  # something to settle, a claim, a free slot, or a lane's end
        self._exchanging = 0
        self._swept_at = -SWEEP_SECONDS
        self._has_looked = False  # before it has, it does not know whose age a pause has stopped
        self._cutoff = NEVER

    @property
    def keyring(self) -> Keyring:
        return self._keyring or self._outbox.configuration.keyring

    @property
    def callbacks(self) -> frozenset[str]:
        """The names of its callbacks, as they are put on record when it starts: `on_settled bank.charge`."""
        return self._callbacks.to_record

    @property
    def told(self) -> str:
        """For which env it sends, from which database, and how much of it: for the log at its start."""
        prefixes, callbacks = len(self._routes.forms), len(self._callbacks.names)
        env, place = self._outbox.configuration.env, self.store.place
        return f"env {env}, database {place}; operations or prefixes: {prefixes}, callbacks: {callbacks}"

    async def run_once(self) -> int:
        """Claim, send and settle whatever is due now; returns how many entries it settled, whatever their outcome.

        What comes due again meanwhile is left for the next call. Raises `Suspended` after a failover or a restore of the
        database, until a person resumes, and what the database raises.
        """
        self._news = asyncio.Event()  # of this event loop: each `asyncio.run` brings another
        self._cutoff = NEVER
        self._settled_alone = 0
        self._settlement.begin()
        await self._sweep()
        self._watch.require_trust()
        await self.reconcile()
        await self._completion.run_once()
        settled = await self._claim_first()
        settled += await self._drain_in_loops()
        for _ in range(TELLS_MAX):
            if not self._flow.keeps_free_slots:
                break
            await asyncio.sleep(BUSY_SECONDS)
            settled += await self._drain_in_loops()
        await self._sender.abandon()  # nothing is under way: this only sends the workers home
        return settled + self._settled_alone

    async def pump(self, stopping: asyncio.Event) -> None:
        """Claim, send and settle until `stopping` is set; then finish what is in flight and settle it.

        A database that is away is waited for; outcomes are kept meanwhile. Raises `ConfigurationError`, after the same end, if
        the database is another env's, or becomes that.
        """
        self._news = asyncio.Event()
        self._settlement.begin()
        await asyncio.gather(*(self._claim_loop(stopping) for _ in range(CLAIM_LOOPS)), self._completion.pump(stopping))
        await self._drain()
        if self._refusal is not None:
            raise self._refusal

    async def reconcile(self) -> None:
        """Have some of the entries looked for that became uncertain when nobody could look; the timetable asks for more."""
        if self._routes.can_look_up:
            self._sought = await self.store.seek(self._routes.may_look, self._settings.fencing_delay, self._sought)

    def _require_async_for(self, callback: str | None) -> None:
        if callback is not None and not self.store.takes_async_callbacks:
            raise ConfigurationError(
                f"the callback {callback} is async: hand the dispatcher an AsyncEngine (create_async_engine), or make it sync"
            )

    async def check(self) -> None:
        """Raise what keeps this dispatcher from working: missing or outdated tables, a database or entries of another env,
        another secret under a key id, entries of an unknown one. Nothing is written.
        """
        await self.store.check()
        await self.store.require_environment(self._outbox.configuration.env)
        await self.store.require_secrets(self.keyring, recording=False)
        kid = await self.store.unknown_kid(self.keyring.kids)
        if kid is not None:
            raise ConfigurationError(
                f"unsettled entries were enqueued under kid {kid!r}, which is not in the key ring {self.keyring.kids}:"
                " keep an old secret until its last entry has settled"
            )

    def run(self) -> None:
        """Work until SIGTERM or Ctrl-C, then drain. Needs the extra `dispatcher`."""
        try:
            from dispatchers import daemon  # loads apscheduler, which a single `run_once()` can do without
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "apscheduler":
                raise
            raise missing("Dispatcher.run()", "dispatcher", error) from error

        daemon.run(self)

    # --- the lanes: while one waits for the database, what the other has claimed is sent

    async def _claim_first(self) -> int:
        """One lane alone, until the first claim says what "now" is: the other's claim could otherwise come so late that it
        finds what has come due again meanwhile.
        """
        settled, asked = 0, True
        while self._cutoff == NEVER and asked and not self._scheduler.all_asked:
            progress = await self._exchange(self._scheduler.take(self._clock()), NEVER)
            settled, asked = settled + progress.settled, progress.asked
        return settled

    async def _drain_in_loops(self) -> int:
        counts = await asyncio.gather(*(self._drain_what_is_due() for _ in range(CLAIM_LOOPS)), return_exceptions=True)
        for count in counts:
            if isinstance(count, BaseException):
                raise count
        await self._exchange([], self._cutoff)  # what of the last ones is still to be told
        return sum(count for count in counts if isinstance(count, int))

    async def _drain_what_is_due(self) -> int:
        settled = 0
        while True:
            settled += await self._settle_postponed()
            progress = await self._exchange(self._scheduler.take(self._clock()), self._cutoff)
            settled += progress.settled
            if progress.claimed or self._outcomes or (progress.asked and not self._scheduler.all_asked):
                continue
            if self._sender or self._settlement or self._exchanging or self._outcomes.has_postponed:
                self._news.clear()
                await _first_set(self._news, seconds=self._outcomes.again_in)
            elif self._scheduler.all_asked:
                self._news.set()  # the other lane may wait for the end of this one's exchange
                return settled

    async def _claim_loop(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            progress = await self._exchange_patiently(stopping)
            if not (progress.claimed or (progress.asked and not self._scheduler.all_asked)):
                await self._rest(stopping)

    # --- claiming and settling

    async def _exchange(self, quotas: Sequence[Quota], cutoff: datetime) -> Progress:
        """Settle what has come back, claim what is wanted, start the sending of what was claimed."""
        settlements = [self._hand_over(ending) for ending in self._outcomes.take()]
        if not (quotas or settlements or self._flow.has_news):
            return Progress()
        started = self._clock()
        self._exchanging += 1
        exchange, request = Exchange(), self._request(quotas, cutoff)
        try:
            exchange = await self.store.exchange(settlements, request)
        except BaseException as error:
            self._scheduler.give_all_back(quotas)
            self._outcomes.put_back(settlements)  # kept until the database is back
            self._news.set()
            if not isinstance(error, CallbacksChanged):
                raise
            await self._learn_callbacks()
            return Progress(asked=bool(quotas))
        finally:
            self._exchanging -= 1
            pressing = request.pressing
            if pressing is not None and self._flow.learn(pressing, exchange.pressures, request.token):
                self._scheduler.begin_round()
        self._scheduler.found(quotas, exchange.claimed)
        self.outages.answered()
        if exchange.claimed:
            self._news.set()  # not for nothing: two idle lanes would wake each other without end
            self._cutoff = min(self._cutoff, exchange.claimed[0].leased_at)
            self._note_callbacks(exchange.claimed, request.token, started)
        self._sender.start(self._triage.sort(exchange.claimed, started))
        settled = self._take_note(settlements, exchange)
        claimed = len(exchange.claimed) + exchange.passed_over  # of which others may be due behind
        return Progress(asked=bool(quotas), claimed=claimed, settled=settled)

    def _note_callbacks(self, claimed: Sequence[ClaimedEntry], token: UUID, started: float) -> None:
        if self._callbacks:
            self._settlement.note_claim(token, started)
            for entry in claimed:
                if self._callbacks.may_call(entry):
                    self._pace.hold(entry.destination)

    async def _settle_postponed(self, *, is_last_chance: bool = False) -> int:
        """Apart from what others wait for: somebody else may still have a row locked. Returns how many were settled."""
        postponed = [self._hand_over(ending) for ending in self._outcomes.take_postponed(is_last_chance=is_last_chance)]
        if not postponed:
            return 0
        try:
            exchange = await self.store.exchange(postponed, None)
        except BaseException as error:
            self._outcomes.postpone(postponed, {entry.id for entry, _ in postponed})
            if not isinstance(error, CallbacksChanged):
                raise
            await self._learn_callbacks()
            return 0
        return self._take_note(postponed, exchange)

    def _take_note(self, settlements: Sequence[Ending], exchange: Exchange) -> int:
        """What became of these settlements; returns how many took effect."""
        self._outcomes.postpone(settlements, exchange.postponed)
        told = _without_lost(settlements, exchange)
        return sum(not isinstance(change, Release) for _, change in told)

    def _request(self, quotas: Sequence[Quota], cutoff: datetime) -> ClaimRequest:
        return ClaimRequest(
            quotas=quotas,
            entries_max=BATCH_ENTRIES_MAX,
            token=UUID(int=self._rng.getrandbits(128)),
            lease=self._settings.lease,
            forms=self._routes.forms,
            cutoff=cutoff,
            completions=self._callbacks.complete_requests,
            callbacks=self._callbacks.to_record,
            seen=self._watch.seen,
            pressing=self._flow.take(quotas),
            unserved=self._scheduler.unserved,
        )

    async def _exchange_patiently(self, stopping: asyncio.Event) -> Progress:
        first, most = STORE_RETRY_SECONDS
        tries = 0
        while not stopping.is_set():
            try:
                if self._clock() - self._swept_at >= SWEEP_SECONDS:
                    await self._sweep()
                    self._watch.tell()
                    if stopping.is_set():  # meanwhile: what is claimed now would never be sent
                        break
                await self._settle_postponed()
                return await self._exchange(self._scheduler.take(self._clock()) if self._has_looked else [], NEVER)
            except ConfigurationError as refusal:  # no waiting mends it: this process ends, the others go on
                self._refusal = refusal
                stopping.set()
            except Exception as error:
                self.outages.failed(error)
                delay = min(first * 2 ** min(tries, 10), most) * (0.5 + self._rng.random() / 2)
                tries += 1
                await _first_set(stopping, seconds=delay)
        return Progress()

    async def _sweep(self) -> None:
        """Look whether the database is what it was, for new destinations, for what is due behind the hints, and for pressure."""
        self._swept_at = self._clock()
        await self._watch.look()
        if not self._has_looked:
            await self.store.require_secrets(self.keyring, recording=True)
        await self._look_at_callbacks()
        self._scheduler.learn(await self.store.destinations())
        self._flow.look(await self.store.pressures())
        self._has_looked = True

    async def _look_at_callbacks(self) -> None:
        """Put ours on record at the start; then take over the entries that wait for them."""
        if not self._has_looked:
            self._callbacks.learn(await self.store.callbacks(self._callbacks.to_record))
        if self._callbacks.to_record and (taken := await self.store.take_over(self._callbacks.to_record)):
            log.info("took over %d entries whose callbacks other processes do not have", taken)

    async def _learn_callbacks(self) -> None:
        """The record of callbacks has changed: what is to be settled may have a callback that only another process has."""
        self._callbacks.learn(await self.store.callbacks())

    def _hand_over(self, ending: Ending) -> Ending:
        """The same, or the outcome stored for another process. Decided just before the store is asked, by the same record."""
        entry, change = ending
        end = change.end if isinstance(change, RetryCallback) and change.callback is not None else change
        if not isinstance(end, Settle | MarkUncertain):
            return ending
        missing = self._callbacks.missing(entry, end)
        if missing is None:
            return entry, end
        self._missing.leave(entry, MISSING.format(name=missing))
        return entry, hand_over(end, missing)

    def _settle_later(self, entry: ClaimedEntry, change: Transition) -> None:
        """With the next batch, or alone if a callback or its request's completion commits with it."""
        self._flow.end(entry)
        if entry.position is not None:
            change = self._halting(entry, change)
        if self._callbacks and isinstance(change, Settle | MarkUncertain):
            calls = self._callbacks.calls(entry, change)
            if any(calls):
                # Its slot stays taken, or slow callbacks would let outcomes pile up until their leases end.
                self._scheduler.hold(entry.destination)
                self._pace.hold(entry.destination)
                self._settlement.start(entry, change, calls)
                return
            if self._callbacks.may_call(entry):
                self._pace.measure(0.0)
        self._settle_in_batch(entry, change)

    def _halting(self, entry: ClaimedEntry, change: Transition) -> Transition:
        """The same, without a halt where the adapter lets lanes go on."""
        route = self._routes.find(entry.operation)
        return change if route is None or route.memory.failure_blocks_group else without_block(change)

    def _settle_in_batch(self, entry: ClaimedEntry, change: Transition) -> None:
        self._outcomes.add(entry, change)
        self._news.set()

    def _has_settled_alone(self, entry: ClaimedEntry, settled: bool) -> None:
        self._settled_alone += settled
        self._slot_is_free(entry)
        self._scheduler.begin_round()  # its callback may have enqueued something, and others of its kind may be claimed

    def _slot_is_free(self, entry: ClaimedEntry) -> None:
        self._scheduler.give_back(entry.destination)
        if self._callbacks and self._callbacks.may_call(entry):
            self._pace.give_back(entry.destination)
        self._news.set()

    # --- waiting

    async def close(self) -> None:
        """Close the adapters' and the store's connections."""
        for closing in (*self._routes.closing(), self.store.close):
            await closing()

    async def _rest(self, stopping: asyncio.Event) -> None:
        """Wait until there is something to settle, or it is time to poll; then a moment longer, for company."""
        waiting = self._settings.poll.total_seconds() * (0.5 + self._rng.random() / 2)
        waiting = min(waiting, self._flow.opens_in(self._clock()), self._outcomes.again_in)
        if not self._outcomes:
            self._news.clear()
            await _first_set(self._news, stopping, seconds=waiting)
            self._scheduler.begin_round()
        if self._outcomes and self._sender and len(self._outcomes) < BATCH_ENTRIES_MAX:
            await _first_set(stopping, seconds=LINGER_SECONDS)

    async def _drain(self) -> None:
        """Finish what is in flight within the grace, settle it, and leave the rest to their leases' end."""
        until = self._clock() + self.grace.total_seconds()
        await self._sender.finish(self.grace)
        await self._settlement.finish(timedelta(seconds=until - self._clock()))
        tells = 0
        while (
            len(self._outcomes) or self._outcomes.has_postponed or (self._flow.keeps_free_slots and tells < TELLS_MAX)
        ):
            tells += 1
            try:
                await self._exchange([], NEVER)
                await self._settle_postponed(is_last_chance=True)
            except Exception as error:
                self.outages.failed(error)
                if (len(self._outcomes) or self._outcomes.has_postponed) and self._clock() > until:
                    raise
                await asyncio.sleep(STORE_RETRY_SECONDS[0])
            else:
                if self._flow.keeps_free_slots:
                    await asyncio.sleep(BUSY_SECONDS)

    async def abandon(self) -> None:
        """Stop sending at once. What was in flight is in doubt, and found so when its lease ends."""
        await self._sender.abandon()
        await self._settlement.abandon()


def _without_lost(settlements: Sequence[Ending], exchange: Exchange) -> Sequence[Ending]:
    """What the database took; what it will never take is reported."""
    if len(exchange.settled) == len(settlements):
        return settlements
    for entry, change in settlements:
        if entry.id not in exchange.settled and entry.id not in exchange.postponed:
            log.warning("entry %s: its lease was lost before it settled (%s)", entry.id, type(change).__name__)
    return [(entry, change) for entry, change in settlements if entry.id in exchange.settled]


async def _first_set(*events: asyncio.Event, seconds: float) -> None:
    """Wait for one of them, but so long at most; infinity for as long as it takes."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=None if seconds == math.inf else seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
