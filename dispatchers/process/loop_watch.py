"""A thread that notices a blocked event loop, and then releases claimed entries whose sends have not begun.

One thread watches an event loop for all dispatchers that run on it. It asks the event loop each second to answer, and
more often if a lease is short. It cannot notice a block that keeps Python's lock. During a block each dispatcher's entries are
released on a thread of their own, so that a database that hangs delays no other.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakKeyDictionary

from dispatchers.pipeline.activity_log import ActivityLog
from dispatchers.pipeline.claim_loops import ClaimLoops
from dispatchers.pipeline.unstarted import BLOCKED, Taken
from dispatchers.store.protocol import Store

log = logging.getLogger("outbox.dispatcher")

MAX_ASK_SECONDS = 1.0  # between two questions, and between two releases while the event loop is blocked
MAX_BLOCKED_SECONDS = 5.0
"""How long the event loop may be blocked. Both times are at most an eighth of the lease, so that most of it is left for the
releases.
"""
RELEASED_SECONDS = 1.0  # after a block, for the releases that have not ended: their number is logged
MAX_RELEASES = 100  # at a time; other databases follow when one ends
MAX_FRAMES = 3


class Doing(NamedTuple):
    """What the event loop executes. sender: the dispatcher whose send it is; None if it is no send. place: files, lines and
    functions.
    """

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
        self.max_seconds = min(lease.total_seconds() / 8, MAX_BLOCKED_SECONDS)
        self._unstarted = loops.unstarted
        self._store = store
        self._unreleased = Taken((), ())

    @property
    def has_unstarted(self) -> bool:
        return bool(self._unreleased.entries) or self._unstarted.has_any

    def release(self) -> int:
        """Take the entries that have not begun, and release them; returns how many. The next call retries those that failed.

        Two threads must not call it at the same time.
        """
        more = self._unstarted.take_all()
        taken = Taken([*self._unreleased.entries, *more.entries], more.tokens)
        self._unreleased = taken
        if not (taken.entries or taken.tokens):
            return 0
        released = self._store.release(taken.entries, taken.tokens, BLOCKED)
        self._unreleased = Taken((), ())
        return released


class Releases:
    """The releases during the blocks of an event loop: one thread for each dispatcher that has entries to release."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: set[Watched] = set()
        self._released = 0

    def begin(self, watched: Iterable[Watched]) -> None:
        """Begin to release the entries that have not begun. A release that still runs is left alone."""
        for each in dict.fromkeys(watched):
            with self._changed:
                if each in self._running or len(self._running) >= MAX_RELEASES or not each.has_unstarted:
                    continue
                self._running.add(each)
            threading.Thread(target=self._run, args=(each,), name="outbox-release", daemon=True).start()

    def _run(self, watched: Watched) -> None:
        released = 0
        try:
            released = watched.release()
        except Exception as error:  # the event loop releases them when it works again
            log.warning("entries whose send has not begun could not be released: %s", type(error).__name__)
        finally:
            with self._changed:
                self._running.discard(watched)
                self._released += released
                self._changed.notify_all()

    def count(self, seconds: float) -> int:
        """How many were released since the last call. Waits up to `seconds` for the releases that run."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, seconds)
            released, self._released = self._released, 0
            return released


class LoopWatch:
    """Watches one event loop. It keeps no reference to the event loop, so that an event loop that has ended can be freed."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._watched: tuple[Watched, ...] = ()  # a dispatcher once for each `add`
        self._releases = Releases()
        self._ended = threading.Event()

    def add(self, watched: Watched, loop: asyncio.AbstractEventLoop) -> None:
        self._watched = (*self._watched, watched)
        if len(self._watched) == 1:
            self._thread, self._ended = threading.get_ident(), threading.Event()
            given = loop, self._ended
            threading.Thread(target=self._watch, args=given, name="outbox-loop-watch", daemon=True).start()

    def remove(self, watched: Watched) -> None:
        """Undo one `add`. A dispatcher is watched until the last of its calls has ended."""
        place = next(number for number, each in enumerate(self._watched) if each is watched)
        self._watched = (*self._watched[:place], *self._watched[place + 1 :])
        if not self._watched:
            self._ended.set()

    @property
    def _max_seconds(self) -> float:
        """How long the event loop may be blocked, according to the shortest lease."""
        return min((each.max_seconds for each in self._watched), default=MAX_BLOCKED_SECONDS)

    def _watch(self, loop: asyncio.AbstractEventLoop, ended: threading.Event) -> None:
        while not ended.wait(min(self._max_seconds, MAX_ASK_SECONDS)):
            began, alive = time.monotonic(), threading.Event()
            try:
                loop.call_soon_threadsafe(alive.set)
            except RuntimeError:  # the loop was closed
                return
            if not alive.wait(self._max_seconds) and not ended.is_set():
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
        while True:
            self._releases.begin(self._watched)
            if alive.wait(min(self._max_seconds, MAX_ASK_SECONDS)) or ended.is_set():
                break
        seconds = time.monotonic() - began
        released = self._releases.count(RELEASED_SECONDS)
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
