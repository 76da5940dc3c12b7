"""Entries that an adapter sends with one call of `send_batch`. Each ends once, with its own outcome."""

from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from threading import get_ident
from typing import NamedTuple

from dispatchers.delivery import Deferred, Delivery, Outcome
from dispatchers.pipeline.activity_log import result_of
from dispatchers.pipeline.attempts import Attempts, delivery_of
from dispatchers.pipeline.routing import Route
from dispatchers.pipeline.sanitize import storable
from dispatchers.pipeline.send_queue import Work
from dispatchers.telemetry.tracing import End, GuardedTrace
from dispatchers.transitions import ClaimedEntry, Transition
from outbox.keys import Tag

NO_DELIVERY = Deferred("no delivery can be made from its row; the log shows why")


class Unanswered(NamedTuple):
    """started: the process's clock before the claim. end_span: ends its span, if there is one."""

    entry: ClaimedEntry
    started: float
    end_span: End | None


class Batch:
    """end: called once for each entry, with its outcome and its transition. Without a transition the lease must expire.

    began: when the adapter is called, by the process's clock. trace: begins a span for each entry. None of them is current in the
    adapter, which sends all of them.
    """

    def __init__(
        self,
        attempts: Attempts,
        route: Route,
        began: float,
        end: Callable[[ClaimedEntry, Outcome | None, Transition | None], None],
        trace: GuardedTrace | None,
    ) -> None:
        self._attempts = attempts
        self._route = route
        self._began = began
        self._end = end
        self._trace = trace
        self._unanswered: dict[int, Unanswered] = {}
        self._thread = get_ident()
        self.deliveries: Sequence[Delivery] = ()

    def fill(self, works: Iterable[Work], deadline: float) -> None:
        """Make the deliveries. End the entries that may not be sent any more, or of which no delivery can be made."""
        deliveries = list[Delivery]()
        for work in works:
            entry, route, step, started = work
            try:
                delivery = delivery_of(entry, route, Tag(entry.tag), deadline)
                change = self._attempts.refusal(entry, route, step, started)
                if change is None and delivery is None:
                    change = self._attempts.after_send(entry, route, NO_DELIVERY, started)
            except Exception as error:
                self._attempts.report(entry, error)
                delivery = change = None
            if change is not None or delivery is None:
                self._end(entry, None, change)
            else:
                end_span = None
                if self._trace is not None:
                    delivery, end_span = _begin_span(self._trace, delivery, entry)
                self._unanswered[len(deliveries)] = Unanswered(entry, started, end_span)
                deliveries.append(delivery)
        self.deliveries = tuple(deliveries)  # the adapter must not change the places

    def answered(self, number: int, outcome: Outcome) -> None:
        """End the entry of this delivery. A second outcome changes nothing.

        Raises TypeError or IndexError if there is no such delivery, and RuntimeError in another thread.
        """
        if type(number) is not int:
            raise TypeError(f"the number of a delivery must be an int, not {number!r}")
        if not 0 <= number < len(self.deliveries):
            raise IndexError(f"there is no delivery {number}: this batch has {len(self.deliveries)}")
        if get_ident() != self._thread:
            raise RuntimeError("an outcome must be reported in the thread that called send_batch")
        self._end_one(number, outcome)

    def _end_one(self, number: int, outcome: Outcome) -> None:
        found = self._unanswered.pop(number, None)
        if found is None:
            return
        entry, started, end_span = found
        its: Outcome | None = None
        change: Transition | None = None
        try:
            if end_span is not None:
                end_span(result_of(outcome))
            its = storable(outcome)
            self._attempts.note(entry, its, self._began, started)
            change = self._attempts.after_send(entry, self._route, its, started)
        except Exception as error:
            self._attempts.report(entry, error)
        finally:
            self._end(entry, its, change)

    def end_with(self, outcome: Outcome) -> None:
        """End all entries without an outcome in this way."""
        for number in list(self._unanswered):
            self._end_one(number, outcome)

    def abandon(self) -> None:
        """Leave the entries without an outcome in doubt: their leases expire."""
        unanswered, self._unanswered = self._unanswered, {}
        for entry, _, end_span in unanswered.values():
            if end_span is not None:
                end_span(None)
            self._end(entry, None, None)


def _begin_span(trace: GuardedTrace, delivery: Delivery, entry: ClaimedEntry) -> tuple[Delivery, End]:
    """As `GuardedTrace.attempt` does, in a context of its own: the spans of a batch end in any order, and in any task."""
    context = copy_context()
    delivery, end = context.run(trace.attempt, delivery, entry, is_lookup=False)
    return delivery, lambda result: context.run(end, result)
