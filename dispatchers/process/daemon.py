"""The dispatcher's process: signals, drain, and the schedule of its maintenance."""

import asyncio
import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, Protocol

from apscheduler.schedulers.asyncio import AsyncIOScheduler

from dispatchers.maintenance.audit_log import forget_old_decisions
from dispatchers.maintenance.jobs import Maintenance, forget_dead_dispatchers, keep_bodies, retain
from dispatchers.process.dispatcher_work import DispatcherWork
from dispatchers.process.supervisor import Supervisor, supervised, supervisor_of
from dispatchers.store.connections.outage_log import cause_of, ends_by_itself, is_outage
from dispatchers.telemetry.http_server import HttpServer

log = logging.getLogger("outbox.daemon")

BACKLOG_SECONDS = 60
RECONCILE_SECONDS = 60
RETENTION_SECONDS = 120
BODIES_SECONDS = 600
RETENTION_JITTER_SECONDS = 30  # so that processes deployed together do not delete at the same time
COLLECTOR_THRESHOLD = 10_000  # new objects before a collection of cycles; Python's default is 700, later 2000
SWITCH_SECONDS = 0.0002  # how long a thread keeps Python's lock while another waits; Python's default is 0.005
REPEAT_SECONDS = 0.5  # timeout(1) and some supervisors send each signal twice: to the process, and to its group
SETTLE_SECONDS = 2.0  # after a second signal, to store the outcomes that are known
CHECK_SECONDS = (
    0.2,
    5.0,
)  # between two checks of a database that is unavailable at the start: the first value, then doubled up to the second
CLOSE_SECONDS = 2.0  # for closing connections, which an unreachable database would block without end
LATE_SECONDS = 5.0  # after the grace period; a drain that takes longer waits for the database
STOPPED_AT_ONCE = 1  # exit status of a process that stopped without draining
SIGNALS = (signal.SIGTERM, signal.SIGINT)

Handler = Callable[[int, FrameType | None], None]


class Process(Protocol):
    """A dispatcher or a fleet, which signals stop.

    grace: how long its drain waits for the sends in flight. unready: why it sends nothing; None if it is ready.
    """

    grace: timedelta

    @property
    def unready(self) -> str | None: ...

    async def abandon(self) -> None: ...


class Stop(Protocol):
    """The state of a stop.

    stopping: set when the drain begins. cut_short: whether the drain was given up; the leases of the sends in flight expire.
    """

    stopping: asyncio.Event

    @property
    def cut_short(self) -> bool: ...


def run(dispatcher: DispatcherWork, server: HttpServer | None = None) -> None:
    """Run the process of one dispatcher: see `run_process`."""
    run_process(dispatcher, partial(work_on, dispatcher), server)


def run_process(
    process: Process, work: Callable[[Stop], Coroutine[Any, Any, None]], server: HttpServer | None = None
) -> None:
    """Work until SIGTERM or Ctrl-C, then drain. A second signal ends the process at once with exit status 1, and so does a
    database that has not answered when the grace period is over. The leases of sends in flight then expire.

    The process keeps both signals until it has exited: a signal after the drain also ends it with 1. It reports to systemd, if
    that has started it and waits for reports.
    """
    atexit.register(_ignore_signals)
    with tuned_interpreter():
        serving = _serve(
            process, work, lambda number, frame: os._exit(STOPPED_AT_ONCE), server, supervisor_of(os.environ)
        )
        is_drained = asyncio.run(serving)
    if not is_drained:
        log.warning("stopped without draining: entries in flight stay in doubt until their leases expire")
        logging.shutdown()
        os._exit(STOPPED_AT_ONCE)  # a thread that waits for a hung database would keep the process


async def serve(dispatcher: DispatcherWork) -> bool:
    """Serve one dispatcher: see `serve_process`."""
    return await serve_process(dispatcher, partial(work_on, dispatcher))


async def serve_process(process: Process, work: Callable[[Stop], Coroutine[Any, Any, None]]) -> bool:
    """Work on a running event loop: see `Dispatcher.serve`."""
    return await _serve(process, work)


