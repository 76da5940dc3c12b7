"""Settles entries and completes requests in transactions with the app's code: its callbacks and its completions."""

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import takewhile
from typing import Any, NamedTuple
from uuid import UUID

from dispatchers.callbacks import CallbackFailed, CallbackOverdue, Callbacks, Calls, CompletionFailed
from dispatchers.decide import hand_over, keep, release
from dispatchers.names import did_you_mean
from dispatchers.pipeline.destinations import CallbackPace
from dispatchers.pipeline.wakeup import until_set
from dispatchers.store.protocol import CallbacksChanged, Store
from dispatchers.store.queue.ordering import NextIsLocked
from dispatchers.store.records.queries import MAX_ACCEPTED, Accepted
from dispatchers.telemetry.errors import ErrorReports, Where, described
from dispatchers.telemetry.log_ids import work_on
from dispatchers.telemetry.tracing import GuardedTrace
from dispatchers.transitions import ClaimedEntry, End, Lease, Transition
from outbox.sql.errors.driver import is_passing

log = logging.getLogger("outbox.dispatcher")

STORE_RETRY_SECONDS = (0.1, 5.0)
ABANDON_SECONDS = 1.0  # how long an async callback may take to end after it was cancelled
REPORT_SECONDS = 60.0  # between two warnings that callbacks are too slow for the leases
COMPLETION_POLL_SECONDS = 1.0
COMPLETION_RETRY_SECONDS = (2.0, 300.0)


class Waiting(NamedTuple):
    """An entry that must settle with its callback.

    until: when to release it, by the process's clock, because its lease ends soon. tries: how often the database was
    unavailable.
    trace_context: the context of its attempt's span; None if it had no attempt, or the attempt was not traced.
    """

    entry: ClaimedEntry
    end: End
    calls: Calls
    until: float
    tries: int = 0
    trace_context: Any = None


class Result(NamedTuple):
    """The result of a settlement. instead: the transition that a batch stores instead. is_lost: the lease was lost."""

    settled: bool
    instead: Transition | None = None
    is_lost: bool = False


