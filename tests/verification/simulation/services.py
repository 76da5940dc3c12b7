"""Strict services, and the adapters that call them. What goes wrong on the way is drawn from the seed."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from dispatchers import Adapter, Deferred, Delivered, Delivery, InProgress, KeyConflict, Outcome, Rejected, Unknown
from dispatchers.delivery import Absent, Answered, CannotTell, Finding, Found
from dispatchers.time_limits import RetryPolicy
from simulation.invariants import Invariants
from simulation.trace import MARGIN, TIMEOUT, Declared, Send
from simulation.world import Process, World

SERVES = ("does it",)
MISDEEDS = (
    *("does it",) * 8,
    *("declines",) * 2,  # having looked at the key: where keys are kept, the answer is stored
    *("refuses unseen",) * 2,  # 400, 401, 404: before it looks at the key
    "is busy",  # 429
    "is down",  # 503 at the door
    "breaks before",  # a 500 from the middle of the work, stored under the key
    "breaks after",
    "finds another request",  # its key is known, but with other parameters
)
RETRY_AFTER = (None, None, *(timedelta(seconds=seconds) for seconds in (0, 3, 17, 10**6)))
FREEZES = (0.8, 3.0, 5.0, 6.2, 9.0, 30.0)  # seconds
LONG_FREEZES = (6.2, 7.0, 7.5, 8.0, 8.5, 9.0, 30.0)  # in which a lease ends, and another sender is at work
MAX_TRANSIT = (TIMEOUT + MARGIN / 2).total_seconds() * 0.98  # of a request, from the last check on


@dataclass(slots=True)
class Remembered:
    """What a service has under a key. answer: None while it works."""

    since: float
    parameters: bytes
    answer: Outcome | None = None


class Service:
    """One outside service: what it remembers of each key, and for how long.

    chaos: the chance that something goes wrong with a request. rate: how fast its clock goes.
    """

    def __init__(self, world: World, invariants: Invariants, declared: Declared, rate: float) -> None:
        self.world = world
        self.invariants = invariants
        self.declared = declared
        self.chaos = 0.0
        self._rate = rate
        self._keys: dict[str, Remembered] = {}
        self._at_work: Counter[str] = Counter()  # by key

    @property
    def _now(self) -> float:
        return self.world.now * self._rate

    def receive(self, delivery: Delivery, send: Send, answer: Any) -> None:
        """A request arrives. answer: called with the outcome that is honest, once there is one."""
        self.invariants.arrived(send)

        def reply(outcome: Outcome) -> None:
            send.is_answered = True
            answer(outcome)

        self._handle(delivery, send, reply)

    def _handle(self, delivery: Delivery, send: Send, answer: Any) -> None:
        kind = self.world.rng.choice(MISDEEDS if self._misbehaves() else SERVES)
        after = self.world.rng.choice(
            [None, None, timedelta(0), timedelta(seconds=3), timedelta(seconds=17), timedelta(days=3)]
        )
        match kind:
            case "refuses unseen":
                answer(Rejected("400"))
            case "is busy":
                answer(Deferred("429", after=after))
            case "is down":
                answer(Unknown("503", after=after))
            case _ if (found := self._find(delivery.key)) is not None:
                is_other = kind == "finds another request" or found.parameters != delivery.payload_json
                answer(KeyConflict("other parameters") if is_other else _replayed(found.answer, after))
            case _:
                self._begin(kind, delivery, send, answer)

    def _find(self, key: str) -> Remembered | None:
        found, window = self._keys.get(key), self.declared.window
        if found is not None and isinstance(window, timedelta) and self._now >= found.since + window.total_seconds():
            del self._keys[key]
            return None
        return found

    def _begin(self, kind: str, delivery: Delivery, send: Send, answer: Any) -> None:
        found = Remembered(self._now, delivery.payload_json)
        if self.declared.window is not None:
            self._keys[delivery.key] = found
        if self.chaos and self.invariants.trace(delivery.id).effects and self.world.rng.random() < 0.5:
            kind = "declines"  # what it did under an earlier key has emptied the account
        self._at_work[delivery.key] += 1
        takes = self.world.rng.choice([0.0, 0.1, 0.5, 2.0, 8.0, 25.0]) if self._misbehaves() else 0.01
        self.world.at(takes, self._execute, kind, found, send, delivery.key, answer)

    def _execute(self, kind: str, found: Remembered, send: Send, key: str, answer: Any) -> None:
        self._at_work[key] -= 1
        if kind not in ("declines", "breaks before"):
            self.invariants.executed(send)
        if kind == "declines":
            found.answer = Rejected("declined", conclusive=self.declared.window is not None)
        elif kind.startswith("breaks"):
            found.answer = Unknown("500")
        else:
            found.answer = Delivered({"id": send.claimed.id.hex})
        answer(found.answer)

    def show(self, delivery: Delivery, epoch: int) -> Finding:
        """What it shows under a key, and nothing of what is still on its way."""
        if self._misbehaves() or self._at_work[delivery.key]:
            return CannotTell("it is busy")
        return Found({"id": delivery.id.hex}) if self.invariants.trace(delivery.id).effects[epoch] else Absent()

    def _misbehaves(self) -> bool:
        return self.world.rng.random() < self.chaos


def _replayed(answer: Outcome | None, after: timedelta | None) -> Outcome:
    match answer:
        case None:
            return InProgress(after)
        case Delivered():
            return replace(answer, replayed=True)
        case Unknown():
            return replace(answer, final=True)  # a stored 500: a repeated request returns nothing new
        case _:
            return answer


class SimulatedAdapter(Adapter):
    """Calls one service over a network that loses, delays and refuses.

    keys: the keys of an entry, by epoch. poison: entries whose payload kills the process that sends it.
    """

    timeout = TIMEOUT

    def __init__(self, service: Service, keys: Any, poison: set[Any], pinned: str = "") -> None:
        declared = service.declared
        self.service = service
        self.window = declared.window
        self.at_least_once = declared.at_least_once
        self.retry = RetryPolicy(max_attempts=declared.max_attempts, max_age=declared.max_age)
        self.failure_blocks_group = declared.failure_blocks_group
        self.pinned = pinned
        self.find = self._look if declared.shows_what_it_did else None
        self._keys = keys
        self._poison = poison

    async def send(self, delivery: Delivery) -> Any:  # what a bad client answers, too
        return await self._attempt(delivery, self._called_with(delivery))

    def _called_with(self, delivery: Delivery) -> Send:
        process: Any = asyncio.get_running_loop()
        return self.service.invariants.sending(
            delivery, process, self.service.declared, self.pinned, self._keys(delivery.id)
        )

    async def _attempt(self, delivery: Delivery, send: Send) -> Any:
        try:
            outcome = await self._exchange(delivery, send, send.process)
        finally:
            send.is_over = True
        self.service.invariants.answered(send, harmless=isinstance(outcome, Deferred | Rejected))
        return outcome

    async def _look(self, delivery: Delivery) -> Finding:
        misfortune = self.service.world.rng.random() < self.service.chaos
        await asyncio.sleep(self.service.world.rng.choice([0.1, 0.9, 2.0]) if misfortune else 0.002)
        found = self.service.show(delivery, self._keys(delivery.id).index(delivery.key))
        self.service.invariants.by_lookup(delivery, found)
        process: Any = asyncio.get_running_loop()
        self._may_freeze(process, 0.12 * misfortune)
        return found

    async def _exchange(self, delivery: Delivery, send: Send, process: Process) -> Any:
        world, rng = self.service.world, self.service.world.rng
        misfortune = rng.random() < self.service.chaos
        leaves_after = rng.choice([0.0, 0.05, 0.4, 0.9]) if misfortune else 0.002
        self._may_freeze(process, 0.12 * misfortune)
        try:
            await asyncio.sleep(leaves_after)
        except asyncio.CancelledError:
            send.is_gone = True
            raise
        if delivery.id in self._poison:
            send.is_gone = True
            process.die()
            await asyncio.get_running_loop().create_future()
        fate = rng.choice(["refused", "lost", "lost", "unheard", "raises", "nothing", "", ""]) if misfortune else ""
        if fate == "refused":
            send.is_gone = True
            return Deferred("connection refused")
        transit = rng.random() * (MAX_TRANSIT - leaves_after)
        outcome = await self._carry(delivery, send, fate, transit, world, misfortune)
        is_bad_news = isinstance(outcome, Rejected) and self.service.chaos > 0
        if is_bad_news:
            self._may_freeze(process, 0.6, LONG_FREEZES)
        else:
            self._may_freeze(process, 0.12 * misfortune)
        return outcome

    def _may_freeze(self, process: Process, likelihood: float, freezes: Sequence[float] = FREEZES) -> None:
        """Where it hurts: between the last check and the call, and between the answer and settling."""
        if process.world.rng.random() < likelihood:
            process.freeze(process.world.rng.choice(freezes))

    async def _carry(
        self, delivery: Delivery, send: Send, fate: str, transit: float, world: World, misfortune: bool
    ) -> Any:
        """The request leaves. fate: lost on its way, unheard for its answer is lost, and what a bad client makes of it."""
        answered = asyncio.get_running_loop().create_future()
        if fate == "lost":
            send.is_gone = True
        else:
            to, back = (transit, world.rng.choice([0.0, 0.3, 3.0])) if misfortune else (0.002, 0.002)

            def hear(outcome: Outcome) -> None:
                if not answered.done():
                    answered.set_result(outcome)

            def answer(outcome: Outcome) -> None:
                if fate != "unheard":
                    world.at(back, hear, outcome)

            send.has_left = True
            world.at(to, self.service.receive, delivery, send, answer)
        outcome = await answered
        if fate == "raises":
            raise RuntimeError("the client broke")
        return None if fate == "nothing" else outcome


class BatchingAdapter(SimulatedAdapter):
    """Sends the entries of a claim with one call, which raises if the client broke with one of them."""

    async def send_batch(self, deliveries: Sequence[Delivery], answered: Answered) -> None:
        broken: list[RuntimeError] = []

        async def attempt(number: int, delivery: Delivery, send: Send) -> None:
            try:
                answered(number, await self._attempt(delivery, send))
            except RuntimeError as error:
                broken.append(error)

        sends = [self._called_with(delivery) for delivery in deliveries]  # the process may freeze before a task begins
        async with asyncio.TaskGroup() as attempts:
            for number, (delivery, send) in enumerate(zip(deliveries, sends, strict=True)):
                attempts.create_task(attempt(number, delivery, send))
        if broken:
            raise broken[0]
