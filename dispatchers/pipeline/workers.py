"""The tasks that send entries: as few as needed, each within its deadline, even if an adapter hangs."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from dispatchers.pipeline.attempt import IDLE, Attempt, AttemptContext, Batch, Deadline
from dispatchers.pipeline.destinations import Destinations
from dispatchers.pipeline.flow_monitor import FlowMonitor
from dispatchers.telemetry.log_ids import work_on
from dispatchers.transitions import Release

log = logging.getLogger("outbox.dispatcher")

STOPPED = "the process stopped before it was sent"
WATCH_SECONDS = 0.05  # a send is cancelled at most this long after its deadline
MAX_BATCH = 500  # more entries in one call save little, and block the event loop for longer
ABANDON_SECONDS = 1.0  # how long an adapter may take to end after it was cancelled


@dataclass(slots=True, eq=False)
class Worker:
    """A task that runs one attempt, or one batch of them, after another.

    deadline: of its present send. wake: the future that it awaits while it has nothing to do.
    doing: the attempt that it runs, or the first of a batch.
    """

    deadline: Deadline = field(default_factory=Deadline)
    wake: asyncio.Future[None] | None = None
    doing: Attempt | None = None


class Workers:
    """Runs attempts.

    done: called with each attempt at its end. flow: stores which destinations were paused.
    destinations: decide which attempts wait for a permit.
    """

    def __init__(
        self, context: AttemptContext, destinations: Destinations, flow: FlowMonitor, done: Callable[[Attempt], None]
    ) -> None:
        self._context = context
        self._destinations = destinations
        self._flow = flow
        self._done = done
        self._ready: deque[Attempt] = deque()
        self._working: dict[Worker, None] = {}  # a dict keeps the order: a seed must repeat its run
        self._idle: list[Worker] = []
        self._a_worker_was_woken = False
        self._watch: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._under_way = 0
        self._all_back: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return self._under_way

    @property
    def has_waiting(self) -> bool:
        """Whether entries that were claimed ahead wait."""
        return bool(self._destinations.waiting)

    @property
    def in_flight(self) -> Mapping[str, int]:
        """How many sends and lookups of each destination are running."""
        return self._destinations.sending

    @property
    def claimed_ahead(self) -> Mapping[str, int]:
        """How many entries of each destination wait for a permit."""
        return {name: len(each.waiting) for name, each in self._destinations.waiting.items()}

    def sending(self, task: "asyncio.Task[Any]") -> tuple[str, str] | None:
        """The destination and the operation of what this task sends; None if it is not one of these workers. On any thread."""
        doing = next((worker.doing for worker in list(self._working) if worker.deadline.task is task), None)
        return None if doing is None else (doing.entry.destination, doing.entry.operation)

    def start(self, attempts: Iterable[Attempt]) -> None:
        """Run these attempts, or let them wait for a permit."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # workers end with their event loop, and each `asyncio.run` creates a new one
            self._loop, self._idle, self._watch, self._a_worker_was_woken = loop, [], None, False
        for attempt in attempts:
            self._under_way += 1
            if not (attempt.route.is_repeatable or self._destinations.is_free(attempt.entry.destination)):
                self._release([attempt], "no permit was free, and after a crash it would be in doubt")
            elif self._destinations.begin(attempt):
                self._ready.append(attempt)
        self._set_to_work(loop)
        if self._watch is None:
            self._watch_sends(loop)

    def follow(self) -> None:
        """Send the entries that waited until the database had decided about their destination."""
        if self._destinations.waiting and self._loop is not None:
            for name in list(self._destinations.waiting):
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
        self._release(self._destinations.take_all(), STOPPED)
        while self._ready:
            attempt = self._ready.popleft()
            attempt.change = Release(STOPPED)
            self._end(attempt)
        self._a_worker_was_woken = False
        tasks = [worker.deadline.task for worker in self._working if worker.deadline.task is not None]
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
        if not self._ready or self._a_worker_was_woken:
            return
        self._a_worker_was_woken = True
        while self._idle:
            worker = self._idle.pop()
            if worker.wake is not None and not worker.wake.done():
                worker.wake.set_result(None)
                return
        worker = Worker()
        worker.deadline.task = loop.create_task(self._work(worker, loop))

    async def _work(self, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
        deadline = worker.deadline
        self._working[worker] = None
        try:
            while True:
                self._a_worker_was_woken = False
                while self._ready:
                    worker.doing = attempt = self._ready.popleft()
                    send_batch = attempt.route.send_batch
                    batch = () if send_batch is None else self._joined(attempt)
                    self._set_to_work(loop)
                    deadline.at = loop.time() + attempt.route.timeout_seconds
                    if send_batch is not None and batch:
                        await Batch(batch, send_batch, self._context, self._end_in_batch).run(deadline)
                    else:
                        work_on(attempt.entry)
                        try:
                            await attempt.run(deadline)
                        finally:
                            self._end(attempt)
                    if deadline.has_passed:
                        deadline.forgive()
                deadline.at, worker.doing = IDLE, None
                work_on(None)
                worker.wake = loop.create_future()
                self._idle.append(worker)
                await worker.wake
        finally:
            self._working.pop(worker, None)

    def _watch_sends(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch all sends with one timer, as long as some are under way: one for each send would double the cost of a send."""
        self._watch = loop.call_later(WATCH_SECONDS, self._cancel_overdue, loop) if self._under_way else None

    def _cancel_overdue(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watch = None  # an exception below ends the watch until the next send
        self._release(self._destinations.take_late(self._context.clock()), "its destination has become slow")
        self.follow()
        now = loop.time()
        for worker in self._working:
            worker.deadline.enforce(now)
        self._watch_sends(loop)

    def _joined(self, attempt: Attempt) -> Sequence[Attempt]:
        """The attempt and those after it that one call may send with it. Empty if it must be sent alone."""
        joined = list[Attempt]()
        if attempt.may_join:
            joined.append(attempt)
            ready, route = self._ready, attempt.route
            while ready and len(joined) < MAX_BATCH and ready[0].route is route and ready[0].may_join:
                joined.append(ready.popleft())
        return joined

    # --- the end of an attempt

    def _end(self, attempt: Attempt) -> None:
        self._finish(attempt)
        if self._destinations.end(attempt.entry.destination):
            self._follow(attempt.entry.destination)

    def _end_in_batch(self, attempt: Attempt) -> None:
        self._end(attempt)
        if self._ready and self._loop is not None:  # the batch still runs, and this outcome has freed a permit
            self._set_to_work(self._loop)

    def _follow(self, name: str) -> None:
        """Send the entries that were claimed ahead for this destination, as far as its permits allow.

        After a failure they wait until the database has decided, as if they had not been claimed ahead.
        """
        if self._flow.is_shut(name):
            self._release(self._destinations.take_waiting(name), "its destination is paused")
        elif not self._flow.is_in_question(name):
            while (following := self._destinations.next(name)) is not None:
                self._ready.append(following)

    def _release(self, unsent: Iterable[Attempt], reason: str) -> None:
        for attempt in unsent:
            attempt.change = Release(reason)
            self._finish(attempt)

    def _finish(self, attempt: Attempt) -> None:
        self._under_way -= 1
        if not self._under_way and self._all_back is not None and not self._all_back.done():
            self._all_back.set_result(None)
        self._done(attempt)
