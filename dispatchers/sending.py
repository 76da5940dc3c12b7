"""The sends under way: each held to its lease and its deadline, each with an outcome whatever its adapter does."""

import asyncio
import json
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

from dispatchers.claims import Store
from dispatchers.decide import admit, decide
from dispatchers.delivery import Deferred, Delivered, Delivery, Outcome, Unknown
from dispatchers.lifecycle import Claimed, HandBack, Transition
from dispatchers.outcomes import storable
from dispatchers.routes import Route
from outbox.keys import Keyring, Tag, derive_tag

log = logging.getLogger("outbox.dispatcher")

IDLE = math.inf
WATCH_SECONDS = 0.05  # how late a send may be cancelled
ABANDON_SECONDS = 1.0  # how long an adapter may take to notice that it was cancelled


class Worker:
    """A task that makes one send after the other. deadline: of the present one, on the event loop's clock.

    overdue: the present send was cancelled for its deadline. wake: what it waits on while it has nothing to send.
    """

    __slots__ = ("deadline", "overdue", "task", "wake")

    def __init__(self) -> None:
        self.deadline = IDLE
        self.overdue = False
        self.task: asyncio.Task[None] | None = None
        self.wake: asyncio.Future[None] | None = None


class Sends:
    """Starts sends and brings back what became of them.

    settle: called with each entry and its transition. back: called with each entry whose send has ended, however.
    keyring: asked only for a later key epoch.
    """

    def __init__(
        self,
        *,
        store: Store,
        keyring: Callable[[], Keyring],
        lease: timedelta,
        margin: timedelta,
        clock: Callable[[], float],
        chance: random.Random,
        settle: Callable[[Claimed, Transition], None],
        back: Callable[[Claimed], None],
    ) -> None:
        self._store = store
        self._keyring = keyring
        self._usable_seconds = (lease - margin).total_seconds()
        self._clock = clock
        self._chance = chance
        self._settle = settle
        self._on_back = back
        self._ready: deque[tuple[Claimed, Route, float]] = deque()
        self._working: set[Worker] = set()
        self._idle: list[Worker] = []
        self._called = False
        self._watch: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._under_way = 0
        self._all_back: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return self._under_way

    def start(self, claims: Iterable[tuple[Claimed, Route, float]]) -> None:
        """Send these entries, each with its route and our clock before its claim."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # workers die with their event loop, and each `asyncio.run` brings another
            self._loop, self._idle, self._watch, self._called = loop, [], None, False
        for claim in claims:
            self._ready.append(claim)
            self._under_way += 1
        self._set_to_work(loop)
        if self._watch is None or self._watch.done():
            self._watch = loop.create_task(self._cancel_overdue(loop))

    async def finish(self, grace: timedelta) -> None:
        """Let what is under way come to its end, but cancel it after `grace`."""
        if self._under_way:
            self._all_back = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._all_back], timeout=grace.total_seconds())
        await self.abandon()

    async def abandon(self) -> None:
        """Cancel what is under way. It is in doubt, and found so when its lease ends."""
        while self._ready:
            entry, _, _ = self._ready.popleft()
            self._back(entry)
            self._settle(entry, HandBack("the process stopped before it was sent"))
        self._called = False
        tasks = [worker.task for worker in self._working if worker.task is not None]
        self._idle = []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=ABANDON_SECONDS)

    # --- the workers

    def _set_to_work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call one worker more for what is ready. When it comes, it calls the next one before its own send may have to
        wait: so as many are at work as there are sends that wait, and one or two do all those that need not.
        """
        if not self._ready or self._called:
            return
        self._called = True
        while self._idle:
            worker = self._idle.pop()
            if worker.wake is not None and not worker.wake.done():
                worker.wake.set_result(None)
                return
        worker = Worker()
        worker.task = loop.create_task(self._work(worker, loop))

    async def _work(self, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
        self._working.add(worker)
        try:
            while True:
                self._called = False
                while self._ready:
                    entry, route, started = self._ready.popleft()
                    self._set_to_work(loop)
                    worker.deadline = loop.time() + route.timeout_seconds
                    await self._attempt(worker, entry, route, started)
                    if worker.overdue and worker.task is not None:
                        worker.overdue = False
                        worker.task.uncancel()
                worker.deadline = IDLE
                worker.wake = loop.create_future()
                self._idle.append(worker)
                await worker.wake
        finally:
            self._working.discard(worker)

    async def _cancel_overdue(self, loop: asyncio.AbstractEventLoop) -> None:
        """One watch for all: a timer for each costs as much as the rest of a send."""
        while self._under_way:
            await asyncio.sleep(WATCH_SECONDS)
            now = loop.time()
            for worker in self._working:
                if now >= worker.deadline and not worker.overdue and worker.task is not None:
                    worker.overdue = True
                    worker.task.cancel()

    # --- one attempt

    async def _attempt(self, worker: Worker, entry: Claimed, route: Route, started: float) -> None:
        change: Transition | None = None
        try:
            if entry.deliveries > 1:  # what was never claimed before has nothing that could speak against it
                change = admit(entry, route.memory, self._database_now(entry, started))
            if change is None:
                change = await self._send_in_time(worker, entry, route, started)
        except Exception:  # a defect of ours: its lease ends, and it counts as unknown
            log.exception("entry %s (%s): nothing could be decided", entry.id, entry.operation)
        finally:
            self._back(entry)
            if change is not None:
                self._settle(entry, change)

    def _back(self, entry: Claimed) -> None:
        self._under_way -= 1
        if not self._under_way and self._all_back is not None and not self._all_back.done():
            self._all_back.set_result(None)
        self._on_back(entry)

    async def _send_in_time(self, worker: Worker, entry: Claimed, route: Route, started: float) -> Transition:
        """Send, unless the lease could end before the answer: then another process may hold the entry already."""
        if self._clock() - started > self._usable_seconds - route.timeout_seconds:
            return HandBack("its lease was too short when its turn came")
        outcome = await self._outcome(worker, entry, route)
        now = self._database_now(entry, started)
        jitter = 0.0 if isinstance(outcome, Delivered) else self._chance.random()
        return decide(entry, outcome, route.memory, now, jitter)

    async def _outcome(self, worker: Worker, entry: Claimed, route: Route) -> Outcome:
        """What the adapter answers; an exception says nothing about the far side."""
        try:
            delivery = await self._delivery(worker, entry, route)
        except Exception:
            log.exception("entry %s (%s) cannot be made into a delivery", entry.id, entry.operation)
            return Deferred("it cannot be made into a delivery; the log says why")
        try:
            return storable(await route.send(delivery))
        except asyncio.CancelledError:
            cancels = worker.task.cancelling() if worker.task is not None else 0
            if cancels > worker.overdue:
                raise
            return Unknown(
                f"no answer within {route.timeout_seconds:g} s" if cancels else "the adapter cancelled itself"
            )
        except (Exception, BaseExceptionGroup, SystemExit) as error:
            log.exception("the adapter of %r raised for entry %s", route.name, entry.id)
            return Unknown(f"the adapter raised {type(error).__name__}")

    async def _delivery(self, worker: Worker, entry: Claimed, route: Route) -> Delivery:
        return Delivery(
            id=entry.id,
            operation=entry.operation,
            body=entry.payload,
            key=route.adapter.key_format.encode(await self._tag(entry)),
            attempt=entry.attempts + 1,
            options=_parsed(entry.options),
            headers=_parsed(entry.headers),
            deadline=worker.deadline,
        )

    async def _tag(self, entry: Claimed) -> Tag:
        """The stored tag; derived anew only for a later key epoch, after a "send again"."""
        if entry.key_epoch == 0:
            return Tag(entry.tag)
        return derive_tag(self._keyring(), entry.kid, await self._store.key_fields(entry.id), entry.key_epoch)

    def _database_now(self, entry: Claimed, started: float) -> datetime:
        """The database's time: its clock at the lease's start, and our own since before it. Never too early."""
        return entry.leased_at + timedelta(seconds=self._clock() - started)


_NOTHING: Mapping[str, Any] = MappingProxyType({})


def _parsed(text: str) -> Mapping[str, Any]:
    """A stored JSON object; most are empty."""
    return _NOTHING if text == "{}" else json.loads(text)