async def _serve(
    process: Process,
    work: Callable[[Stop], Coroutine[Any, Any, None]],
    afterwards: Handler | None = None,
    server: HttpServer | None = None,
    supervisor: Supervisor | None = None,
) -> bool:
    if server is not None:
        await server.start()
    signals = Signals(process)
    signals.listen(afterwards)
    try:
        async with supervised(supervisor, lambda: process.unready, signals.stopping):
            await signals.guard(work(signals))
    finally:
        signals.close()
        if server is not None:
            server.close()
    if not signals.cut_short:
        log.info("stopped")
    return not signals.cut_short


def _ignore_signals() -> None:
    """Ignore signals: at its exit Python restores the default handlers, which kill the process, but keeps an ignored signal."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


async def work_on(dispatcher: DispatcherWork, stop: Stop) -> None:
    """Work on one database, with its maintenance, until `stop.stopping` is set."""
    await _check_patiently(dispatcher, stop.stopping)
    if stop.stopping.is_set():
        return
    schedule = _schedule(dispatcher, stop.stopping)
    schedule.start()
    log.info("started: %s", dispatcher.described)
    try:
        async with dispatcher.heartbeats.running():
            await dispatcher.pump(stop.stopping)
    finally:
        schedule.shutdown(wait=False)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                if not stop.cut_short:
                    await dispatcher.heartbeats.leave()
                await dispatcher.close()


async def _check_patiently(dispatcher: DispatcherWork, stopping: asyncio.Event) -> None:
    """Check the database, or wait until it answers: when a cluster starts, any of its parts may come first.

    Raises errors that waiting does not end: a refused password, a database that does not exist, missing tables.
    """
    first, most = CHECK_SECONDS
    tries = 0
    while not stopping.is_set():
        try:
            await dispatcher.require_usable()
        except Exception as error:
            if not ends_by_itself(error):
                raise
            dispatcher.outages.failed(error)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), min(first * 2 ** min(tries, 10), most))
            tries += 1
        else:
            dispatcher.outages.answered()
            return


@contextmanager
def tuned_interpreter() -> Iterator[None]:
    """Tune Python for a process that only dispatches, until the end of the block.

    The garbage collector runs seldom and skips the objects that exist now. A dispatcher makes hardly any cycles, and full
    collections would make draining 4 to 8 % slower.
    Threads switch often, so that the thread that receives a database answer continues immediately.
    """
    thresholds, seconds = gc.get_threshold(), sys.getswitchinterval()
    gc.freeze()
    gc.set_threshold(COLLECTOR_THRESHOLD, *thresholds[1:])
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(seconds)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


class Signals:
    """Handles SIGTERM and SIGINT of a running process: the first signal starts the drain, a second one stops it immediately.

    A signal within `REPEAT_SECONDS` of the first is taken for its repetition, and changes nothing.

    stopping, cut_short: see `Stop`.
    """

    def __init__(self, process: Process) -> None:
        self.stopping = asyncio.Event()
        self.cut_short = False
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # a signal interrupts any task; its log lines must not carry that task's context
        self._working: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._abandoning: set[asyncio.Task[None]] = set()
        self._afterwards: dict[signal.Signals, Any] = {}
        self._passes_on = False
        self._stopping_since = 0.0

    def listen(self, afterwards: Handler | None = None) -> None:
        """Handle both signals. afterwards: their handler after `close`; None restores the present handlers.

        A present handler of the program for SIGTERM, such as a web server's, is called too; otherwise the server would never end.
        asyncio's own handler, which exists for SIGINT only, is not called: it would cancel the caller.
        """
        self._passes_on = afterwards is None and callable(signal.getsignal(signal.SIGTERM))
        for number in SIGNALS:
            self._afterwards[number] = afterwards or signal.getsignal(number)
            self._loop.remove_signal_handler(number)  # the loop would call it as well
            # Not `add_signal_handler`: its removal sets the default for a moment, which kills the process.
            signal.signal(number, self._hear)

    def close(self) -> None:
        """Restore the handlers, and cancel the tasks that wait to abandon the work."""
        for number, handler in self._afterwards.items():
            if handler is not None:  # None: the handler was not set by Python
                signal.signal(number, handler)
        for task in self._abandoning:
            task.cancel()

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`. It is cancelled if it does not end soon after it was abandoned."""
        self._working = self._loop.create_task(work)
        try:
            await self._working
        except asyncio.CancelledError:
            if not self._is_cancelled:  # the caller has cancelled it
                raise

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop, signal.Signals(number), context=self._context)
        if self._passes_on:
            self._afterwards[signal.Signals(number)](number, frame)

    def _stop(self, number: signal.Signals) -> None:
        if self.stopping.is_set():
            if self._loop.time() < self._stopping_since + REPEAT_SECONDS:
                return
            log.warning("second %s: stopping at once; entries in flight will be in doubt", number.name)
            self.cut_short = True
            self._abandoning.add(self._loop.create_task(self._abandon()))
        else:
            self._stopping_since = self._loop.time()
            log.info("%s: draining; sends in flight have %s to finish", number.name, self._process.grace)
            self.stopping.set()
            self._abandoning.add(self._loop.create_task(self._abandon_late()))

    async def _abandon_late(self) -> None:
        """Abandon the drain when its time is over: an unreachable database would block it."""
        await asyncio.sleep(self._process.grace.total_seconds() + LATE_SECONDS)
        log.warning("grace period over and the database does not answer: stopping; entries in flight will be in doubt")
        self.cut_short = True
        await self._abandon()

    async def _abandon(self) -> None:
        await self._process.abandon()
        # The outcomes that are known are settled, if the database answers.
        working = self._working
        if working is not None and not (await asyncio.wait([working], timeout=SETTLE_SECONDS))[0]:
            self._is_cancelled = True
            working.cancel()


