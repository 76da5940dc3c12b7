"""The process: signals, drain, the timetable. The only part that knows about time as such."""

import asyncio
import gc
import logging
import os
import signal
from contextlib import suppress
from typing import Any

from apscheduler.schedulers.asyncio import AsyncIOScheduler

from dispatchers.dispatcher import Dispatcher
from dispatchers.upkeep import report_gauges

log = logging.getLogger("outbox.daemon")

GAUGES_SECONDS = 60
SETTLE_SECONDS = 2.0  # after a second signal
STOPPED_AT_ONCE = 1  # the exit status then


def run(dispatcher: Dispatcher) -> None:
    """Work until SIGTERM or Ctrl-C, then drain; a second signal stops at once and leaves leases to expire."""
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
    await dispatcher.check()
    timetable = _timetable(dispatcher)
    timetable.start()
    gc.freeze()  # what has been loaded by now stays: without it, each full collection walks all of it again
    log.info("sending")
    try:
        await dispatcher.pump(stopping)
    finally:
        timetable.shutdown(wait=False)
        await dispatcher.close()
    log.info("stopped")


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

    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):  # Windows has no such handlers: Ctrl-C then ends the process
            loop.add_signal_handler(number, stop, number)


async def _abandon(dispatcher: Dispatcher, serving: asyncio.Task[Any] | None) -> None:
    await dispatcher.abandon()
    # What did come back is settled, if the database answers at all.
    if serving is not None and not (await asyncio.wait([serving], timeout=SETTLE_SECONDS))[0]:
        serving.cancel()


def _timetable(dispatcher: Dispatcher) -> AsyncIOScheduler:
    timetable = AsyncIOScheduler(timezone="UTC")
    timetable.add_job(
        report_gauges,
        "interval",
        [dispatcher.store],
        seconds=GAUGES_SECONDS,
        coalesce=True,
        max_instances=1,
    )
    return timetable
