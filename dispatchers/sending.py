"""The sends under way: each held to its lease and its deadline, each with an outcome whatever its adapter does."""

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
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

WATCH_SECONDS = 0.05  # how late a send may be cancelled
ABANDON_SECONDS = 1.0  # how long an adapter may take to notice that it was cancelled


class Send:
    """One send under way. deadline: on the event loop's clock. overdue: cancelled for it."""

    __slots__ = ("deadline", "overdue", "task")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.overdue = False
        self.task: asyncio.Task[None] | None = None


class Sends:
    """Starts sends and brings back what became of them.

    settle: called with each entry and its transition, and woken up by. keyring: asked only for a later key epoch.
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
    ) -> None:
        self._store = store
        self._keyring = keyring
        self._usable_seconds = (lease - margin).total_seconds()
        self._clock = clock
        self._chance = chance
        self._settle = settle
        self._under_way: set[Send] = set()
        self._watch: asyncio.Task[None] | None = None
        self.busy: Counter[str] = Counter()
        """How many are under way to each destination."""

    def __len__(self) -> int:
        return len(self._under_way)

    def start(self, entry: Claimed, route: Route, started: float) -> None:
        """Send `entry`. started: our clock before its claim."""
        loop = asyncio.get_running_loop()
        send = Send(loop.time() + route.timeout_seconds)
        self._under_way.add(send)
        self.busy[entry.destination] += 1
        send.task = loop.create_task(self._attempt(send, entry, route, started))
        if self._watch is None or self._watch.done() or self._watch.get_loop() is not loop:
            self._watch = loop.create_task(self._cancel_overdue())

    async def finish(self, grace: timedelta) -> None:
        """Let what is under way come to its end, but cancel it after `grace`."""
        tasks = self._tasks()
        if tasks:
            await asyncio.wait(tasks, timeout=grace.total_seconds())
        await self.abandon()

    async def abandon(self) -> None:
        """Cancel what is under way. It is in doubt, and found so when its lease ends."""
        tasks = self._tasks()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=ABANDON_SECONDS)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [send.task for send in self._under_way if send.task is not None]

    async def _cancel_overdue(self) -> None:
        """One watch for all: a timer for each costs as much as the rest of a send."""
        loop = asyncio.get_running_loop()
        while self._under_way:
            await asyncio.sleep(WATCH_SECONDS)
            now = loop.time()
            for send in self._under_way:
                if now >= send.deadline and not send.overdue and send.task is not None:
                    send.overdue = True
                    send.task.cancel()

    # --- one attempt

    async def _attempt(self, send: Send, entry: Claimed, route: Route, started: float) -> None:
        change: Transition | None = None
        try:
            change = admit(entry, route.memory, self._database_now(entry, started))
            if change is None:
                change = await self._send_in_time(send, entry, route, started)
        finally:
            self._under_way.discard(send)
            self.busy[entry.destination] -= 1
            if change is not None:
                self._settle(entry, change)

    async def _send_in_time(self, send: Send, entry: Claimed, route: Route, started: float) -> Transition:
        """Send, unless the lease could end before the answer: then another process may hold the entry already."""
        if self._clock() - started > self._usable_seconds - route.timeout_seconds:
            return HandBack("its lease was too short when its turn came")
        outcome = await self._outcome(send, entry, route)
        now = self._database_now(entry, started)
        jitter = 0.0 if isinstance(outcome, Delivered) else self._chance.random()
        return decide(entry, outcome, route.memory, now, jitter)

    async def _outcome(self, send: Send, entry: Claimed, route: Route) -> Outcome:
        """What the adapter answers; an exception says nothing about the far side."""
        try:
            delivery = await self._delivery(send, entry, route)
        except Exception:
            log.exception("entry %s (%s) cannot be made into a delivery", entry.id, entry.operation)
            return Deferred("it cannot be made into a delivery; the log says why")
        try:
            return storable(await route.send(delivery))
        except asyncio.CancelledError:
            if send.overdue and send.task is not None:
                send.task.uncancel()
                return Unknown(f"no answer within {route.timeout_seconds:g} s")
            if send.task is None or send.task.cancelling():
                raise
            return Unknown("the adapter cancelled itself")
        except (Exception, BaseExceptionGroup) as error:
            log.exception("the adapter of %r raised for entry %s", route.name, entry.id)
            return Unknown(f"the adapter raised {type(error).__name__}")

    async def _delivery(self, send: Send, entry: Claimed, route: Route) -> Delivery:
        return Delivery(
            id=entry.id,
            operation=entry.operation,
            body=entry.payload,
            key=route.adapter.key_format.encode(await self._tag(entry)),
            attempt=entry.attempts + 1,
            options=_parsed(entry.options),
            headers=_parsed(entry.headers),
            deadline=send.deadline,
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
