"""Notices on a thread of its own that an event loop is blocked, and then releases what was claimed and has not begun.

One thread watches an event loop for all dispatchers that run on it. It asks the event loop each second for a sign of life. It
cannot notice a block that keeps Python's lock.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakKeyDictionary

from dispatchers.pipeline.activity_log import ActivityLog
from dispatchers.pipeline.claim_loops import ClaimLoops
from dispatchers.pipeline.unstarted import BLOCKED, Taken
from dispatchers.store.protocol import Store

log = logging.getLogger("outbox.dispatcher")

ASK_SECONDS = 1.0  # between two signs of life, and between two releases while the event loop is blocked
BLOCKED_SECONDS = (1.0, 5.0)
"""A quarter of the lease, within these bounds: so long the event loop may be blocked. Then there is time for the releases."""
MAX_FRAMES = 3


class Doing(NamedTuple):
    """What the event loop executes. sender: whose send it is; None if it is no send. place: files, lines and functions."""

    sender: "Watched | None"
    destination: str | None
    operation: str | None
    place: str

    @property
    def text(self) -> str:
        return (f"operation {self.operation!r}" if self.operation else "code that is no send") + f", at {self.place}"


class Watched:
    """A dispatcher whose claims are released. store: releases them on a connection of its own."""

    def __init__(self, loops: ClaimLoops, store: Store, activity: ActivityLog, lease: timedelta) -> None:
        self.sending = loops.sending
        self.activity = activity
        least, most = BLOCKED_SECONDS
        self.max_seconds = min(max(least, lease.total_seconds() / 4), most)
        self._unstarted = loops.unstarted
        self._store = store
        self._unreleased = Taken((), ())

    def release(self) -> int:
        """Take what has not begun, and release it; returns how many. What cannot be released now is tried at the next call."""
        more = self._unstarted.take_all()
        taken = Taken([*self._unreleased.entries, *more.entries], more.tokens)
        self._unreleased = taken
        if not (taken.entries or taken.tokens):
            return 0
        released = self._store.release(taken.entries, taken.tokens, BLOCKED)
        self._unreleased = Taken((), ())
        return released


class LoopWatch:
    """Watches one event loop. It keeps no reference to the event loop, so that an event loop that has ended can be freed."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._watched: tuple[Watched, ...] = ()
        self._ended = threading.Event()

    def add(self, watched: Watched, loop: asyncio.AbstractEventLoop) -> None:
        self._watched = (*self._watched, watched)
        if len(self._watched) == 1:
            self._thread, self._ended = threading.get_ident(), threading.Event()
            given = loop, self._ended
            threading.Thread(target=self._watch, args=given, name="outbox-loop-watch", daemon=True).start()

    def remove(self, watched: Watched) -> None:
        self._watched = tuple(each for each in self._watched if each is not watched)
        if not self._watched:
            self._ended.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, ended: threading.Event) -> None:
        while not ended.wait(ASK_SECONDS):
            began, alive = time.monotonic(), threading.Event()
            seconds = min((each.max_seconds for each in self._watched), default=BLOCKED_SECONDS[1])
            try:
                loop.call_soon_threadsafe(alive.set)
            except RuntimeError:  # the loop was closed
                return
            if not alive.wait(seconds) and not ended.is_set():
                self._handle_block(loop, began, alive, ended)

    def _handle_block(
        self, loop: asyncio.AbstractEventLoop, began: float, alive: threading.Event, ended: threading.Event
    ) -> None:
        doing = self._doing(loop)
        log.warning(
            "the event loop has been blocked for %.1f s by %s: nothing else is sent or settled meanwhile; entries whose send has"
            " not begun are released",
            time.monotonic() - began,
            doing.text,
        )
        released = 0
        while True:
            released += sum(_released(each) for each in self._watched)
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
        sender = doing.sender or next(iter(self._watched), None)
        if sender is not None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(sender.activity.note_blocked, doing.destination, doing.operation, seconds)

    def _doing(self, loop: asyncio.AbstractEventLoop) -> Doing:
        task = asyncio.current_task(loop)
        found = [(each, each.sending(task)) for each in self._watched] if task is not None else []
        nothing: tuple[Watched | None, tuple[str | None, str | None]] = (None, (None, None))
        sender, (destination, operation) = next(((each, send) for each, send in found if send is not None), nothing)
        frame = sys._current_frames().get(self._thread)
        stack = traceback.extract_stack(frame) if frame is not None else []
        shown = [f"{each.filename}:{each.lineno} in {each.name}" for each in stack[-MAX_FRAMES:]]
        return Doing(sender, destination, operation, ", ".join(reversed(shown)) or "an unknown place")


def _released(watched: Watched) -> int:
    try:
        return watched.release()
    except Exception as error:  # the event loop releases them when it works again
        log.warning("entries whose send has not begun could not be released: %s", type(error).__name__)
        return 0


_watches: "WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWatch]" = WeakKeyDictionary()


@contextmanager
def watching(watched: Watched | None) -> Iterator[None]:
    """Watch the running event loop for this dispatcher until the end of the block. None: do not watch."""
    if watched is None:
        yield
        return
    loop = asyncio.get_running_loop()
    watch = _watches.setdefault(loop, LoopWatch())
    watch.add(watched, loop)
    try:
        yield
    finally:
        watch.remove(watched)
