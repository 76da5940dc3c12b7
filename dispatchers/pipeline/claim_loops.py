"""The loops that claim entries, have them sent, and settle them.

A claim is committed before its entries are sent, and no transaction is open during a send. While one loop waits for the
database, the entries that the other loop has claimed are sent.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from dispatchers.callbacks import Callbacks
from dispatchers.flow_control.quota import Quota, max_callbacks, max_entries
from dispatchers.flow_control.surveys import Share
from dispatchers.pipeline.activity_log import ActivityLog
from dispatchers.pipeline.app_transactions import STORE_RETRY_SECONDS
from dispatchers.pipeline.attempt import AttemptContext
from dispatchers.pipeline.destinations import destinations_for
from dispatchers.pipeline.failover_guard import FailoverGuard
from dispatchers.pipeline.flow_monitor import BUSY_SECONDS, FlowMonitor
from dispatchers.pipeline.outcomes import OutcomeCollector
from dispatchers.pipeline.routing import Routes
from dispatchers.pipeline.scheduler import MAX_BATCH_ENTRIES, Scheduler
from dispatchers.pipeline.signals import Signal, first_signal
from dispatchers.pipeline.triage import Triage
from dispatchers.pipeline.unstarted import Unstarted
from dispatchers.pipeline.wakeup import Wakeup
from dispatchers.pipeline.workers import Workers
from dispatchers.settings import Settings
from dispatchers.store.connections.outage_log import OutageLog
from dispatchers.store.protocol import CallbacksChanged, Exchange, Store
from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.telemetry.events import Levels
from outbox.errors import ConfigurationError
from outbox.keys import Keyring
from outbox.times import NEVER

log = logging.getLogger("outbox.dispatcher")

CLAIM_LOOPS = 2  # exchanges with the database at the same time
SWEEP_SECONDS = 1.0  # a sweep finds entries that became due before the cursors
STALE_SECONDS = 15.0  # after so long without a sweep, what it read (such as pauses) is too old
IDLE_SWEEP_SECONDS = 5.0
"""Between two sweeps while no entry is claimed: there are no cursors then, and permits are free for operator decisions."""
HINTED_SWEEP_SECONDS = 0.25  # between two sweeps for hints that name no destination
LINGER_SECONDS = 0.01  # settling waits for more outcomes, to settle them together
AHEAD_LINGER_SECONDS = 0.03  # the same while entries claimed ahead are sent: then no permit is unused
MAX_PERMIT_REPORTS = 20  # attempts to report free permits, `BUSY_SECONDS` apart; later they expire with their lease


class Progress(NamedTuple):
    """The result of an exchange. asked: whether it had quotas. claimed: with the entries that were passed over.

    has_more: whether more entries of these destinations may be due.
    """

    asked: bool = False
    claimed: int = 0
    settled: int = 0
    has_more: bool = False


class ClaimLoops:
    """Claims entries, has them sent, and settles them with a later exchange.

    guard: stops the claims after a failover. env, keyring: functions, because the app may configure the outbox later.
    share: this database's part of limits that several databases share.
    clock: the process's clock, in seconds. refusal: the error for which this process must end.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        routes: Routes,
        callbacks: Callbacks,
        guard: FailoverGuard,
        outages: OutageLog,
        activity: ActivityLog,
        *,
        env: Callable[[], str],
        keyring: Callable[[], Keyring],
        clock: Callable[[], float],
        rng: random.Random,
        share: Share | None = None,
    ) -> None:
        self._settings, self._store, self._routes, self._callbacks = settings, store, routes, callbacks
        self._guard, self._outages, self._keyring, self._clock, self._rng = guard, outages, keyring, clock, rng
        destinations = destinations_for(settings, routes, callbacks.destinations, share)
        self._flow = FlowMonitor(settings.limits, destinations, clock=clock, rng=rng)
        self._scheduler = Scheduler(routes.destinations, destinations)
        self._collector = OutcomeCollector(
            settings,
            store,
            callbacks,
            self._scheduler,
            self._flow,
            outages,
            activity,
            clock=clock,
            rng=rng,
        )
        context = AttemptContext(
            store=store,
            keyring=keyring,
            usable=settings.usable,
            clock=clock,
            rng=rng,
            memory=self._flow.memory,
            activity=activity,
            unstarted=self.unstarted,
        )
        self._triage = Triage(routes, self._scheduler, context, env=env, unsent=self._collector.unsent)
        self._workers = Workers(context, destinations, self._flow, self._collector.done)
        activity.read_levels_from(self.levels)
        self._wakeup = Wakeup(
            store.listener,
            serves=lambda operation: routes.find(operation) is not None,
            poll=settings.poll.total_seconds(),
            clock=clock,
        )
        self._stopped = Signal()
        self._exchanging, self._cutoff, self._has_claimed = 0, NEVER, False  # `_has_claimed`: since the last sweep
        self._swept_at = self._round_at = -math.inf  # when a loop last swept, and began a round
        self._surveyed: float | None = None  # when the last sweep began; before one, pauses and ages are unknown
        self.refusal: ConfigurationError | None = None

    @property
    def unstarted(self) -> Unstarted:
        return self._collector.unstarted

    def in_flight(self) -> int:
        """How many entries are being sent, or settled with a callback."""
        return len(self._workers) + len(self._collector.with_callbacks)

    def levels(self) -> Levels:
        """The present state, for the dispatcher's observer."""
        return Levels(
            in_flight=self._workers.in_flight,
            claimed_ahead=self._workers.claimed_ahead,
            permits={name: self._scheduler.destinations.of[name].permits for name in self._scheduler.names},
            callbacks_waiting=len(self._collector.with_callbacks),
            unsettled=len(self._collector.in_batches),
            throttled=self._flow.throttled,
            suspended=self._guard.suspended is not None,
            served=self._guard.is_current,
        )

    def used_up(self) -> dict[str, list[str]]:
        return self._scheduler.used_up

    def sending(self, task: "asyncio.Task[Any]") -> tuple[str, str] | None:
        return self._workers.sending(task)

    def begin(self) -> None:
        """Prepare for this event loop."""
        self._cutoff = NEVER
        self._scheduler.destinations.claims_ahead = False
        self._collector.begin()
        self._wakeup.begin()
        self._stopped = Signal()

    async def run_once(self) -> int:
        """Claim, send and settle what is due now; returns how many entries settled."""
        settled = await self._claim_first()
        settled += await self._drain_in_loops()
        for _ in range(MAX_PERMIT_REPORTS):
            if not self._flow.has_unreported_permits:
                break
            await asyncio.sleep(BUSY_SECONDS)
            settled += await self._drain_in_loops()
        await self._workers.abandon()  # this ends idle workers only, because nothing is in flight
        return settled + self._collector.settled_with_callbacks

    def until(self, stopping: asyncio.Event) -> list[Coroutine[Any, Any, None]]:
        """The loops, to be awaited together. While the database is unavailable, they wait."""
        self._scheduler.destinations.claims_ahead = True
        loops = [self._claim_loop(stopping, is_first=number == 0) for number in range(CLAIM_LOOPS)]
        return [*loops, self._wakeup.pump(stopping), self._pass_on(stopping)]

    async def _pass_on(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._stopped.set()

    async def drain(self, grace: timedelta) -> None:
        """Finish the sends in flight within the grace, and settle them. The other leases expire."""
        until = self._clock() + grace.total_seconds()
        await self._workers.finish(grace)
        await self._collector.with_callbacks.finish(timedelta(seconds=until - self._clock()))
        outcomes, reports = self._collector.in_batches, 0
        while (
            len(outcomes)
            or outcomes.has_postponed
            or (self._flow.has_unreported_permits and reports < MAX_PERMIT_REPORTS)
        ):
            reports += 1
            try:
                await self._exchange([], NEVER)
                await self._settle_postponed(is_final=True)
            except Exception as error:
                self._outages.failed(error)
                if (len(outcomes) or outcomes.has_postponed) and self._clock() > until:
                    raise
                await asyncio.sleep(STORE_RETRY_SECONDS[0])
            else:
                if self._flow.has_unreported_permits:
                    await asyncio.sleep(BUSY_SECONDS)

    async def abandon(self) -> None:
        """Stop sending at once."""
        await self._workers.abandon()
        await self._collector.with_callbacks.abandon()

    def wake(self) -> None:  # another database's dispatcher has freed permits for this one
        self._scheduler.begin_round()
        self._collector.news.set()
        self._workers.follow()

    # --- the loops

    async def _claim_first(self) -> int:
        """Claim with one loop until the first claim fixes the cutoff. A later one would include retries."""
        settled, asked = 0, True
        while self._cutoff == NEVER and asked and not self._scheduler.all_asked:
            progress = await self._exchange(self._scheduler.next_quotas(self._clock()), NEVER)
            settled, asked = settled + progress.settled, progress.asked
        return settled

    async def _drain_in_loops(self) -> int:
        counts = await asyncio.gather(*(self._drain_what_is_due() for _ in range(CLAIM_LOOPS)), return_exceptions=True)
        for count in counts:
            if isinstance(count, BaseException):
                raise count
        await self._exchange([], self._cutoff)  # report the last sends' results
        return sum(count for count in counts if isinstance(count, int))

    async def _drain_what_is_due(self) -> int:
        settled = 0
        while True:
            if self._is_stale:
                await self.sweep()
            settled += await self._settle_postponed()
            progress = await self._exchange(self._scheduler.next_quotas(self._clock()), self._cutoff)
            settled += progress.settled
            if progress.claimed or self._collector.in_batches or (progress.asked and not self._scheduler.all_asked):
                continue
            if (
                self._workers
                or self._collector.with_callbacks
                or self._exchanging
                or self._collector.in_batches.has_postponed
            ):
                self._collector.news.clear()
                await first_signal(self._collector.news, seconds=self._collector.in_batches.again_in)
            elif self._scheduler.all_asked:
                self._collector.news.set()  # wake the other claim loop, which may wait for this one's exchange
                return settled
            else:  # other databases use all permits that they share with this one
                await asyncio.sleep(BUSY_SECONDS)

    async def _claim_loop(self, stopping: asyncio.Event, *, is_first: bool) -> None:
        """Claim and settle until `stopping` is set. The first loop follows hints and polls; the others help under load."""
        while not stopping.is_set():
            if is_first:
                self._follow_hints()
            progress = await self._exchange_patiently(stopping, is_first=is_first)
            if is_first:
                self._wakeup.asked(progress.claimed)
            if not (progress.has_more or (progress.asked and not self._scheduler.all_asked)):
                await self._rest(stopping, is_first=is_first)

    async def _exchange_patiently(self, stopping: asyncio.Event, *, is_first: bool) -> Progress:
        (first, most), tries = STORE_RETRY_SECONDS, 0
        while not stopping.is_set():
            try:
                if self._clock() >= self._sweeps_at(is_first=is_first):
                    await self.sweep()
                    self._guard.report()
                    if stopping.is_set():  # set during the sweep: entries claimed now would never be sent
                        break
                await self._settle_postponed()
                rests = self._surveyed is None or self._has_all
                quotas = [] if rests else self._scheduler.next_quotas(self._clock())
                return await self._exchange(quotas, NEVER)
            except ConfigurationError as refusal:  # waiting cannot help: end this process
                self.refusal = refusal
                stopping.set()
            except Exception as error:
                self._outages.failed(error)
                self._swept_at = -math.inf  # sweep first: after the outage it may be another database
                delay = min(first * 2 ** min(tries, 10), most) * (0.5 + self._rng.random() / 2)
                tries += 1
                await first_signal(self._stopped, seconds=delay)
        return Progress()

    async def _rest(self, stopping: asyncio.Event, *, is_first: bool) -> None:
        """Wait for an outcome, a hint, or the time to poll; then a moment longer, to settle more outcomes together."""
        now = self._clock()
        until = now + min(self._flow.opens_in(now, since=self._round_at), self._collector.in_batches.again_in)
        until = min(until, self._wakeup.polls_at(self._rng.random(), is_first=is_first))
        if not (is_first or self._is_idle):
            until = min(until, self._sweeps_at(is_first=False))
        if not self._collector.in_batches:
            self._collector.news.clear()
            hinted = [self._wakeup.hinted] if is_first else []
            await first_signal(self._collector.news, self._stopped, *hinted, seconds=max(0.0, until - now))
        is_news = self._collector.news.is_set() or bool(self._collector.in_batches)
        is_hinted = is_first and self._wakeup.hinted.is_set()
        if self._clock() >= until or not (is_news or is_hinted) or (is_news and not self._has_all):
            self._scheduler.begin_round()
            self._round_at = self._clock()
            if is_first:
                self._wakeup.polled()
        if self._collector.in_batches and self._workers and len(self._collector.in_batches) < MAX_BATCH_ENTRIES:
            lingering = AHEAD_LINGER_SECONDS if self._workers.has_waiting else LINGER_SECONDS
            await first_signal(self._stopped, seconds=lingering)

    @property
    def _has_all(self) -> bool:
        """Whether a claim would bring nothing: what becomes due is hinted or polled for."""
        return self._wakeup.is_listening and self._scheduler.has_all

    def _follow_hints(self) -> None:
        """Claim for the destinations named by hints before all others. If a hint names none, sweep first."""
        if not self._wakeup.hinted.is_set() or (heard := self._wakeup.take()) is None:
            return
        if heard.destinations is not None:
            self._scheduler.hint(heard.destinations)
        elif (wait := self._swept_at + HINTED_SWEEP_SECONDS - self._clock()) > 0:
            self._wakeup.hint_again_in(wait)
        else:
            self._swept_at = -math.inf

    # --- one exchange

    async def _exchange(self, quotas: Sequence[Quota], cutoff: datetime) -> Progress:
        """Settle the outcomes, claim entries for the quotas, and start to send them."""
        settlements = self._collector.take()
        if not (quotas or settlements or self._flow.has_news):
            return Progress()
        started = self._clock()
        self._exchanging += 1
        exchange, request = Exchange(), self._request(quotas, cutoff)
        self.unstarted.ask(request.token)
        try:
            exchange = await self._store.exchange(settlements, request)
            if exchange.error is not None:
                settlements = self._collector.note_part(settlements, exchange)
                raise exchange.error
        except BaseException as error:
            self._scheduler.release(quotas)
            self._collector.in_batches.put_back(settlements)  # keep them until the database is available
            self._collector.news.set()
            if not isinstance(error, CallbacksChanged):
                raise
            await self._learn_callbacks()
            return Progress(asked=bool(quotas))
        finally:
            self.unstarted.answered(request.token, exchange.claimed)
            self._exchanging -= 1
            flow_update = request.flow_update
            if flow_update is not None and self._flow.learn(flow_update, exchange.flow_states, request.token):
                self._scheduler.begin_round()
            self._workers.follow()
        claimed, passed_over = exchange.claimed, exchange.passed_over  # others may be due after the passed over
        hints_follow = self._wakeup.is_listening and not passed_over and flow_update is None
        has_more = self._scheduler.note_claim(quotas, claimed, passed_over=passed_over, hints_follow=hints_follow)
        self._outages.answered()
        if claimed:
            self._has_claimed = True
            self._cutoff = min(self._cutoff, claimed[0].leased_at)
            self._collector.note_claim(claimed, request.token, started)
        self._workers.start(self._triage.sort(claimed, started, exchange.unopened))
        if claimed:
            await asyncio.sleep(0)  # the sends begin before the next exchange
            if has_more:
                self._collector.news.set()  # not otherwise: two idle loops would wake each other without end
        settled = self._collector.note(settlements, exchange)
        return Progress(bool(quotas), len(claimed) + passed_over, settled, has_more=has_more or bool(passed_over))

    async def _settle_postponed(self, *, is_final: bool = False) -> int:
        """Settle postponed entries in an exchange of their own, because a locked row would delay others. Returns how many."""
        postponed = self._collector.take_postponed(is_final=is_final)
        if not postponed:
            return 0
        try:
            exchange = await self._store.exchange(postponed, None)
            if exchange.error is not None:
                postponed = self._collector.note_part(postponed, exchange)
                raise exchange.error
        except BaseException as error:
            self._collector.in_batches.postpone(postponed, {entry.lease for entry, _ in postponed})
            self._collector.news.set()  # the other loop may wait only for these
            if not isinstance(error, CallbacksChanged):
                raise
            await self._learn_callbacks()
            return 0
        return self._collector.note(postponed, exchange)

    def _request(self, quotas: Sequence[Quota], cutoff: datetime) -> ClaimRequest:
        return ClaimRequest(
            quotas=quotas,
            max_entries=max_entries(quotas),
            max_callbacks=max_callbacks(quotas),
            token=UUID(int=self._rng.getrandbits(128)),
            lease=self._settings.lease,
            forms=self._routes.forms,
            cutoff=cutoff,
            completions=self._callbacks.complete_requests,
            callbacks=self._callbacks.to_record,
            seen=self._guard.seen,
            flow_update=self._flow.take(quotas),
            unserved=self._scheduler.unserved,
        )

    # --- changes by other processes

    @property
    def _is_idle(self) -> bool:
        return self._wakeup.is_listening and not (self._has_claimed or self.in_flight())

    def _sweeps_at(self, *, is_first: bool) -> float:
        """When a loop sweeps. In a busy dispatcher the first loop leaves it to the others for as long again: hints would wait for
        the end of its sweep. While hinted entries wait to be claimed, each sweep may be as late.
        """
        seconds = IDLE_SWEEP_SECONDS if self._is_idle else SWEEP_SECONDS
        may_be_late = self._scheduler.is_hinted or (is_first and not self._is_idle)
        return self._swept_at + (2 * seconds if may_be_late else seconds)

    @property
    def _is_stale(self) -> bool:
        return self._surveyed is None or self._clock() - self._surveyed > STALE_SECONDS

    async def sweep(self) -> None:
        """Check the database's identity, new destinations, entries due before the cursors, and flow control."""
        began = self._swept_at = self._clock()
        if self._is_stale:
            self._surveyed = None  # the other loop claims nothing before a sweep has ended
        self._has_claimed = False
        await self._guard.refresh()
        if self._surveyed is None:
            await self._store.record_secrets(self._keyring())
        await self._refresh_callbacks()
        survey = await self._store.survey()
        if self._surveyed is not None and began < self._surveyed:  # a late answer: the other loop has swept meanwhile
            return
        self._surveyed = began
        self._scheduler.learn(survey.destinations, survey.known)
        self._flow.refresh(survey.flow_states)

    async def _refresh_callbacks(self) -> None:
        """Record this process's callbacks at the start; then take over the entries that wait for them."""
        if self._surveyed is None:
            self._callbacks.learn(await self._store.callbacks(self._callbacks.to_record))
        if self._callbacks.to_record and (taken := await self._store.take_over(self._callbacks.to_record)):
            log.info("took over %d entries that waited for callbacks which this process has", taken)

    async def _learn_callbacks(self) -> None:
        """Read the recorded callbacks again: an entry may have got a callback that only another process has."""
        self._callbacks.learn(await self._store.callbacks())