def _schedule(dispatcher: DispatcherWork, stopping: asyncio.Event) -> AsyncIOScheduler:
    schedule = AsyncIOScheduler(timezone="UTC")

    def add(work: Callable[..., Awaitable[Any]], *arguments: Any, seconds: int, jitter: int | None = None) -> None:
        schedule.add_job(
            partial(_patiently, dispatcher),
            "interval",
            [work, *arguments],
            seconds=seconds,
            jitter=jitter,
            coalesce=True,
            max_instances=1,
        )

    # It runs once, at the start, also if the event loop is late.
    schedule.add_job(partial(_patiently, dispatcher), args=[dispatcher.report_server], misfire_grace_time=None)
    add(dispatcher.report_backlog, seconds=BACKLOG_SECONDS)
    add(dispatcher.reconcile, seconds=RECONCILE_SECONDS)
    store, tables = dispatcher.store, dispatcher.store.tables
    maintenance = Maintenance(store.run, tables, dispatcher.retention)
    add(retain, maintenance, stopping, seconds=RETENTION_SECONDS, jitter=RETENTION_JITTER_SECONDS)
    add(forget_dead_dispatchers, store.run, tables, seconds=RETENTION_SECONDS, jitter=RETENTION_JITTER_SECONDS)
    add(forget_old_decisions, store.run, tables, seconds=RETENTION_SECONDS, jitter=RETENTION_JITTER_SECONDS)
    add(keep_bodies, store.run, store.run_apart, tables, seconds=BODIES_SECONDS, jitter=RETENTION_JITTER_SECONDS)
    return schedule


async def _patiently(dispatcher: DispatcherWork, work: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
    """Run one scheduled job. A failure is logged, and the job runs again at its next time."""
    name = getattr(work, "__name__", type(work).__name__)
    try:
        await work(*arguments)
    except asyncio.CancelledError:
        log.info("job %s cancelled by shutdown; the next process runs it", name)  # nothing awaits this job
    except Exception as error:
        if is_outage(error):
            dispatcher.outages.failed(error)
        else:  # not the error's text: it shows the statement's parameters
            log.warning("job %s failed and will run again at its next time: %s", name, cause_of(error))
            dispatcher.errors.report("job", error)