class SettlementWorker:
    """Settles entries together with their callbacks, a few at the same time.

    at_once: how many callbacks run at the same time. usable: how long after its claim an entry may wait. Then its
    outcome is stored, and any dispatcher may claim the entry. clock: the process's clock, in seconds.
    callbacks: shows which callbacks only another process has. ended: called after each entry, with its result. away: called with
    the error when the database is unavailable; the settlement is retried.
    """

    def __init__(
        self,
        store: Store,
        pace: CallbackPace,
        *,
        at_once: int,
        usable: timedelta,
        clock: Callable[[], float],
        rng: random.Random,
        callbacks: Callbacks,
        ended: Callable[[Waiting, Result], None],
        away: Callable[[Exception], None],
        trace: GuardedTrace | None,
        errors: ErrorReports,
    ) -> None:
        self._store = store
        self._pace = pace
        self._at_once = at_once
        self._usable_seconds = usable.total_seconds()
        self._clock = clock
        self._rng = rng
        self._callbacks = callbacks
        self._ended = ended
        self._away = away
        self._trace = trace
        self._errors = errors
        self._until: dict[UUID, float] = {}  # the end of each claim by its lease token, in the order of the claims
        self._waiting: deque[Waiting] = deque()
        self._delayed: dict[Lease, tuple[asyncio.TimerHandle, Waiting]] = {}
        self._at_work = 0
        self._workers: dict[asyncio.Task[Any], None] = {}  # a dict keeps the order: a seed must repeat its run
        self._loop: asyncio.AbstractEventLoop | None = None
        self._release_timer: asyncio.TimerHandle | None = None
        self._release_at = math.inf
        self._reported_at = -math.inf

    def __len__(self) -> int:
        return len(self._waiting) + len(self._delayed) + self._at_work

    def begin(self) -> None:
        """Continue on this event loop: workers and timers end with their loop, and each `asyncio.run` creates a new one."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._workers, self._at_work, self._release_timer = loop, {}, 0, None
            self._waiting.extend(waiting for _, waiting in self._delayed.values())
            self._delayed = {}
        for waiting in self._waiting:
            self._set_to_work(loop)
            self._watch_lease(waiting, loop)

    def note_claim(self, token: UUID, started: float) -> None:
        """Note a claim: leases with this token count from `started`, by the process's clock."""
        for other in [each for each, _ in takewhile(lambda claim: claim[1] <= started, self._until.items())]:
            del self._until[other]
        self._until[token] = started + self._usable_seconds

    def start(self, entry: ClaimedEntry, end: End, calls: Calls, trace_context: Any = None) -> None:
        loop = asyncio.get_running_loop()
        until = self._until.get(entry.lease_token, self._clock())
        waiting = Waiting(entry, end, calls, until, trace_context=trace_context)
        self._waiting.append(waiting)
        self._set_to_work(loop)
        self._watch_lease(waiting, loop)

    async def finish(self, grace: timedelta) -> None:
        """Wait for the callbacks, at most for `grace`."""
        until = self._clock() + grace.total_seconds()
        while self and (left := until - self._clock()) > 0:
            if self._workers:
                await asyncio.wait(self._workers, timeout=left)
            else:  # all entries wait for the database
                await asyncio.sleep(min(left, STORE_RETRY_SECONDS[0]))
        await self.abandon()

    async def abandon(self) -> None:
        """Stop. Outcomes whose callback has not begun are stored. A running callback may commit; otherwise its lease expires."""
        not_begun = [*self._waiting, *self._stop_delays()]
        self._waiting = deque()
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(self._workers, timeout=ABANDON_SECONDS)
        begun, self._waiting = self._waiting, deque()
        self._release(not_begun, "the process stopped before its callback ran")
        for waiting in begun:
            self._ended(waiting, Result(False))

    def _stop_delays(self) -> list[Waiting]:
        delayed, self._delayed = self._delayed, {}
        for timer, _ in delayed.values():
            timer.cancel()
        if self._release_timer is not None:
            self._release_timer.cancel()
            self._release_timer = None
        return [waiting for _, waiting in delayed.values()]

    # --- entries whose leases end soon

    def _watch_lease(self, waiting: Waiting, loop: asyncio.AbstractEventLoop) -> None:
        """Release the entry if it still waits shortly before its lease ends. One timer serves all entries: for the earliest."""
        if self._release_timer is not None:
            if waiting.until >= self._release_at:
                return
            self._release_timer.cancel()
        self._release_at = waiting.until
        seconds = max(waiting.until - self._clock(), STORE_RETRY_SECONDS[0])  # so that an idle worker can take it first
        self._release_timer = loop.call_later(seconds, self._release_late, loop)

    def _all_waiting(self) -> Iterable[Waiting]:
        yield from self._waiting
        for _, waiting in self._delayed.values():
            yield waiting

    def _release_late(self, loop: asyncio.AbstractEventLoop) -> None:
        self._release_timer = None
        now = self._clock()
        late = [waiting for waiting in self._all_waiting() if waiting.until <= now]
        for lease in [lease for lease, (_, waiting) in self._delayed.items() if waiting.until <= now]:
            self._delayed.pop(lease)[0].cancel()
        self._waiting = deque(waiting for waiting in self._waiting if waiting.until > now)
        if late and now - self._reported_at >= REPORT_SECONDS:
            self._reported_at = now
            log.warning(
                "%d entries were released before their callbacks could run, because their leases were nearly over. Their outcomes"
                " are stored, and their callbacks run after the next claim. A callback takes %.2g s, and %d run at a time: raise"
                " callback_concurrency, or make the callbacks faster",
                len(late),
                self._pace.seconds_each,
                self._at_once,
            )
        self._release(late, "its callback has not run yet")
        first = min(self._all_waiting(), key=lambda waiting: waiting.until, default=None)
        if first is not None:
            self._watch_lease(first, loop)

    def _release(self, released: Iterable[Waiting], why: str) -> None:
        for waiting in released:
            self._ended(waiting, Result(False, release(waiting.end, why)))

    # --- the workers

    def _set_to_work(self, loop: asyncio.AbstractEventLoop) -> None:
        if len(self._workers) < self._at_once:
            self._workers[loop.create_task(self._work(loop))] = None

    async def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        workers, me = self._workers, asyncio.current_task()
        try:
            while self._waiting:
                waiting = self._waiting.popleft()
                self._at_work += 1
                work_on(waiting.entry)
                try:
                    result = await self._settle_one(waiting, loop)
                except asyncio.CancelledError:
                    self._waiting.appendleft(waiting)  # another event loop may continue
                    raise
                finally:
                    work_on(None)
                    self._at_work -= 1
                if result is not None:
                    self._ended(waiting, result)
        finally:
            if me is not None:
                workers.pop(me, None)

    async def _settle_one(self, waiting: Waiting, loop: asyncio.AbstractEventLoop) -> Result | None:
        """The result; None if it must be retried: the database is unavailable, or another transaction has locked a row."""
        if (missing := self._callbacks.missing(waiting.entry, waiting.end)) is not None:
            return Result(False, hand_over(waiting.end, missing))
        if self._trace is None:
            return await self._commit_one(waiting, loop)
        ended, traced = self._trace.callback(waiting.entry, waiting.trace_context), None
        try:
            result = await self._commit_one(waiting, loop)
            traced = _traced_as(result)
            return result
        finally:
            ended(traced)

    async def _commit_one(self, waiting: Waiting, loop: asyncio.AbstractEventLoop) -> Result | None:
        """Settle it in one transaction with what its callback writes."""
        entry, end, calls = waiting.entry, waiting.end, waiting.calls
        began = self._clock()
        try:
            settled = await self._store.settle_with(entry, end, calls)
        except CallbackFailed as failed:
            self._pace.measure(self._clock() - began)
            return self._keep_failed(entry, end, failed.what, failed.__cause__ or failed)
        except CallbacksChanged:
            await self._learn_patiently()
            self._try_later(waiting, loop)
            return None
        except Exception as error:
            is_locked = isinstance(error, NextIsLocked)
            if not (is_locked or is_passing(error)):  # the database refused what the callback wrote
                what = CallbackFailed.what if calls.ended is not None else CompletionFailed.what
                return self._keep_failed(entry, end, what, error)
            if not is_locked:
                self._away(error)
            self._try_later(waiting, loop)
            return None
        self._pace.measure(self._clock() - began)
        return Result(settled, is_lost=not settled)

    async def _learn_patiently(self) -> None:
        """Read the recorded callbacks again. If the database is unavailable, the next settlement causes another try."""
        try:
            self._callbacks.learn(await self._store.callbacks())
        except Exception as error:
            if not is_passing(error):
                raise

    def _try_later(self, waiting: Waiting, loop: asyncio.AbstractEventLoop) -> None:
        """Retry later: the outcome is known and must not be lost. When the database answers, the outcome is settled or stored."""
        first, most = STORE_RETRY_SECONDS
        seconds = min(first * 2 ** min(waiting.tries, 10), most) * (0.5 + self._rng.random() / 2)
        again = waiting._replace(tries=waiting.tries + 1)
        self._delayed[again.entry.lease] = loop.call_later(seconds, self._try_again, again, loop), again
        self._watch_lease(again, loop)

    def _try_again(self, waiting: Waiting, loop: asyncio.AbstractEventLoop) -> None:
        del self._delayed[waiting.entry.lease]
        self._waiting.append(waiting)
        self._set_to_work(loop)

    def _keep_failed(self, entry: ClaimedEntry, end: End, what: Where, problem: BaseException) -> Result:
        self._errors.report(what, problem, entry, text=problem.report if isinstance(problem, CallbackOverdue) else None)
        summary = problem.summary if isinstance(problem, CallbackOverdue) else f"raised {type(problem).__name__}"
        change = keep(entry, end, f"its {what} {summary}", self._rng.random())
        log.error(
            "entry %s (%s): its %s %s\nThe outcome is stored and nothing is sent again; the %s is tried again in %.1f s",
            entry.id,
            entry.operation,
            what,
            problem.report if isinstance(problem, CallbackOverdue) else f"raised {described(problem)}",
            what,
            change.delay.total_seconds(),
        )
        return Result(False, change)


