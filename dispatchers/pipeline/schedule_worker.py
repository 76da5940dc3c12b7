"""Enqueues what the schedules of the app have due. Any number of dispatchers do so at the same time, without a leader."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TypeAlias

from dispatchers.callbacks import CallbackFailed, CallbackOverdue
from dispatchers.operations import Operations
from dispatchers.periodic.instants import Skipped, TriggerFailed, due, ready_at, upcoming
from dispatchers.periodic.schedules import Schedule, Tick
from dispatchers.pipeline.wakeup import until_set
from dispatchers.store.protocol import Store
from dispatchers.store.records.schedules import ScheduleRow, ScheduleRows, read_next_instants, skip_to
from dispatchers.telemetry.errors import ErrorReports, described, named
from dispatchers.threads import is_async
from outbox.errors import ConfigurationError
from outbox.sql.errors.driver import CONFLICTS, is_passing, sqlstate

log = logging.getLogger("outbox.dispatcher")

CHECK_SECONDS = 10.0
"""Between two checks of what operators have decided, of what a crashed dispatcher has left, and of the database's clock."""

TRUST_SECONDS = 0.5  # between two checks, in this process, whether the database is trusted
LATE_SECONDS = 0.005  # after an instant, so that the clock of the database has certainly passed it
RETRY_SECONDS = (10.0, 300.0)
MAX_UPCOMING = 5  # instants of each schedule that a heartbeat shows


def merged_schedules(include: Iterable[Operations]) -> list[Schedule]:
    """The schedules of all `Operations`. Raises `ConfigurationError` for two of one name."""
    found: dict[str, Schedule] = {}
    for operations in include:
        for name, schedule in operations.schedules.items():
            if name in found:
                raise ConfigurationError(f"the schedule {name!r} is registered twice: give one of them another name")
            found[name] = schedule
    return list(found.values())


