"""An event loop in a thread of its own, in which sync code runs coroutines."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines for a sync test, and for an async one, whose own loop waits meanwhile. The thread starts at the first."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return what the coroutine returns, and raise what it raises. All that run here have the same loop."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="outbox-testing", daemon=True)
            self._thread.start()
        loop, _ = self._started.result()
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    def close(self) -> None:
        """End the loop. What still runs in it is cancelled."""
        if self._thread is not None:
            loop, stopped = self._started.result()
            loop.call_soon_threadsafe(stopped.set)
            self._thread.join()

    def _serve(self) -> None:
        async def main() -> None:
            stopped = asyncio.Event()
            self._started.set_result((asyncio.get_running_loop(), stopped))
            await stopped.wait()

        asyncio.run(main())
