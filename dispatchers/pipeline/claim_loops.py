"""The loops that claim entries, have them sent, and settle them.

A claim is committed before anything is sent, and no transaction is open during a send. While one loop waits for the database,
what the other has claimed is sent.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from dispatchers.callbacks import Callbacks
from dispatchers.flow_control.quota import Quota
from dispatchers.pipeline.activity_log import ActivityLog
from dispatchers.pipeline.callback_pace import CallbackPace
from dispatchers.pipeline.claim_ahead import claim_ahead_for
from dispatchers.pipeline.failover_guard import FailoverGuard
from dispatchers.pipeline.flow_monitor import BUSY_SECONDS, FlowMonitor
from dispatchers.pipeline.levels import read_levels
from dispatchers.pipeline.outcome_collector import OutcomeCollector
from dispatchers.pipeline.routing import Routes
from dispatchers.pipeline.scheduler import BATCH_ENTRIES_MAX, Scheduler, entries_max
from dispatchers.pipeline.sender import Sender
from dispatchers.pipeline.settlement import STORE_RETRY_SECONDS
from dispatchers.pipeline.triage import Triage
from dispatchers.pipeline.wakeup import Wakeup, first_set
from dispatchers.settings import Settings
from dispatchers.store.claim_request import ClaimRequest
from dispatchers.store.outage_log import OutageLog
from dispatchers.store.protocol import CallbacksChanged, Exchange, Store
from dispatchers.transitions import Ending, Release
from outbox.errors import ConfigurationError
from outbox.keys import Keyring
from outbox.times import NEVER

log = logging.getLogger("outbox.dispatcher")

CLAIM_LOOPS = 2  # exchanges with the database at once
SWEEP_SECONDS = 1.0  # entries that became due before the cursors are found by then
IDLE_SWEEP_SECONDS = 5.0  # while nothing is claimed: then there are no cursors, and hints bring what is new
HINTED_SWEEP_SECONDS = 0.25  # between two sweeps for hints that name no destination
LINGER_SECONDS = 0.01  # settling waits so long for company
AHEAD_LINGER_SECONDS = 0.03  # while entries that were claimed ahead are sent: no permit waits for the next claim
PERMIT_REPORTS_MAX = 20  # attempts to report free permits, `BUSY_SECONDS` apart; then they expire with their lease


class Progress(NamedTuple):
    """The result of an exchange. asked: whether it had quotas. claimed: including the entries that were passed over.

    has_more: whether more may be due where it asked.
    """

    asked: bool = False
    claimed: int = 0
    settled: int = 0
    has_more: bool = False


class ClaimLoops:
    """Claims entries, has them sent, and settles them with a later exchange.

    guard: stops the claims after a failover. env, keyring: asked when they are needed, as the app may configure them late.
    clock: ours, in seconds. refusal: why this process must end, if it must. in_flight: how many entries are being sent.
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
    ) -> None:
        self._settings, self._store, self._routes, self._callbacks = settings, store, routes, callbacks
        self._guard, self._outages, self._keyring, self._clock, self._rng = guard, outages, keyring, clock, rng
        self._activity = activity
        self._flow = FlowMonitor(settings.limits, clock=clock, rng=rng)
        pace = CallbackPace(settings.callbacks_at_once, settings.usable, callbacks.destinations)
        self._scheduler = Scheduler(
            routes.destinations,
            permits=settings.concurrency,
            permits_in_all=settings.in_flight_max,
            permits_of=settings.concurrency_of,
            shut_until=self._flow.shut_until,
            pace=pace,
            ahead=claim_ahead_for(settings, routes),
        )
        self._collector = OutcomeCollector(
            settings, store, callbacks, self._scheduler, self._flow, pace, outages, activity, clock=clock, rng=rng
        )
        self._triage = Triage(
            routes, self._scheduler, env=env, clock=clock, rng=rng, flow=self._flow, done=self._collector.done
        )
        self._sender = Sender(
            store=store,
            keyring=keyring,
            usable=settings.usable,
            clock=clock,
            rng=rng,
            flow=self._flow,
            permits_of=self._scheduler.permits_of,
            done=self._collector.done,
            activity=activity,
        )
        levels = partial(read_levels, self._sender, self._scheduler, self._flow, self._collector, guard)
        activity.read_levels_from(levels)
        self._wakeup = Wakeup(
            store.listener,
            serves=lambda operation: routes.find(operation) is not None,
            poll=settings.poll.total_seconds(),
            clock=clock,
        )
        self.in_flight = lambda: len(self._sender) + len(self._collector.alone)
        self._exchanging, self._cutoff = 0, NEVER
        self._swept_at, self._has_claimed = -math.inf, False  # and whether since then
        self._round_at = -math.inf  # when a loop last began to ask every destination
        self._has_refreshed = False  # before it has, it does not know whose age a pause has stopped
        self.refusal: ConfigurationError | None = None

    def begin(self) -> None:
        """Start on this event loop."""
        self._cutoff = NEVER
        self._scheduler.claims_ahead = False
        self._collector.begin()
        self._wakeup.begin()

    async def run_once(self) -> int:
        """Claim, send and settle what is due now; returns how many entries settled."""
        settled = await self._claim_first()
        settled += await self._drain_in_loops()
        for _ in range(PERMIT_REPORTS_MAX):
            if not self._flow.has_unreported_permits:
                break
            await asyncio.sleep(BUSY_SECONDS)
            settled += await self._drain_in_loops()
        await self._sender.abandon()  # nothing is in flight: this only ends the workers
        return settled + self._collector.settled_alone

    def until(self, stopping: asyncio.Event) -> list[Coroutine[Any, Any, None]]:
        """The loops, to be awaited together; while the database is unavailable they wait."""
        self._scheduler.claims_ahead = True
        loops = [self._claim_loop(stopping, is_first=number == 0) for number in range(CLAIM_LOOPS)]
        return [*loops, self._wakeup.pump(stopping)]

    async def drain(self, grace: timedelta) -> None:
        """Finish what is in flight within the grace, settle it, and leave the rest to their leases' end."""
        until = self._clock() + grace.total_seconds()
        await self._sender.finish(grace)
        await self._collector.alone.finish(timedelta(seconds=until - self._clock()))
        outcomes, reports = self._collector.outcomes, 0
        while (
            len(outcomes)
            or outcomes.has_postponed
            or (self._flow.has_unreported_permits and reports < PERMIT_REPORTS_MAX)
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
        await self._sender.abandon()
        await self._collector.alone.abandon()

    # --- the loops

    async def _claim_first(self) -> int:
        """One group alone, until the first claim says what "now" is: the other's claim could otherwise come so late that it
        finds what has become due again meanwhile.
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
        await self._exchange([], self._cutoff)  # what of the last ones is still to be reported
        return sum(count for count in counts if isinstance(count, int))

    async def _drain_what_is_due(self) -> int:
        settled = 0
        while True:
            settled += await self._settle_postponed()
            progress = await self._exchange(self._scheduler.take(self._clock()), self._cutoff)
            settled += progress.settled
            if progress.claimed or self._collector.outcomes or (progress.asked and not self._scheduler.all_asked):
                continue
            if self._sender or self._collector.alone or self._exchanging or self._collector.outcomes.has_postponed:
                self._collector.news.clear()
                await first_set(self._collector.news, seconds=self._collector.outcomes.again_in)
            elif self._scheduler.all_asked:
                self._collector.news.set()  # the other claim loop may wait for the end of this one's exchange
                return settled

    async def _claim_loop(self, stopping: asyncio.Event, *, is_first: bool) -> None:
        """The first loop follows hints and polls; the others help when there is something to do."""
        while not stopping.is_set():
            if is_first:
                self._follow_hints()
            progress = await self._exchange_patiently(stopping)
            if is_first:
                self._wakeup.asked(progress.claimed)
            if not (progress.has_more or (progress.asked and not self._scheduler.all_asked)):
                await self._rest(stopping, is_first=is_first)

    async def _exchange_patiently(self, stopping: asyncio.Event) -> Progress:
        first, most = STORE_RETRY_SECONDS
        tries = 0
        while not stopping.is_set():
            try:
                if self._must_sweep():
                    await self.sweep()
                    self._guard.report()
                    if stopping.is_set():  # meanwhile: what is claimed now would never be sent
                        break
                await self._settle_postponed()
                return await self._exchange(self._scheduler.take(self._clock()) if self._has_refreshed else [], NEVER)
            except ConfigurationError as refusal:  # no waiting mends it: this process ends, the others continue
                self.refusal = refusal
                stopping.set()
            except Exception as error:
                self._outages.failed(error)
                self._swept_at = -math.inf  # it may be another database when it is back
                delay = min(first * 2 ** min(tries, 10), most) * (0.5 + self._rng.random() / 2)
                tries += 1
                await first_set(stopping, seconds=delay)
        return Progress()

    async def _rest(self, stopping: asyncio.Event, *, is_first: bool) -> None:
        """Wait until there is something to settle, a hint, or it is time to poll; then a moment longer, for company."""
        now = self._clock()
        until = now + min(self._flow.opens_in(now, since=self._round_at), self._collector.outcomes.again_in)
        until = min(until, self._wakeup.polls_at(self._rng.random(), is_first=is_first))
        if not self._collector.outcomes:
            self._collector.news.clear()
            hinted = [self._wakeup.hinted] if is_first else []
            await first_set(self._collector.news, stopping, *hinted, seconds=max(0.0, until - now))
        is_news = self._collector.news.is_set() or bool(self._collector.outcomes) or self._clock() >= until
        if is_news or not (is_first and self._wakeup.hinted.is_set()):
            self._scheduler.begin_round()
            self._round_at = self._clock()
            if is_first:
                self._wakeup.polled()
        if self._collector.outcomes and self._sender and len(self._collector.outcomes) < BATCH_ENTRIES_MAX:
            await first_set(stopping, seconds=AHEAD_LINGER_SECONDS if self._sender.has_waiting else LINGER_SECONDS)

    def _follow_hints(self) -> None:
        """Ask the destinations that hints have named before all others; if a hint names none, sweep first."""
        if not self._wakeup.hinted.is_set() or (heard := self._wakeup.take()) is None:
            return
        if heard.destinations is not None:
            self._scheduler.meet(heard.destinations)
        elif (wait := self._swept_at + HINTED_SWEEP_SECONDS - self._clock()) > 0:
            self._wakeup.hint_again_in(wait)
        else:
            self._swept_at = -math.inf

    # --- one exchange

    async def _exchange(self, quotas: Sequence[Quota], cutoff: datetime) -> Progress:
        """Settle what has come back, claim what is wanted, start the sending of what was claimed."""
        settlements = self._collector.take()
        if not (quotas or settlements or self._flow.has_news):
            return Progress()
        started = self._clock()
        self._exchanging += 1
        exchange, request = Exchange(), self._request(quotas, cutoff)
        try:
            exchange = await self._store.exchange(settlements, request)
        except BaseException as error:
            self._scheduler.give_all_back(quotas)
            self._collector.outcomes.put_back(settlements)  # kept until the database is back
            self._collector.news.set()
            if not isinstance(error, CallbacksChanged):
                raise
            await self._learn_callbacks()
            return Progress(asked=bool(quotas))
        finally:
            self._exchanging -= 1
            flow_update = request.flow_update
            if flow_update is not None and self._flow.learn(flow_update, exchange.flow_states, request.token):
                self._scheduler.begin_round()
            self._sender.follow()
        hints_follow = self._wakeup.is_listening and not exchange.passed_over and flow_update is None
        has_more = self._scheduler.found(
            quotas, exchange.claimed, passed_over=exchange.passed_over, hints_follow=hints_follow
        )
        self._outages.answered()
        if exchange.claimed:
            self._has_claimed = True
            self._cutoff = min(self._cutoff, exchange.claimed[0].leased_at)
            self._collector.note_claim(exchange.claimed, request.token, started)
        self._sender.start(self._triage.sort(exchange.claimed, started))
        if exchange.claimed:
            await asyncio.sleep(0)  # the sends begin before anything else is asked
            if has_more:
                self._collector.news.set()  # not for nothing: two idle loops would wake each other without end
        settled = self._take_note(settlements, exchange)
        claimed = len(exchange.claimed) + exchange.passed_over  # of which others may be due after
        return Progress(bool(quotas), claimed, settled, has_more=has_more or bool(exchange.passed_over))

    async def _settle_postponed(self, *, is_final: bool = False) -> int:
        """Apart from what others wait for: another process may still have a row locked. Returns how many were settled."""
        postponed = self._collector.take_postponed(is_final=is_final)
        if not postponed:
            return 0
        try:
            exchange = await self._store.exchange(postponed, None)
        except BaseException as error:
            self._collector.outcomes.postpone(postponed, {entry.id for entry, _ in postponed})
            if not isinstance(error, CallbacksChanged):
                raise
            await self._learn_callbacks()
            return 0
        return self._take_note(postponed, exchange)

    def _take_note(self, settlements: Sequence[Ending], exchange: Exchange) -> int:
        """Keep the postponed ones, and note the others; returns how many took effect."""
        self._collector.outcomes.postpone(settlements, exchange.postponed)
        written = self._activity.note_exchange(settlements, exchange)
        return sum(not isinstance(change, Release) for _, change in written)

    def _request(self, quotas: Sequence[Quota], cutoff: datetime) -> ClaimRequest:
        return ClaimRequest(
            quotas=quotas,
            entries_max=entries_max(quotas),
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

    # --- what changes without us

    def _must_sweep(self) -> bool:
        """What was hinted at is claimed first, unless that has kept a sweep waiting for as long again."""
        is_idle = self._wakeup.is_listening and not self._has_claimed
        seconds = IDLE_SWEEP_SECONDS if is_idle else SWEEP_SECONDS
        return self._clock() - self._swept_at >= (2 * seconds if self._scheduler.is_hinted else seconds)

    async def sweep(self) -> None:
        """Check the database's identity, new destinations, entries due before the cursors, and flow control."""
        self._swept_at, self._has_claimed = self._clock(), False
        await self._guard.refresh()
        if not self._has_refreshed:
            await self._store.require_secrets(self._keyring(), recording=True)
        await self._refresh_callbacks()
        self._scheduler.learn(await self._store.destinations())
        self._flow.refresh(await self._store.flow_states())
        self._has_refreshed = True

    async def _refresh_callbacks(self) -> None:
        """Put ours on record at the start; then take over the entries that wait for them."""
        if not self._has_refreshed:
            self._callbacks.learn(await self._store.callbacks(self._callbacks.to_record))
        if self._callbacks.to_record and (taken := await self._store.take_over(self._callbacks.to_record)):
            log.info("took over %d entries whose callbacks other processes do not have", taken)

    async def _learn_callbacks(self) -> None:
        """The record of callbacks has changed: what must be settled may have a callback that only another process has."""
        self._callbacks.learn(await self._store.callbacks())
