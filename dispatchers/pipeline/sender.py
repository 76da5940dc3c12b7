"""Runs sends and status lookups, each within its lease and its deadline, even if the adapter hangs."""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from dispatchers.delivery import CannotTell, Delivery, Finding, Outcome, Unknown
from dispatchers.pipeline.activity_log import ActivityLog, result_of
from dispatchers.pipeline.attempts import Attempts, delivery_of
from dispatchers.pipeline.batch import NO_DELIVERY, Batch
from dispatchers.pipeline.flow_monitor import FlowMonitor
from dispatchers.pipeline.routing import Route
from dispatchers.pipeline.sanitize import storable, storable_finding
from dispatchers.pipeline.send_queue import SendQueue, Work
from dispatchers.pipeline.unstarted import Unstarted
from dispatchers.pipeline.worker import IDLE, Worker
from dispatchers.store.protocol import Store
from dispatchers.telemetry.log_ids import work_on
from dispatchers.telemetry.tracing import GuardedTrace
from dispatchers.transitions import ClaimedEntry, Lookup, Release, Send, Transition
from outbox.keys import Keyring, Tag, derive_tag

log = logging.getLogger("outbox.dispatcher")

STOPPED = "the process stopped before it was sent"
WATCH_SECONDS = 0.05  # a send is cancelled at most this long after its deadline
MAX_BATCH = 500  # more entries in one call save little, and block the event loop for longer
ABANDON_SECONDS = 1.0  # how long an adapter may take to end after it was cancelled


