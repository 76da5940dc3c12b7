"""Entries that an adapter sends with one call of `send_batch`. Each ends once, with its own outcome."""

from collections.abc import Callable, Iterable, Sequence
from threading import get_ident

from dispatchers.delivery import Deferred, Delivery, Outcome
from dispatchers.pipeline.attempts import Attempts, delivery_of
from dispatchers.pipeline.routing import Route
from dispatchers.pipeline.sanitize import storable
from dispatchers.pipeline.send_queue import Work
from dispatchers.transitions import ClaimedEntry, Transition
from outbox.keys import Tag

NO_DELIVERY = Deferred("no delivery can be made from its row; the log shows why")


class Batch:
    """end: called once for each entry, with its outcome and its transition. Without a transition the lease must expire.

    began: when the adapter is called, by the process's clock.
    """

    def __init__(
        self,
        attempts: Attempts,
        route: Route,
        began: float,
        end: Callable[[ClaimedEntry, Outcome | None, Transition | None], None],
    ) -> None:
        self._attempts = attempts
        self._route = route
        self._began = began
        self._end = end
        self._unanswered: dict[int, tuple[ClaimedEntry, float]] = {}  # with the process's clock before the claim
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
                self._unanswered[len(deliveries)] = entry, started
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
        entry, started = found
        its: Outcome | None = None
        change: Transition | None = None
        try:
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
        for entry, _ in unanswered.values():
            self._end(entry, None, None)
