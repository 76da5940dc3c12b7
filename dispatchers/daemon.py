"""The process: signals, drain, the timetable. The only part that knows about time as such."""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from apscheduler.schedulers.asyncio import AsyncIOScheduler

from dispatchers.claims import Claims
from dispatchers.dispatcher import Dispatcher
from dispatchers.upkeep import Upkeep, keep_bodies, report_gauges, report_lag, retain

log = logging.getLogger("outbox.daemon")

GAUGES_SECONDS = 60
RECONCILE_SECONDS = 60
RETENTION_SECONDS = 120
BODIES_SECONDS = 600
RETENTION_JITTER_SECONDS = 30  # so that a fleet that was deployed at once does not do it at once
COLLECTOR_THRESHOLD = 10_000  # objects that can be in a cycle, made and not yet gone; Python's own is 700, later 2000
SWITCH_SECONDS = 0.0002  # how long one of Python's threads runs on while another waits; Python's own is 0.005
SETTLE_SECONDS = 2.0  # after a second signal
CLOSE_SECONDS = 2.0  # for connections, which a database that has vanished would never let go
LATE_SECONDS = 5.0  # after the grace, a drain has ended unless the database does not answer
STOPPED_AT_ONCE = 1  # the exit status then


def run(dispatcher: Dispatcher) -> None:
    """Work until SIGTERM or Ctrl-C, then drain; a second signal stops at once and leaves leases to expire.

    So does a database that has not answered by the end of the grace.
    """
    try:
        asyncio.run(serve(dispatcher))
    except asyncio.CancelledError:
        log.warning("stopped at once")
        logging.shutdown()
        os._exit(STOPPED_AT_ONCE)  # a thread that waits for a hung database would keep the process


async def serve(dispatcher: Dispatcher) -> None:
    """The same on a running event loop, whose signal handlers it takes over."""
    stopping = asyncio.Event()
    _listen(dispatcher, stopping)
    timetable = _timetable(dispatcher, stopping)
    await dispatcher.check()
    timetable.start()
    tune_interpreter()
    log.info("sending")
    try:
        await dispatcher.pump(stopping)
    finally:
        timetable.shutdown(wait=False)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await dispatcher.close()
    log.info("stopped")


def tune_interpreter() -> None:
    """What a process that does nothing but dispatch asks of Python.

    The collector of cycles leaves alone what is loaded by now, and comes seldom, as a dispatcher makes next to no cycles: each
    full collection would walk all that is loaded, and draining would take 4 to 8 % longer.
    Threads take turns often: the one that has an answer of the database goes on at once, not when others have sent all they have.
    """
    gc.freeze()
    gc.set_threshold(COLLECTOR_THRESHOLD, *gc.get_threshold()[1:])
    sys.setswitchinterval(SWITCH_SECONDS)


def _listen(dispatcher: Dispatcher, stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    serving = asyncio.current_task()
    abandoning: set[asyncio.Task[None]] = set()

    def stop(number: signal.Signals) -> None:
        if stopping.is_set():
            log.warning("%s again: stopping at once; what is in flight will be in doubt", number.name)
            abandoning.add(loop.create_task(_abandon(dispatcher, serving)))
        else:
            log.info("%s: finishing what is in flight, for %s at most", number.name, dispatcher.grace)
            stopping.set()
            abandoning.add(loop.create_task(_abandon_late(dispatcher, serving)))

    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):  # Windows has no such handlers: Ctrl-C then ends the process
            loop.add_signal_handler(number, stop, number)


async def _abandon_late(dispatcher: Dispatcher, serving: asyncio.Task[Any] | None) -> None:
    """An exchange with a database that has vanished without a word would keep the drain from beginning."""
    await asyncio.sleep(dispatcher.grace.total_seconds() + LATE_SECONDS)
    log.warning("the grace is over and the database does not answer: stopping; what is in flight will be in doubt")
    await _abandon(dispatcher, serving)


async def _abandon(dispatcher: Dispatcher, serving: asyncio.Task[Any] | None) -> None:
    await dispatcher.abandon()
    # What did come back is settled, if the database answers at all.
    if serving is not None and not (await asyncio.wait([serving], timeout=SETTLE_SECONDS))[0]:
        serving.cancel()


def _timetable(dispatcher: Dispatcher, stopping: asyncio.Event) -> AsyncIOScheduler:
    """Gauges, looks, retention and the bodies' partitions."""
    timetable = AsyncIOScheduler(timezone="UTC")

    def add(work: Callable[..., Awaitable[Any]], *arguments: Any, seconds: int, jitter: int | None = None) -> None:
        timetable.add_job(
            _patiently,
            "interval",
            [work, *arguments],
            seconds=seconds,
            jitter=jitter,
            coalesce=True,
            max_instances=1,
        )

    add(report_gauges, dispatcher.store, seconds=GAUGES_SECONDS)
    add(dispatcher.reconcile, seconds=RECONCILE_SECONDS)
    if isinstance(dispatcher.store, Claims):  # a simulation's store has no tables
        run, tables = dispatcher.store.run, dispatcher.store.tables
        add(report_lag, run, tables, seconds=GAUGES_SECONDS)
        upkeep = Upkeep(run, tables, dispatcher.retention)
        add(retain, upkeep, stopping, seconds=RETENTION_SECONDS, jitter=RETENTION_JITTER_SECONDS)
        run_apart = dispatcher.store.run_apart
        add(keep_bodies, run, run_apart, tables, seconds=BODIES_SECONDS, jitter=RETENTION_JITTER_SECONDS)
    return timetable


async def _patiently(work: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
    """Do what the timetable asks for. What fails is reported, and done at its next time."""
    name = getattr(work, "__name__", type(work).__name__)
    try:
        await work(*arguments)
    except asyncio.CancelledError:
        log.info("%s was left for the next process", name)  # the timetable is shut down: nobody waits for this
    except Exception as error:
        # Not the error's text: it shows the statement's parameters.
        log.warning("%s failed, and will be tried again: %s", name, type(error).__name__)
