"""One entry without a database, sent and decided about by the dispatcher's own policy, with a clock that a test moves."""

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from dispatchers.decide import decide, decide_lookup, plan
from dispatchers.delivery import Adapter, CannotTell, Delivery, Outcome
from dispatchers.pipeline.attempt import delivery_of
from dispatchers.pipeline.routing import Route, Routes, merge
from dispatchers.sanitize import storable
from dispatchers.stored_outcome import NOTHING_STORED, StoredOutcome
from dispatchers.testing.attempts import close
from dispatchers.transitions import AwaitLookup, ClaimedEntry, Lookup, Release, Retry, Send, SendAgain, Transition
from outbox.entries.payload import encode_json
from outbox.keys import Tag

LEASE: Final = timedelta(seconds=60)
MARGIN: Final = timedelta(seconds=5)
ID: Final = UUID("019a0000-0000-8000-8000-000000000001")
ENV: Final = "test"
TAG: Final = Tag(bytes(range(32)))
MAX_STEPS: Final = 40


class LoneEntry:
    """An entry of `operation`, which an adapter of `adapters` serves.

    clock: the time of the database and of the service. wait: moves it.
    tag: of which its key is made. changes: the transitions so far. outcomes: the adapter's answers so far.
    """

    def __init__(
        self,
        adapters: Mapping[str, Adapter],
        operation: str,
        payload: Any,
        *,
        clock: Callable[[], datetime],
        wait: Callable[[timedelta], None],
        tag: Tag = TAG,
    ) -> None:
        self._routes = Routes(merge(adapters), lease=LEASE, margin=MARGIN)
        self._clock = clock
        self._wait = wait
        self.changes: list[Transition] = []
        self.outcomes: list[Outcome] = []
        blank: dict[str, Any] = dict.fromkeys(ClaimedEntry._fields)
        now = clock()
        fields = {
            "id": ID,
            "env": ENV,
            "operation": operation,
            "payload": encode_json("payload", payload, 1024 * 1024),
            "tag": tag,
            "options": {},
            "headers": {},
            "outcome": NOTHING_STORED,
            **dict.fromkeys(("due_at", "created_at", "first_leased_at", "queued_at", "leased_at"), now),
            **dict.fromkeys(("deliveries", "attempts", "key_epoch"), 0),
            "maybe_sent": False,
        }
        self.entry = ClaimedEntry(**{**blank, **fields})

    @property
    def route(self) -> Route:
        found = self._routes.find(self.entry.operation)
        if found is None:
            raise LookupError(
                f"no adapter serves {self.entry.operation}{self._routes.suggestion(self.entry.operation)}"
            )
        return found

    @property
    def key(self) -> str:
        """Its key in the form of its adapter."""
        return self.route.encode_key(Tag(self.entry.tag))

    def delivery(self) -> Delivery:
        """What its adapter gets at the next send."""
        made = delivery_of(self.entry, self.route, Tag(self.entry.tag), 0.0)
        if made is None:
            raise LookupError(f"no delivery can be made for {self.entry.operation}")
        return made

    def step(self) -> Transition:
        """One claim: send it, or do what the policy says instead."""
        now, memory = self._clock(), self.route.memory
        is_first = self.entry.in_doubt_since is None
        sent_as = self.route.form if is_first or self.entry.sent_as is None else self.entry.sent_as
        self.entry = self.entry._replace(deliveries=self.entry.deliveries + 1, leased_at=now, sent_as=sent_as)
        step = plan(self.entry, memory, now, 1.0, env=ENV, alike=self.route.sends_alike(self.entry))
        change: Transition
        match step:
            case Send():
                outcome = storable(asyncio.run(self._sent(self.delivery())))
                self.outcomes.append(outcome)
                change = decide(self.entry, outcome, memory, self._clock(), 1.0)
            case Lookup(state=state):
                finding = asyncio.run(self._looked_up(self.delivery()))
                change = decide_lookup(self.entry, state, finding, memory, self._clock(), 1.0)
            case _:
                change = step
        self._apply(change)
        return change

    def run(self, most: int = MAX_STEPS) -> Transition:
        """Step until it waits for nothing more, and move the clock while it waits."""
        for _ in range(most):
            change = self.step()
            if not isinstance(change, Retry | AwaitLookup | SendAgain | Release) or change.delay is None:
                return change
            self._wait(change.delay)
        return self.changes[-1]

    async def _sent(self, delivery: Delivery) -> Outcome:
        try:
            outcome: Outcome = await self.route.send(delivery)
            return outcome
        finally:
            await close(self.route.adapter)

    async def _looked_up(self, delivery: Delivery) -> Any:
        try:
            return await self.route.find(delivery)
        except Exception as error:
            return CannotTell(type(error).__name__)
        finally:
            await close(self.route.adapter)

    def _apply(self, change: Transition) -> None:
        self.changes.append(change)
        fields = ("attempts", "maybe_sent", "in_doubt_since", "key_epoch")
        changed: dict[str, Any] = {name: getattr(change, name) for name in fields if hasattr(change, name)}
        stored = StoredOutcome(lookup=getattr(change, "lookup", None), deliveries=self.entry.deliveries)
        self.entry = self.entry._replace(**changed, outcome=stored)
