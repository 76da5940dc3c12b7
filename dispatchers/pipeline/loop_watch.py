"""Notices on a thread of its own that the event loop is blocked, and then releases what this process has claimed and not begun.

The thread asks the event loop each second for a sign of life. It cannot notice a block that keeps Python's lock.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

from dispatchers.pipeline.activity_log import ActivityLog
from dispatchers.pipeline.claim_loops import ClaimLoops
from dispatchers.pipeline.unstarted import BLOCKED, Taken
from dispatchers.store.protocol import Store

log = logging.getLogger("outbox.dispatcher")

ASK_SECONDS = 1.0  # between two signs of life, and between two releases while the event loop is blocked
BLOCKED_SECONDS = (1.0, 5.0)
"""A quarter of the lease, within these bounds: so long the event loop may be blocked. Then there is time for the releases."""
FRAMES_MAX = 3


class Doing(NamedTuple):
    """What the event loop executes. operation: None if that is no send of this dispatcher. place: file, line and function."""

    destination: str | None
    operation: str | None
    place: str

    @property
    def text(self) -> str:
        return (f"operation {self.operation!r}" if self.operation else "code that is no send") + f", at {self.place}"


class LoopWatch:
    """loops: those that claim and send. store: releases leases on a connection of its own; None to watch nothing."""

    def __init__(self, loops: ClaimLoops, store: Store | None, activity: ActivityLog, lease: timedelta) -> None:
        self._unstarted = loops.unstarted
        self._store = store
        self._sending = loops.sending
        self._activity = activity
        least, most = BLOCKED_SECONDS
        self._seconds_max = min(max(least, lease.total_seconds() / 4), most)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the running event loop until the end of the block."""
        ended = threading.Event()
        if self._store is not None:
            given = self._store, asyncio.get_running_loop(), threading.get_ident(), ended
            threading.Thread(target=self._watch, args=given, name="outbox-loop-watch", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _watch(self, store: Store, loop: asyncio.AbstractEventLoop, thread: int, ended: threading.Event) -> None:
        while not ended.wait(min(ASK_SECONDS, self._seconds_max)):
            began, alive = time.monotonic(), threading.Event()
            try:
                loop.call_soon_threadsafe(alive.set)
            except RuntimeError:  # the loop was closed
                return
            if not alive.wait(self._seconds_max) and not ended.is_set():
                self._handle_block(store, loop, thread, began, alive, ended)

    def _handle_block(
        self,
        store: Store,
        loop: asyncio.AbstractEventLoop,
        thread: int,
        began: float,
        alive: threading.Event,
        ended: threading.Event,
    ) -> None:
        doing = self._doing(loop, thread)
        log.warning(
            "the event loop has been blocked for %.1f s by %s: nothing else is sent or settled meanwhile; entries whose send has"
            " not begun are released",
            time.monotonic() - began,
            doing.text,
        )
        released, taken = 0, Taken((), ())
        while True:
            more = self._unstarted.take_all()
            taken = Taken([*taken.entries, *more.entries], more.tokens)
            try:
                if taken.entries or taken.tokens:
                    released += store.release(taken.entries, taken.tokens, BLOCKED)
                taken = Taken((), ())
            except Exception as error:  # the event loop releases them when it works again
                log.warning("entries whose send has not begun could not be released: %s", type(error).__name__)
            if alive.wait(ASK_SECONDS) or ended.is_set():
                break
        seconds = time.monotonic() - began
        log.error(
            "the event loop was blocked for %.1f s by %s; %d entries whose send had not begun were released. Make the operation"
            " a plain function, which runs on a thread, or await what blocks",
            seconds,
            doing.text,
            released,
        )
        try:
            loop.call_soon_threadsafe(self._activity.note_blocked, doing.destination, doing.operation, seconds)
        except RuntimeError:
            return

    def _doing(self, loop: asyncio.AbstractEventLoop, thread: int) -> Doing:
        task = asyncio.current_task(loop)
        destination, operation = (None if task is None else self._sending(task)) or (None, None)
        frame = sys._current_frames().get(thread)
        stack = traceback.extract_stack(frame) if frame is not None else []
        shown = [f"{each.filename}:{each.lineno} in {each.name}" for each in stack[-FRAMES_MAX:]]
        return Doing(destination, operation, ", ".join(reversed(shown)) or "an unknown place")
