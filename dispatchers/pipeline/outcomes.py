"""Collects the transitions of claimed entries, releases their permits, and settles them in a batch or with a callback."""

import logging
import math
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from dispatchers.callbacks import Callbacks
from dispatchers.decide import hand_over, store_first
from dispatchers.pipeline.activity_log import ActivityLog
from dispatchers.pipeline.app_transactions import Result, SettlementWorker, Waiting
from dispatchers.pipeline.attempt import Attempt
from dispatchers.pipeline.flow_monitor import FlowMonitor
from dispatchers.pipeline.routing import UnservedLog
from dispatchers.pipeline.scheduler import Scheduler
from dispatchers.pipeline.signals import Signal
from dispatchers.pipeline.unstarted import BLOCKED, Unstarted
from dispatchers.settings import Settings
from dispatchers.store.connections.outage_log import OutageLog
from dispatchers.store.protocol import Exchange, Store
from dispatchers.transitions import (
    ClaimedEntry,
    Ending,
    Lease,
    MarkUncertain,
    Release,
    RetryCallback,
    Settle,
    Transition,
)

log = logging.getLogger("outbox.dispatcher")

MISSING = (
    "its outcome is stored, but this process does not have its recorded callback `{name}`: a process that has it settles the"
    " entry; if the callback was removed permanently, run `outbox callbacks forget '{name}'`"
)

AGAIN_FIRST_SECONDS = 0.02  # until the first retry: usually a claim has locked the row, and a claim is short
AGAIN_SECONDS = 0.25  # between later retries: an app's transaction may take long
KEEP = timedelta(seconds=5)  # until the next try to settle, after the outcome was stored


class OutcomeCollector:
    """Gets one call of `done` or `unsent` for each claimed entry, and chooses how the entry is settled.

    in_batches: the outcomes for the next batches. with_callbacks: settles the entries that commit together with a callback.
    news: wakes the claim loops when there is an outcome, a new claim, a free permit, or the end of a loop.
    unstarted: the claimed entries whose sends have not begun.
    settled_with_callbacks: how many entries settled with a callback since `begin`.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        callbacks: Callbacks,
        scheduler: Scheduler,
        flow: FlowMonitor,
        outages: OutageLog,
        activity: ActivityLog,
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._callbacks = callbacks
        self._has_callbacks = bool(callbacks)
        self._scheduler = scheduler
        self._flow = flow
        self._destinations = scheduler.destinations
        self._activity = activity
        self._missing = UnservedLog(clock)
        self.in_batches = OutcomeBuffer(clock=clock, timeout=settings.lease / 4)
        self.with_callbacks = SettlementWorker(
            store,
            scheduler.destinations.pace,
            at_once=settings.callback_concurrency,
            usable=settings.usable,
            clock=clock,
            rng=rng,
            callbacks=callbacks,
            ended=self._ended_with_callback,
            away=outages.failed,
            trace=activity.trace,
            errors=activity.errors,
        )
        self.news = Signal()
        self.unstarted = Unstarted()
        self.settled_with_callbacks = 0

    def begin(self) -> None:
        """Prepare for this event loop: each `asyncio.run` creates a new one."""
        self.news = Signal()
        self.settled_with_callbacks = 0
        self.with_callbacks.begin()

    # --- before the send

    def note_claim(self, claimed: Sequence[ClaimedEntry], token: UUID, started: float) -> None:
        """Note a claim. token: of the leases. started: the process's clock before the claim."""
        if self._has_callbacks:
            self.with_callbacks.note_claim(token, started)
            for entry in claimed:
                if self._callbacks.may_call(entry):
                    self._destinations.reserve_callbacks(entry.destination)

    # --- after the send

    def done(self, attempt: Attempt) -> None:
        """Note the end of an attempt. Its entry needs its permit no longer."""
        entry, outcome = attempt.entry, attempt.outcome
        if outcome is not None:
            self._flow.hear(entry, outcome)
            self._destinations.note_end(entry.destination)
        self.unsent(entry, attempt.change)

    def unsent(self, entry: ClaimedEntry, change: Transition | None) -> None:
        """Note that a claimed entry is not sent any more. change: None if its lease must expire by itself."""
        if self.unstarted.end(entry) and isinstance(change, Release):
            change = replace(change, reason=BLOCKED)
        self._free_permit(entry)
        trace_context = None if self._activity.trace is None else self._activity.trace.context_of(entry)
        if change is not None:
            self._flow.end(entry, was_released=isinstance(change, Release))
            self._settle(entry, change, trace_context)

    def _settle(self, entry: ClaimedEntry, change: Transition, trace_context: Any) -> None:
        """Settle with the next batch, or alone if a callback or the request's completion must commit in the same transaction."""
        if self._has_callbacks and isinstance(change, Settle | MarkUncertain):
            calls = self._callbacks.calls(entry, change)
            if any(calls):
                # Keep its destination's permit: otherwise outcomes would pile up before slow callbacks, and their leases expire.
                self._destinations.reserve(entry, is_sent=True)
                self._destinations.reserve_callbacks(entry.destination)
                self.with_callbacks.start(entry, change, calls, trace_context)
                return
            if self._callbacks.may_call(entry):
                self._destinations.pace.measure(0.0)
        self._settle_in_batch(entry, change)

    def _settle_in_batch(self, entry: ClaimedEntry, change: Transition) -> None:
        if type(change) is not Settle or entry.position is not None:  # it may make an entry due, of which no hint comes
            self._scheduler.begin_round()
        self.in_batches.add(entry, change)

    def _ended_with_callback(self, waiting: Waiting, result: Result) -> None:
        entry = waiting.entry
        if result.settled:
            self._activity.note_settled(entry, waiting.end)
        elif result.is_lost:
            self._activity.note_lost([(entry, waiting.end)])
        elif result.instead is not None:
            self._settle_in_batch(entry, result.instead)
        self.settled_with_callbacks += result.settled
        self._free_permit(entry, is_sent=True)
        self._scheduler.begin_round()  # the callback may have enqueued entries, and `pace` may allow more claims

    def _free_permit(self, entry: ClaimedEntry, *, is_sent: bool = False) -> None:
        self._destinations.release(entry, is_sent=is_sent)
        if self._has_callbacks and self._callbacks.may_call(entry):
            self._destinations.release_callbacks(entry.destination)
        self.news.set()

    # --- for the next exchange with the database

    def take(self) -> list[Ending]:
        """The settlements of the next exchange."""
        return [self._hand_over(ending) for ending in self.in_batches.take()]

    def take_postponed(self, *, is_final: bool) -> list[Ending]:
        """The postponed settlements whose retry is due."""
        return [self._hand_over(ending) for ending in self.in_batches.take_postponed(is_final=is_final)]

    def note(self, settlements: Sequence[Ending], exchange: Exchange) -> int:
        """Keep the postponed settlements and note the others; returns how many entries were settled."""
        self.in_batches.postpone(settlements, exchange.postponed)
        written = self._activity.note_exchange(settlements, exchange)
        return sum([not isinstance(change, Release) for _, change in written])

    def note_part(self, settlements: Sequence[Ending], exchange: Exchange) -> list[Ending]:
        """Note the settlements of an exchange that ended early; returns those that must be settled again."""
        self.note([ending for ending in settlements if ending[0].lease not in exchange.unstored], exchange)
        return [ending for ending in settlements if ending[0].lease in exchange.unstored]

    def _hand_over(self, ending: Ending) -> Ending:
        """The ending, or, if only another process has its callback, the outcome to store for that process.

        This is decided just before the exchange, by the recorded callbacks that the exchange compares.
        """
        entry, change = ending
        if type(change) is Settle and not self._callbacks.is_any_on_record:
            return ending
        end = change.end if isinstance(change, RetryCallback) and change.callback is not None else change
        if not isinstance(end, Settle | MarkUncertain):
            return ending
        missing = self._callbacks.missing(entry, end)
        if missing is None:
            return entry, end
        self._missing.log_skipped(entry, MISSING.format(name=missing))
        return entry, hand_over(end, missing)


