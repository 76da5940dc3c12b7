"""The settlings that go alone, because a callback or a request's completion commits with each."""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from dispatchers.callbacks import CallbackFailed, Calls, CompletionFailed
from dispatchers.calling import told
from dispatchers.decide import keep
from dispatchers.lifecycle import Claimed, End, Transition
from dispatchers.store import CALLBACKS_AT_ONCE, Store
from outbox.databases import is_passing

log = logging.getLogger("outbox.dispatcher")

STORE_RETRY_SECONDS = (0.1, 5.0)
ABANDON_SECONDS = 1.0  # how long an async callback may take to notice that it was cancelled


class Waiting(NamedTuple):
    """An entry that is to settle with its callback. since: the event loop's clock when it came."""

    entry: Claimed
    end: End
    calls: Calls
    since: float


class Settling:
    """Settles entries together with their callbacks, a few at once.

    patience: how long one may wait for its turn. What became of it is then written down instead, before its lease ends.
    settle: called with what a batch may settle: an outcome to be kept, after its callback has failed.
    ended: called after each, with whether it settled.
    """

    def __init__(
        self,
        store: Store,
        *,
        patience: timedelta,
        chance: random.Random,
        settle: Callable[[Claimed, Transition], None],
        ended: Callable[[Claimed, bool], None],
    ) -> None:
        self._store = store
        self._patience_seconds = patience.total_seconds()
        self._chance = chance
        self._settle = settle
        self._ended = ended
        self._waiting: deque[Waiting] = deque()
        self._at_work = 0
        self._workers: dict[asyncio.Task[Any], None] = {}  # no set: a seed's run repeats only if theirs is an order
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._waiting) + self._at_work

    def begin(self) -> None:
        """Go on, on this event loop: workers die with theirs, and each `asyncio.run` brings another."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._workers, self._at_work = loop, {}, 0
            self._waiting = deque(waiting._replace(since=loop.time()) for waiting in self._waiting)
        for _ in self._waiting:
            self._set_to_work(loop)

    def start(self, entry: Claimed, end: End, calls: Calls) -> None:
        loop = asyncio.get_running_loop()
        self._waiting.append(Waiting(entry, end, calls, loop.time()))
        self._set_to_work(loop)

    async def finish(self, grace: timedelta) -> None:
        """Let them come to their end, but give up after `grace`."""
        if self._workers:
            await asyncio.wait(self._workers, timeout=max(0.0, grace.total_seconds()))
        await self.abandon()

    async def abandon(self) -> None:
        """Stop. What has not begun is written down; what has begun may yet commit, and else its lease runs out."""
        not_begun, self._waiting = self._waiting, deque()
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(self._workers, timeout=ABANDON_SECONDS)
        begun, self._waiting = self._waiting, deque()
        for waiting in not_begun:
            self._keep(waiting.entry, waiting.end, "the process stopped before its callback ran")
        for waiting in (*not_begun, *begun):
            self._ended(waiting.entry, False)

    # --- the workers

    def _set_to_work(self, loop: asyncio.AbstractEventLoop) -> None:
        if len(self._workers) < CALLBACKS_AT_ONCE:
            self._workers[loop.create_task(self._work(loop))] = None

    async def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        workers, me = self._workers, asyncio.current_task()
        try:
            while self._waiting:
                waiting = self._waiting.popleft()
                self._at_work += 1
                try:
                    settled = await self._settle_in_time(waiting, loop.time())
                except asyncio.CancelledError:
                    self._waiting.appendleft(waiting)  # there may be another event loop yet
                    raise
                finally:
                    self._at_work -= 1
                self._ended(waiting.entry, settled)
        finally:
            if me is not None:
                workers.pop(me, None)

    async def _settle_in_time(self, waiting: Waiting, now: float) -> bool:
        if now - waiting.since <= self._patience_seconds:
            return await self._settle_patiently(waiting.entry, waiting.end, waiting.calls)
        self._keep(waiting.entry, waiting.end, "too many callbacks were before its own")
        return False

    async def _settle_patiently(self, entry: Claimed, end: End, calls: Calls) -> bool:
        """Settle it, however long the database is away; what became of it is known, and must not be lost."""
        first, most = STORE_RETRY_SECONDS
        tries = 0
        while True:
            try:
                settled = await self._store.settle_with(entry, end, calls)
            except CallbackFailed as failed:
                return self._keep_failed(entry, end, failed.what, failed.__cause__ or failed)
            except Exception as error:
                if not is_passing(error):  # what the callback wrote is refused at the commit
                    what = CallbackFailed.what if calls.ended is not None else CompletionFailed.what
                    return self._keep_failed(entry, end, what, error)
                log.warning("entry %s waits to be settled: the database is away: %s", entry.id, type(error).__name__)
                await asyncio.sleep(min(first * 2 ** min(tries, 10), most) * (0.5 + self._chance.random() / 2))
                tries += 1
            else:
                if not settled:
                    log.warning("entry %s: its lease was lost before it settled", entry.id)
                return settled

    def _keep_failed(self, entry: Claimed, end: End, what: str, problem: BaseException) -> bool:
        log.error("entry %s (%s): its %s raised %s", entry.id, entry.operation, what, told(problem))
        self._keep(entry, end, f"its {what} raised {type(problem).__name__}")
        return False

    def _keep(self, entry: Claimed, end: End, problem: str) -> None:
        self._settle(entry, keep(entry, end, problem, self._chance.random()))