def _full_check_after(now: float) -> float:
    """When all schedules are checked next, by the process's clock. All at one time: one statement for all."""
    return (now // CHECK_SECONDS + 1) * CHECK_SECONDS


def first_async(schedules: Iterable[Schedule]) -> str | None:
    """The first schedule whose function is a coroutine function, if there is one."""
    return next((f"periodic({each.name!r})" for each in schedules if is_async(each.function)), None)


@dataclass(frozen=True, slots=True)
class _Failure:
    """tries: failures in a row. until: when it is tried again, by the process's clock. text: what has failed, for operators."""

    tries: int
    until: float
    text: str


Work: TypeAlias = Callable[[], Awaitable[bool]]
"""What is due of a schedule. Returns whether the schedule must be checked again at once."""


class ScheduleWorker:
    """Searches for due instants when the next one is due, and calls the functions of the schedules.

    Without schedules it does nothing. A schedule that fails or is slow does not stop the others.

    at_once: how many functions run at a time. clock: the process's clock, which measures only how long to sleep.
    may_enqueue: whether the database is trusted: a copy of it must not send reports. away: called with errors of the database,
    which are retried. skipped: called with a schedule's name and how many of its instants were skipped.
    """

    def __init__(
        self,
        store: Store,
        schedules: Collection[Schedule],
        *,
        at_once: int,
        clock: Callable[[], float],
        may_enqueue: Callable[[], bool],
        away: Callable[[Exception], None],
        skipped: Callable[[str, int], None],
        errors: ErrorReports,
    ) -> None:
        self._store = store
        self._schedules = list(schedules)
        self._rows = ScheduleRows(store.tables) if schedules else None
        self._at_once = at_once
        self._clock = clock
        self._may_enqueue = may_enqueue
        self._away = away
        self._skipped = skipped
        self._errors = errors
        self._failures: dict[tuple[str, bool], _Failure] = {}  # by schedule, and whether an operator has triggered it
        self._read_at: datetime | None = None  # by the database's clock
        self._upcoming: dict[str, list[datetime]] = {}
        self._waits: dict[str, tuple[datetime, datetime | None]] = {}  # the last instant, and when the next one is due
        self._check_at: dict[str, float] = {}  # by schedule, by the process's clock
        self._running: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._schedules)

    async def lags(self) -> dict[str, float]:
        """For how many seconds each of its schedules has been due."""
        now, found = await self._store.run(partial(read_next_instants, tables=self._store.tables))
        served = [each for each in self._schedules if each.name in found]
        due_at = {each.name: ready_at(each, at) if (at := found[each.name]) else now for each in served}
        return {name: max((now - at).total_seconds(), 0.0) for name, at in due_at.items()}

    def failing(self) -> dict[str, str]:
        """What has failed of each schedule that fails at present, for operators."""
        return {
            name: f"{each.text}, {each.tries} times in a row" if each.tries > 1 else each.text
            for (name, _), each in self._failures.items()
        }

    async def run_once(self) -> None:
        """Enqueue everything that is due now. Raises what the database raises, after the other schedules were served."""
        slots = self._begin()
        problems: list[BaseException] = []
        calls: list[Awaitable[None]] = []
        while await self._check(lambda schedule, work: calls.append(self._do(schedule, work, slots))) and calls:
            problems += filter(None, await asyncio.gather(*calls, return_exceptions=True))
            calls.clear()
        if problems:
            raise problems[0]

    def _begin(self) -> asyncio.Semaphore:
        """Check all schedules at first. Returns what the calls wait for."""
        self._check_at.clear()
        self._running.clear()  # a call that was cancelled before it began
        return asyncio.Semaphore(self._at_once)

    async def pump(self, stopping: asyncio.Event) -> None:
        """Enqueue what becomes due, until `stopping` is set. A function that runs then is cancelled and rolled back."""
        if self._schedules:
            await until_set(stopping, self._check_repeatedly())

    async def _check_repeatedly(self) -> None:
        slots, ended = self._begin(), asyncio.Event()

        async def do(schedule: Schedule, work: Work) -> None:
            try:
                await self._do(schedule, work, slots)
            except Exception as error:
                self._away(error)
            finally:
                ended.set()

        async with asyncio.TaskGroup() as calls:
            while True:
                ended.clear()
                try:
                    seconds = await self._check(lambda schedule, work: calls.create_task(do(schedule, work)))
                except Exception as error:
                    self._away(error)
                    seconds = CHECK_SECONDS
                # Not `wait_for`: before Python 3.12 it loses a cancellation that comes while `ended` is set.
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await ended.wait()

    def upcoming(self) -> dict[str, list[str]]:
        """The next instants of each schedule, as ISO 8601, by the database's clock; none before it was read."""
        if self._read_at is None:
            return {}
        for each in self._schedules:
            if (known := self._upcoming.get(each.name)) is None or (known and known[0] <= self._read_at):
                with suppress(TriggerFailed):  # `failing` names it
                    self._upcoming[each.name] = upcoming(each.trigger, self._read_at, MAX_UPCOMING)
        return {
            each.name: [at.astimezone(each.zone).isoformat() for at in self._upcoming.get(each.name, ())]
            for each in self._schedules
        }

    async def _check(self, start: Callable[[Schedule, Work], object]) -> float:
        """Start what is due. Returns the seconds until the next check."""
        if self._rows is None:
            return CHECK_SECONDS
        if not self._may_enqueue():
            return TRUST_SECONDS
        began = self._clock()
        every = _full_check_after(began)
        idle = [each for each in self._schedules if each.name not in self._running]
        if ready := [each for each in idle if self._check_at.get(each.name, began) <= began]:
            now, rows = await self._store.run(partial(self._rows.read, schedules=ready))
            self._read_at = now
            for each in ready:
                found = self._next(each, rows[each.name], now)
                if callable(found):
                    self._running.add(each.name)
                    start(each, found)
                else:
                    self._check_at[each.name] = min(began + found + LATE_SECONDS, every)
                await asyncio.sleep(0)  # a thousand schedules, or a long downtime, must not block the event loop
        waits = [self._check_at.get(each.name, began) for each in self._schedules if each.name not in self._running]
        return max(LATE_SECONDS, min([every, *waits]) - self._clock())

    async def _do(self, schedule: Schedule, work: Work, slots: asyncio.Semaphore) -> None:
        """Do what is due of a schedule."""
        more_is_due = False
        try:
            async with slots:
                more_is_due = await work()
        finally:
            self._running.discard(schedule.name)
            now = self._clock()
            self._check_at[schedule.name] = now if more_is_due else _full_check_after(now)

    def _next(self, schedule: Schedule, row: ScheduleRow, now: datetime) -> Work | float:
        """What must be done now, or the seconds until the schedule must be checked again."""
        if not row.is_ours:
            return math.inf
        if row.triggered_at is None:
            self._failures.pop((schedule.name, True), None)
        elif not self._seconds_left(schedule, is_manual=True):
            return partial(self._call, schedule, schedule.tick(row.triggered_at, row.triggered_by))
        if row.paused:
            return math.inf
        if left := self._seconds_left(schedule):
            return left
        last, due_at = self._waits.get(schedule.name, (None, None))
        if last != row.enqueued_to or (due_at is not None and due_at <= now):
            try:
                if row.problem is not None:
                    raise row.problem
                found = due(schedule, row.enqueued_to, now)
            except TriggerFailed as failed:
                return self._report_failed(schedule, None, failed.__cause__ or failed)
            if found.instants:
                return partial(self._call, schedule, schedule.tick(found.instants[0]), found.skipped)
            if found.skipped is not None:
                return partial(self._skip, schedule, row.enqueued_to, found.skipped)
            self._waits[schedule.name] = row.enqueued_to, (due_at := found.wake_at)
            self._failures.pop((schedule.name, False), None)  # nothing of it is due any more
        return math.inf if due_at is None else float((due_at - now).total_seconds())

    def _seconds_left(self, schedule: Schedule, *, is_manual: bool = False) -> float:
        """How long the schedule is left alone after a failure."""
        failure = self._failures.get((schedule.name, is_manual))
        return 0.0 if failure is None else max(0.0, failure.until - self._clock())

    async def _call(self, schedule: Schedule, tick: Tick, skipped: Skipped | None = None) -> bool:
        """Call the schedule's function. Returns whether the schedule must be checked again at once."""
        is_manual = tick.actor is not None
        try:
            recorded = await self._store.call_schedule(schedule, tick)
        except CallbackFailed as failed:
            self._report_failed(schedule, tick, failed.__cause__ or failed)
            return is_manual  # an instant may be due too
        except Exception as error:
            if sqlstate(getattr(error, "orig", None)) in CONFLICTS:
                return False  # another dispatcher has recorded it, or does so now
            if is_passing(error):
                raise
            self._report_failed(schedule, tick, error)
            return is_manual
        self._failures.pop((schedule.name, is_manual), None)
        if recorded:
            by = "" if tick.actor is None else f" (triggered by {tick.actor})"
            log.info("schedule %r: enqueued %s%s", schedule.name, tick.at.isoformat(), by)
            self._report_skipped(schedule, skipped)
        return recorded

    async def _skip(self, schedule: Schedule, read: datetime, skipped: Skipped) -> bool:
        skip = partial(skip_to, tables=self._store.tables, schedule=schedule, read=read, last=skipped.last)
        is_skipped = await self._store.run(skip)
        if is_skipped:
            self._report_skipped(schedule, skipped)
        return is_skipped

    def _report_skipped(self, schedule: Schedule, skipped: Skipped | None) -> None:
        """By the dispatcher that has recorded it: each instant is counted once."""
        if skipped is None:
            return
        self._skipped(schedule.name, skipped.number)
        log.warning(
            "schedule %r: skipped %s instants that were missed, from %s to %s (catch_up=%r)",
            schedule.name,
            skipped.number if skipped.is_exact else f"more than {skipped.number}",
            skipped.first.isoformat(),
            skipped.last.isoformat(),
            schedule.catch_up,
        )

    def _report_failed(self, schedule: Schedule, tick: Tick | None, problem: BaseException) -> float:
        """tick: whose function has failed; None: the trigger has. Returns the seconds until it is tried again."""
        first, most = RETRY_SECONDS
        key = schedule.name, tick is not None and tick.actor is not None
        before = self._failures.get(key)
        tries = 1 if before is None else before.tries + 1
        seconds = min(first * 2.0 ** min(tries - 1, 10), most)
        text = problem.report if isinstance(problem, CallbackOverdue) else None
        if tick is None:
            at, what, again = "", "trigger", "Its next instants are unknown; the trigger is asked"
        else:
            at, what, again = f" at {tick.at.isoformat()}", "function", "Nothing of it was written; it is called"
        short = f"its {what} {'timed out' if text else f'raised {named(problem)}'}"
        self._failures[key] = _Failure(tries, self._clock() + seconds, short)
        log.error(
            "schedule %r%s: its %s %s\n%s again in %.0f s",
            schedule.name,
            at,
            what,
            text or f"raised {described(problem)}",
            again,
            seconds,
        )
        self._errors.report("schedule", problem, text=text)
        return seconds