class OutcomeBuffer:
    """Outcomes in the order of their arrival, and the postponed ones. clock: in seconds.

    timeout: how long an outcome is postponed. Then it is only stored, which needs no row that another process locks.
    """

    def __init__(self, *, clock: Callable[[], float], timeout: timedelta) -> None:
        self._clock = clock
        self._timeout_seconds = timeout.total_seconds()
        self._waiting: list[Ending] = []
        self._postponed: list[Ending] = []
        self._since: dict[Lease, float] = {}  # when each was first postponed; also of those that are being tried
        self._again_at = math.inf

    def __len__(self) -> int:
        """How many must be settled with the next exchange."""
        return len(self._waiting)

    def add(self, entry: ClaimedEntry, change: Transition) -> None:
        self._waiting.append((entry, change))

    def take(self) -> list[Ending]:
        taken, self._waiting = self._waiting, []
        return taken

    def put_back(self, taken: Iterable[Ending]) -> None:
        """Take back outcomes that were not settled, because the database is unavailable."""
        self._waiting[:0] = taken

    # --- the postponed outcomes

    @property
    def has_postponed(self) -> bool:
        return bool(self._postponed)

    @property
    def again_in(self) -> float:
        """Seconds until the next retry of the postponed outcomes; infinity if there are none."""
        return max(0.0, self._again_at - self._clock()) if self._postponed else math.inf

    def postpone(self, tried: Iterable[Ending], leases: Collection[Lease]) -> None:
        """Note the result of a try: the outcomes of these leases are postponed, the others of `tried` are settled."""
        if not (leases or self._since):
            return
        now = self._clock()
        for ending in tried:
            lease = ending[0].lease
            if lease not in leases:
                self._since.pop(lease, None)
                continue
            again_at = now + (AGAIN_SECONDS if lease in self._since else AGAIN_FIRST_SECONDS)
            self._again_at = min(self._again_at, again_at) if self._postponed else again_at
            self._since.setdefault(lease, now)
            self._postponed.append(ending)

    def take_postponed(self, *, is_final: bool = False) -> list[Ending]:
        """The outcomes whose retry is due. Call `postpone` with the result of the retry."""
        now = self._clock()
        if not self._postponed or (now < self._again_at and not is_final):
            return []
        taken, self._postponed = self._postponed, []
        return [
            (entry, store_first(change, KEEP))
            if is_final or now - self._since[entry.lease] > self._timeout_seconds
            else (entry, change)
            for entry, change in taken
        ]
