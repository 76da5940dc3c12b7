"""An outside service in this process's memory, for tests and benchmarks."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

from dispatchers.delivery import Absent, Adapter, Delivered, Delivery, Finding, Found, Outcome, Rejected
from dispatchers.time_limits import DEFAULT_RETRY, FOREVER, RetryPolicy, Window


class MemoryAdapter(Adapter):
    """Answers as configured, stores what it received, and deduplicates by key like a service with keys.

    answer: a function that is called with each executed delivery, or a list of outcomes to return in turn (after the last one
        it delivers). By default it delivers, with {"id": the entry's id}.
    window: FOREVER, or the window that a test wants to declare. With None it keeps no keys, and executes every send.
    keep: False for benchmarks: it stores nothing, so it deduplicates nothing either.
    find: the status lookup: True searches what it received; or a function of the delivery; None for no lookup.

    The first `Delivered` or `Rejected` of a key is the answer to every later send with this key: `replayed`, or `conclusive`.
    Other outcomes are not stored under the key.
    """

    replays_errors = "all"

    def __init__(
        self,
        answer: Callable[[Delivery], Outcome] | Iterable[Outcome] | None = None,
        *,
        window: Window = FOREVER,
        timeout: timedelta = timedelta(seconds=30),
        retry: RetryPolicy = DEFAULT_RETRY,
        keep: bool = True,
        find: Callable[[Delivery], Any] | Literal[True] | None = None,
    ) -> None:
        self.window = window
        self.timeout = timeout
        self.retry = retry
        self.keep = keep
        self.find = self._in_the_books if find is True else find
        self.deliveries: list[Delivery] = []
        """Everything that was sent here, repeats included."""
        self.effects: Counter[str] = Counter()
        """How many times each key was executed: no more than once, unless `window` is None."""
        self._answers: dict[str, Delivered | Rejected] = {}
        self._answer = answer if callable(answer) else _in_turn(answer or ())

    async def send(self, delivery: Delivery) -> Outcome:
        if not self.keep:
            return self._answer(delivery)
        self.deliveries.append(delivery)
        match self._answers.get(delivery.key):
            case Delivered() as stored:
                return replace(stored, replayed=True)
            case Rejected() as stored:
                return replace(stored, conclusive=True)
        outcome = self._answer(delivery)
        if isinstance(outcome, Delivered):
            self.effects[delivery.key] += 1
        if isinstance(outcome, Delivered | Rejected) and self.window is not None:
            self._answers[delivery.key] = outcome
        return outcome

    def _in_the_books(self, delivery: Delivery) -> Finding:
        executed = [each for each in self.deliveries if each.id == delivery.id and self.effects[each.key]]
        return Found({"id": str(delivery.id)}) if executed else Absent()


def _in_turn(outcomes: Iterable[Outcome]) -> Callable[[Delivery], Outcome]:
    remaining = iter(outcomes)
    return lambda delivery: next(remaining, None) or Delivered({"id": str(delivery.id)})
