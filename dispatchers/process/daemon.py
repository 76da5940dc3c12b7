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
from dispatchers.store.connections.outage_log import cause_of, ends_by_itself, is_outage
from dispatchers.telemetry.http_server import HttpServer

log = logging.getLogger("outbox.daemon")

BACKLOG_SECONDS = 60
RECONCILE_SECONDS = 60
RETENTION_SECONDS = 120
BODIES_SECONDS = 600
RETENTION_JITTER_SECONDS = 30  # so that a fleet that was deployed at once does not do it at once
COLLECTOR_THRESHOLD = 10_000  # objects that can be in a cycle, made and not yet gone; Python's own is 700, later 2000
SWITCH_SECONDS = 0.0002  # how long one of Python's threads runs on while another waits; Python's own is 0.005
SETTLE_SECONDS = 2.0  # after a second signal
CHECK_SECONDS = (
    0.2,
    5.0,
)  # until a database that is unavailable at the start is asked again, doubling up to the second
CLOSE_SECONDS = 2.0  # for connections, which an unreachable database would never release
LATE_SECONDS = 5.0  # after the grace, a drain has ended unless the database does not answer
STOPPED_AT_ONCE = 1  # the exit status then
SIGNALS = (signal.SIGTERM, signal.SIGINT)

Handler = Callable[[int, FrameType | None], None]


class Process(Protocol):
    """What signals stop. grace: how long its drain waits for the sends in flight."""

    grace: timedelta

    async def abandon(self) -> None: ...


class Stop(Protocol):
    """stopping: set when the drain begins. cut_short: whether the entries in flight are left to their leases."""

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

    The process keeps both signals until it has exited: a signal after the drain also ends it with 1.
    """
    atexit.register(_ignore_signals)
    with tuned_interpreter():
        serving = _serve(process, work, lambda number, frame: os._exit(STOPPED_AT_ONCE), server)
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
) -> bool:
    if server is not None:
        await server.start()
    signals = Signals(process)
    signals.listen(afterwards)
    try:
        await signals.guard(work(signals))
    finally:
        signals.close()
        if server is not None:
            server.close()
    if not signals.cut_short:
        log.info("stopped")
    return not signals.cut_short


def _ignore_signals() -> None:
    """At its end Python replaces its own handlers by the default, which kills the process. An ignored signal stays ignored."""
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
    """What a process that does nothing but dispatch asks of Python, until the end of the block.

    The collector of cycles leaves alone what is loaded by now, and comes seldom, as a dispatcher makes next to no cycles: each
    full collection would walk all that is loaded, and draining would take 4 to 8 % longer.
    Threads switch often, so that the thread with a database answer continues at once.
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
    """What SIGTERM and SIGINT do to a running dispatcher: the first starts the drain, a second stops it at once.

    stopping: set by the first. cut_short: whether the entries in flight were left to their leases.
    """

    def __init__(self, process: Process) -> None:
        self.stopping = asyncio.Event()
        self.cut_short = False
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # a signal comes while any task runs, and its log lines are not about that one
        self._working: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._abandoning: set[asyncio.Task[None]] = set()
        self._afterwards: dict[signal.Signals, Any] = {}
        self._passes_on = False

    def listen(self, afterwards: Handler | None = None) -> None:
        """Take the two signals. `afterwards` is their handler once we are closed; None is the one that they have now.

        If that is the program's own for SIGTERM, as in a web server, it is called as well, or the server would never end. The
        event loop has one of its own for SIGINT alone, which would cancel the caller.
        """
        self._passes_on = afterwards is None and callable(signal.getsignal(signal.SIGTERM))
        for number in SIGNALS:
            self._afterwards[number] = afterwards or signal.getsignal(number)
            self._loop.remove_signal_handler(number)  # the loop would call it beside ours
            # Not `add_signal_handler`: to remove that is to have the system's default for a moment, which kills.
            signal.signal(number, self._hear)

    def close(self) -> None:
        """Give the signals back, and end what was waiting to abandon the dispatcher."""
        for number, handler in self._afterwards.items():
            if handler is not None:  # None: it was set by something else than Python
                signal.signal(number, handler)
        for task in self._abandoning:
            task.cancel()

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`, which is cancelled if it does not end by itself once it is abandoned."""
        self._working = self._loop.create_task(work)
        try:
            await self._working
        except asyncio.CancelledError:
            if not self._is_cancelled:  # by the caller
                raise

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop, signal.Signals(number), context=self._context)
        if self._passes_on:
            self._afterwards[signal.Signals(number)](number, frame)

    def _stop(self, number: signal.Signals) -> None:
        if self.stopping.is_set():
            log.warning("second %s: stopping at once; entries in flight will be in doubt", number.name)
            self.cut_short = True
            self._abandoning.add(self._loop.create_task(self._abandon()))
        else:
            log.info("%s: draining; sends in flight have %s to finish", number.name, self._process.grace)
            self.stopping.set()
            self._abandoning.add(self._loop.create_task(self._abandon_late()))

    async def _abandon_late(self) -> None:
        """Abandon the drain when its time is over: an exchange with an unreachable database would block it."""
        await asyncio.sleep(self._process.grace.total_seconds() + LATE_SECONDS)
        log.warning("grace period over and the database does not answer: stopping; entries in flight will be in doubt")
        self.cut_short = True
        await self._abandon()

    async def _abandon(self) -> None:
        await self._process.abandon()
        # What did come back is settled, if the database answers at all.
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

    # Once and at once, however busy the process is then
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
        log.info("job %s cancelled by shutdown; the next process runs it", name)  # nothing awaits it any more
    except Exception as error:
        if is_outage(error):
            dispatcher.outages.failed(error)
        else:  # not the error's text: it shows the statement's parameters
            log.warning("job %s failed and will run again at its next time: %s", name, cause_of(error))
            dispatcher.errors.report("job", error)