class Sender:
    """Runs sends and status lookups, and reports the transition of each.

    done: called at the end of each send, with the entry, the adapter's answer and the transition, if there are any.
    keyring: called only for a later key epoch. flow: stores which destinations were paused.
    queue: in it the entries wait that were claimed ahead.
    """

    def __init__(
        self,
        *,
        store: Store,
        keyring: Callable[[], Keyring],
        usable: timedelta,
        clock: Callable[[], float],
        rng: random.Random,
        flow: FlowMonitor,
        queue: SendQueue,
        done: Callable[[ClaimedEntry, Outcome | None, Transition | None], None],
        activity: ActivityLog,
        unstarted: Unstarted,
    ) -> None:
        self._store = store
        self._keyring = keyring
        self._attempts = Attempts(
            usable=usable, clock=clock, rng=rng, flow=flow, activity=activity, unstarted=unstarted
        )
        self._clock = clock
        self._flow = flow
        self._done = done
        self._activity = activity
        self._ask = self._answer if activity.trace is None else partial(self._traced, activity.trace)
        self._ready: deque[Work] = deque()
        self._queue = queue
        self._working: dict[Worker, None] = {}  # a dict keeps the order: a seed must repeat its run
        self._idle: list[Worker] = []
        self._called = False
        self._watch: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._under_way = 0
        self._all_back: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return self._under_way

    @property
    def has_waiting(self) -> bool:
        """Whether entries that were claimed ahead wait."""
        return bool(self._queue.destinations)

    @property
    def in_flight(self) -> Mapping[str, int]:
        """How many sends and lookups of each destination are running."""
        return self._queue.sending

    @property
    def claimed_ahead(self) -> Mapping[str, int]:
        """How many entries of each destination wait for a permit."""
        return self._queue.waiting

    def sending(self, task: "asyncio.Task[Any]") -> tuple[str, str] | None:
        """The destination and the operation of what this task sends; None if it is not one of this sender's. On any thread."""
        doing = next((worker.doing for worker in list(self._working) if worker.task is task), None)
        return None if doing is None else (doing.destination, doing.operation)

    def start(self, claims: Iterable[Work]) -> None:
        """Send these entries, or look them up."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # workers end with their event loop, and each `asyncio.run` creates a new one
            self._loop, self._idle, self._watch, self._called = loop, [], None, False
        for claim in claims:
            self._under_way += 1
            if not (claim[1].is_repeatable or self._queue.is_free(claim[0].destination)):
                self._release([claim], "no permit was free, and after a crash it would be in doubt")
            elif self._queue.begin(claim):
                self._ready.append(claim)
        self._set_to_work(loop)
        if self._watch is None or self._watch.done():
            self._watch = loop.create_task(self._cancel_overdue(loop))

    def follow(self) -> None:
        """Send the entries that waited until the database had decided about their destination."""
        if self._queue.destinations and self._loop is not None:
            for name in list(self._queue.destinations):
                self._follow(name)
            self._set_to_work(self._loop)

    async def finish(self, grace: timedelta) -> None:
        """Wait for the sends in flight, and cancel them after `grace`."""
        if self._under_way:
            self._all_back = asyncio.get_running_loop().create_future()
            back, _ = await asyncio.wait([self._all_back], timeout=grace.total_seconds())
            if not back:
                text = "grace period over: %d sends in flight cancelled; their entries are in doubt until their leases expire"
                log.warning(text, self._under_way)
        await self.abandon()

    async def abandon(self) -> None:
        """Cancel the sends in flight. Their entries are in doubt; the next claim after their leases records that."""
        self._release(self._queue.take_all(), STOPPED)
        while self._ready:
            entry, *_ = self._ready.popleft()
            self._end(entry, None, Release(STOPPED))
        self._called = False
        tasks = [worker.task for worker in self._working if worker.task is not None]
        self._idle = []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=ABANDON_SECONDS)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    # --- the workers

    def _set_to_work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake or start one more worker. Before a worker's own send may wait, it wakes the next one.

        So there are as many workers as waiting sends. One or two workers run all sends that do not wait.
        """
        if not self._ready or self._called:
            return
        self._called = True
        while self._idle:
            worker = self._idle.pop()
            if worker.wake is not None and not worker.wake.done():
                worker.wake.set_result(None)
                return
        worker = Worker()
        worker.task = loop.create_task(self._work(worker, loop))

    async def _work(self, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
        self._working[worker] = None
        try:
            while True:
                self._called = False
                while self._ready:
                    entry, route, step, started = work = self._ready.popleft()
                    send_batch = route.send_batch
                    works = () if send_batch is None else self._take_with(work)
                    self._set_to_work(loop)
                    worker.deadline, worker.doing = loop.time() + route.timeout_seconds, entry
                    if send_batch is not None and works:
                        await self._attempt_batch(worker, route, send_batch, works)
                    else:
                        await self._attempt(worker, entry, route, step, started)
                    if worker.overdue and worker.task is not None:
                        worker.overdue = False
                        worker.task.uncancel()
                worker.deadline, worker.doing = IDLE, None
                work_on(None)
                worker.wake = loop.create_future()
                self._idle.append(worker)
                await worker.wake
        finally:
            self._working.pop(worker, None)

    async def _cancel_overdue(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel overdue sends, in one task for all workers: a timer for each send would double the cost of a send."""
        while self._under_way:
            await asyncio.sleep(WATCH_SECONDS)
            self._release(self._queue.take_late(), "its destination has become slow")
            self.follow()
            now = loop.time()
            for worker in self._working:
                if now >= worker.deadline and not worker.overdue and worker.task is not None:
                    worker.overdue = True
                    worker.task.cancel()

    # --- a batch

    def _take_with(self, work: Work) -> Sequence[Work]:
        """The entry and those after it that one call may send with it. Empty if it must be sent alone."""
        route, works = work[1], list[Work]()
        if _may_join(work):
            works.append(work)
            while self._ready and len(works) < MAX_BATCH and self._ready[0][1] is route and _may_join(self._ready[0]):
                works.append(self._ready.popleft())
        return works

    async def _attempt_batch(
        self, worker: Worker, route: Route, send_batch: Callable[..., Any], works: Sequence[Work]
    ) -> None:
        """Send these entries with one call of the adapter. Each ends as soon as its outcome arrives."""
        batch = Batch(self._attempts, route, self._clock(), self._end_in_batch, self._activity.trace)
        work_on(None)
        batch.fill(works, worker.deadline)
        if not batch.deliveries:
            return
        try:
            await send_batch(batch.deliveries, batch.answered)
            batch.end_with(Unknown("the adapter returned without its outcome"))
        except asyncio.CancelledError:
            if not worker.is_only_overdue:
                raise
            batch.end_with(Unknown(worker.no_answer(route)))
        except (Exception, BaseExceptionGroup, SystemExit) as error:
            text = "the adapter of %r raised for a batch of %d entries: those without an outcome count as not answered"
            log.exception(text, route.name, len(batch.deliveries))
            self._activity.errors.report("adapter", error)
            batch.end_with(Unknown(f"the adapter raised {type(error).__name__}"))
        finally:
            batch.abandon()  # no effect if each entry has ended

    def _end_in_batch(self, entry: ClaimedEntry, outcome: Outcome | None, change: Transition | None) -> None:
        self._end(entry, outcome, change)
        if self._ready and self._loop is not None:  # an outcome has freed a permit while the others are awaited
            self._set_to_work(self._loop)

    # --- one attempt

    async def _attempt(
        self, worker: Worker, entry: ClaimedEntry, route: Route, step: Send | Lookup, started: float
    ) -> None:
        change: Transition | None = None
        work_on(entry)
        try:
            # Get the tag first, because this may query the database: no time may pass between the checks below and the send.
            tag = Tag(entry.tag) if entry.key_epoch == 0 else await self._tag_of_epoch(worker, entry)
            delivery = None if tag is None else delivery_of(entry, route, tag, worker.deadline)
            change = self._attempts.refusal(entry, route, step, started)
            if change is None:
                change = await self._ask_for(worker, entry, route, step, delivery, started)
        except Exception as error:
            self._attempts.report(entry, error)
        finally:
            outcome, worker.outcome = worker.outcome, None
            self._end(entry, outcome, change)

    def _end(self, entry: ClaimedEntry, outcome: Outcome | None, change: Transition | None) -> None:
        self._finish(entry, outcome, change)
        self._queue.end(entry.destination)
        if entry.destination in self._queue.destinations:
            self._follow(entry.destination)

    def _follow(self, name: str) -> None:
        """Send the entries that were claimed ahead for this destination, as far as its permits allow.

        After a failure they wait until the database has decided, as if they had not been claimed ahead.
        """
        if self._flow.is_shut(name):
            self._release(self._queue.take(name), "its destination is paused")
        elif not self._flow.is_in_question(name):
            while (following := self._queue.next(name)) is not None:
                self._ready.append(following)

    def _release(self, unsent: Iterable[Work], reason: str) -> None:
        for entry, *_ in unsent:
            self._finish(entry, None, Release(reason))

    def _finish(self, entry: ClaimedEntry, outcome: Outcome | None, change: Transition | None) -> None:
        self._under_way -= 1
        if not self._under_way and self._all_back is not None and not self._all_back.done():
            self._all_back.set_result(None)
        self._done(entry, outcome, change)

    async def _tag_of_epoch(self, worker: Worker, entry: ClaimedEntry) -> Tag | None:
        """The tag of a later key epoch. Only the first epoch's tag is stored, so this one is derived; None if that fails."""
        try:
            return derive_tag(self._keyring(), entry.kid, await self._store.key_fields(entry.id), entry.key_epoch)
        except asyncio.CancelledError:
            if not worker.is_only_overdue:
                raise
            log.warning("entry %s (%s): deriving its key did not end before the deadline", entry.id, entry.operation)
        except Exception as error:
            log.exception("entry %s (%s) cannot be sent: deriving its key failed", entry.id, entry.operation)
            self._activity.errors.report("dispatcher", error, entry)
        return None

    async def _ask_for(
        self,
        worker: Worker,
        entry: ClaimedEntry,
        route: Route,
        step: Send | Lookup,
        delivery: Delivery | None,
        started: float,
    ) -> Transition:
        """Send the entry or look it up."""
        began = self._clock()
        if isinstance(step, Lookup):
            finding = await self._finding(worker, entry, route, delivery, started)
            if delivery is not None:
                self._attempts.note(entry, finding, began, started)
            return self._attempts.after_lookup(entry, route, step, finding, started)
        outcome = await self._outcome(worker, entry, route, delivery)
        if delivery is not None:
            self._attempts.note(entry, outcome, began, started)
        return self._attempts.after_send(entry, route, outcome, started)

    async def _outcome(self, worker: Worker, entry: ClaimedEntry, route: Route, delivery: Delivery | None) -> Outcome:
        if delivery is None:
            return NO_DELIVERY
        worker.outcome = storable(await self._ask(worker, entry, route, route.send, delivery))
        return worker.outcome

    async def _finding(
        self, worker: Worker, entry: ClaimedEntry, route: Route, delivery: Delivery | None, started: float
    ) -> Finding:
        if delivery is None:
            return CannotTell(NO_DELIVERY.reason)
        age = self._attempts.database_now(entry, started) - entry.created_at
        delivery = delivery._replace(attempt=entry.attempts, age=age)
        answer = await self._ask(worker, entry, route, route.find, delivery)
        return CannotTell(answer.reason) if isinstance(answer, Unknown) else storable_finding(answer)

    async def _traced(
        self,
        trace: GuardedTrace,
        worker: Worker,
        entry: ClaimedEntry,
        route: Route,
        ask: Callable[[Delivery], Any],
        delivery: Delivery,
    ) -> Any:
        delivery, end = trace.attempt(delivery, entry, is_lookup=ask is route.find)
        result = None
        try:
            answer = await self._answer(worker, entry, route, ask, delivery)
            result = result_of(answer)
            return answer
        finally:
            end(result)

    async def _answer(
        self, worker: Worker, entry: ClaimedEntry, route: Route, ask: Callable[[Delivery], Any], delivery: Delivery
    ) -> Any:
        """The adapter's answer; `Unknown` after an exception, which proves nothing about the remote service."""
        try:
            return await ask(delivery)
        except asyncio.CancelledError:
            if not worker.is_only_overdue:
                raise
            return Unknown(worker.no_answer(route))
        except (Exception, BaseExceptionGroup, SystemExit) as error:
            log.exception("the adapter of %r raised for entry %s: this counts as no answer", route.name, entry.id)
            self._activity.errors.report("adapter", error, entry)
            return Unknown(f"the adapter raised {type(error).__name__}")


def _may_join(work: Work) -> bool:
    """Whether the entry may be sent in a batch. A lookup is no send, and a later key may need a query."""
    return isinstance(work[2], Send) and not work[0].key_epoch
