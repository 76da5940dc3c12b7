"""Events of which a loop awaits the first one, without a task for each: an idle dispatcher awaits several for every entry."""

import asyncio
import math
from typing import Any


class Signal(asyncio.Event):
    """An event that also ends the waits of `first_signal`."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[asyncio.Future[Any], None] = {}  # in the order in which they began to wait

    def set(self) -> None:
        if not self.is_set():  # else it has ended all waits already
            super().set()
            for each in self.waiting:
                _end(each)


async def first_signal(*signals: Signal, seconds: float) -> None:
    """Wait until one of the signals is set, at most `seconds`, which may be infinity."""
    if any(signal.is_set() for signal in signals):
        await asyncio.sleep(0)  # other tasks run also in a loop that finds a signal each time
        return
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[Any] = loop.create_future()
    timer = None if seconds == math.inf else loop.call_later(seconds, _end, woken)
    for signal in signals:
        signal.waiting[woken] = None
    try:
        await woken
    finally:
        if timer is not None:
            timer.cancel()
        for signal in signals:
            del signal.waiting[woken]


def _end(waiting: "asyncio.Future[Any]") -> None:
    if not waiting.done():
        waiting.set_result(None)