def _traced_as(result: Result | None) -> str:
    """The result, as the span of a callback shows it."""
    if result is None:
        return "postponed"
    return "settled" if result.settled else "lost" if result.is_lost else "failed"


class CompletionWorker:
    """Reads the accepted requests page by page, and completes those whose entries have all ended.

    A request whose completion failed is skipped for a while. Only this process knows for how long.
    away: called with errors of the database, which are retried.
    """

    def __init__(
        self,
        store: Store,
        callbacks: Callbacks,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        away: Callable[[Exception], None],
        errors: ErrorReports,
    ) -> None:
        self._store = store
        self._callbacks = callbacks
        self._clock = clock
        self._rng = rng
        self._away = away
        self._errors = errors
        self._after: Accepted | None = None
        self._failed: dict[UUID, tuple[int, float]] = {}  # the number of failures, and until when to skip it
        self._unknown: set[str] = set()

    async def run_once(self) -> None:
        """Check every accepted request once. Raises what the database raises."""
        self._after = None
        await self._poll()
        while self._after is not None:
            await self._poll()

    async def pump(self, stopping: asyncio.Event) -> None:
        """Check a page at regular times until `stopping` is set. A completion that runs then is cancelled and rolled back."""
        if self._callbacks.complete_requests:
            await until_set(stopping, self._poll_repeatedly())

    async def _poll_repeatedly(self) -> None:
        while True:
            try:
                await self._poll()
            except Exception as error:
                self._away(error)
            await asyncio.sleep(COMPLETION_POLL_SECONDS * (0.5 + self._rng.random()))

    async def _poll(self) -> None:
        if not self._callbacks.complete_requests:
            return
        page = await self._store.accepted(self._after)
        self._after = page[-1] if len(page) == MAX_ACCEPTED else None
        for request in page:
            if not request.waits:
                await self._complete(request)

    async def _complete(self, request: Accepted) -> None:
        function = self._callbacks.find_completion(request.completion)
        if function is None:
            self._report_unknown(request)
            return
        tries, until = self._failed.get(request.id, (0, 0.0))
        if self._clock() < until:
            return
        try:
            await self._store.complete(request.id, function)
        except CallbackFailed as failed:
            self._report_failed(request, tries, failed.__cause__ or failed)
        except Exception as error:
            if is_passing(error):
                raise
            self._report_failed(request, tries, error)
        else:
            self._failed.pop(request.id, None)

    def _report_failed(self, request: Accepted, tries: int, problem: BaseException) -> None:
        first, most = COMPLETION_RETRY_SECONDS
        now = self._clock()
        self._failed = {
            id: failed for id, failed in self._failed.items() if now < failed[1] + most
        }  # forget old failures
        self._failed[request.id] = tries + 1, now + min(first * 2 ** min(tries, 10), most)
        log.error(
            "request %s: on_completed(%r) raised %s; it is called again later",
            request.id,
            request.completion,
            described(problem),
            extra={"request_id": str(request.id)},
        )
        self._errors.report("completion", problem, request_id=request.id)

    def _report_unknown(self, request: Accepted) -> None:
        if request.completion not in self._unknown:
            self._unknown.add(request.completion)
            completions = [name for kind, name in self._callbacks.names if kind == "on_completed"]
            log.warning(
                "request %s waits: this process has no on_completed(%r) registered%s",
                request.id,
                request.completion,
                did_you_mean(request.completion, completions),
                extra={"request_id": str(request.id)},
            )
