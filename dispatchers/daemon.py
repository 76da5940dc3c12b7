"""The process: signals, drain, the timetable. The only part that knows about time as such."""

import asyncio
import gc
import logging
import signal
from contextlib import suppress

from apscheduler.schedulers.asyncio import AsyncIOScheduler

from dispatchers.dispatcher import Dispatcher
from dispatchers.upkeep import report_gauges

log = logging.getLogger("outbox.daemon")

GAUGES_SECONDS = 60


def run(dispatcher: Dispatcher) -> None:
    """Work until SIGTERM or Ctrl-C, then drain; a second signal stops at once and leaves leases to expire."""
    asyncio.run(serve(dispatcher))


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
    abandoning: set[asyncio.Task[None]] = set()

    def stop(number: signal.Signals) -> None:
        if stopping.is_set():
            log.warning("%s again: stopping at once; what is in flight will be in doubt", number.name)
            abandoning.add(loop.create_task(dispatcher.abandon()))
        else:
            log.info("%s: finishing what is in flight, for %s at most", number.name, dispatcher.grace)
            stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):  # Windows has no such handlers: Ctrl-C then ends the process
            loop.add_signal_handler(number, stop, number)


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
