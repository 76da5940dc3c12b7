"""The invariants of groups: one send at a time, in the order of the commits, and none after an entry that ended badly."""

from collections.abc import Callable, Collection
from typing import Any
from uuid import UUID

from dispatchers.transitions import ClaimedEntry, MarkUncertain, RetryCallback, Settle
from simulation.reference_rows import Entry
from simulation.trace import Send, Truth


class OrderingInvariants:
    """Knows which entry blocks each group. The order of the commits is that of the entries.

    An entry that was uncertain once may come later than those after it: an operator released them.
    """

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._blocked: dict[str, UUID] = {}
        self._was_uncertain: set[UUID] = set()
        self.on_block: Callable[[str], object] = lambda ordering_key: None

    # --- the database

    def claimed(self, entry: ClaimedEntry) -> None:
        """A dispatcher that claims it may send it: it must be the next of its group."""
        if entry.ordering_key is None or entry.outcome.known is not None or entry.outcome.lookup is not None:
            return
        queue = self._truth.store.queue
        for other in self._before(entry.id):
            is_waited_for = other.id in queue and queue[other.id].state != "uncertain"
            self._truth.require(not is_waited_for, entry.id, "claimed before another one of its group has ended")
            is_blocking = self._blocked.get(entry.ordering_key) == other.id
            self._truth.require(not is_blocking, entry.id, "claimed though its group is blocked")

    def require_not_stuck(self, ordering_key: str | None) -> None:
        """A transaction that takes an entry out of a group makes the next one due, unless the group is blocked."""
        store = self._truth.store
        waiting = [(row.position or 0, id) for id, row in store.queue.items() if row.ordering_key == ordering_key]
        waits = [(position, id) for position, id in waiting if store.queue[id].state != "uncertain"]
        if ordering_key is None or not waits or ordering_key in store.blocked_group:
            return
        first = min(waits)[1]
        self._truth.require(not store.queue[first].is_blocked, first, "the first of its group, and blocked by nothing")

    def settled(self, entry: ClaimedEntry, change: Any) -> None:
        if entry.ordering_key is None:
            return
        end = change.end if isinstance(change, RetryCallback) and isinstance(change.end, MarkUncertain) else change
        if isinstance(end, MarkUncertain):
            self._was_uncertain.add(entry.id)
        if self._is_bad_news(entry, end):
            self._blocked[entry.ordering_key] = entry.id
            self._truth.note(f"{entry.id.hex[:6]} blocks its group")
            self.on_block(entry.ordering_key)
        elif isinstance(end, Settle) and end.state == "delivered" and self._blocked.get(entry.ordering_key) == entry.id:
            del self._blocked[entry.ordering_key]

    def _is_bad_news(self, entry: ClaimedEntry, end: Any) -> bool:
        """An operator's decision is none, and an end that waited for its callback was when it was written down."""
        known = entry.outcome.known
        is_reported_already = known is not None and (known.attempts is None or known.state == "uncertain")
        is_bad = isinstance(end, MarkUncertain) or (isinstance(end, Settle) and end.state == "failed")
        return is_bad and not is_reported_already and self._truth.declared[entry.destination].failure_blocks_group

    def released(self, ordering_key: str) -> None:
        self._truth.note(f"{ordering_key} is released")
        self._blocked.pop(ordering_key, None)

    # --- the truth

    def sending(self, send: Send) -> None:
        """One at a time, as far as a lease goes. Late proof of success ends a lease whose holder may not know it yet."""
        lease = self._truth.trace(send.claimed.id).lease
        if lease is None or lease[0] != send.claimed.lease_token:
            return
        for other in self._before(send.claimed.id) + self._after(send.claimed.id):
            trace = self._truth.trace(other.id)
            token, until = trace.lease or (None, 0.0)
            is_under_way = any(each.claimed.lease_token == token for each in trace.sends)
            alone = until < self._truth.world.now or not is_under_way
            self._truth.require(alone, send.claimed.id, "sent while another one of its group is under way")

    def executed(self, send: Send) -> None:
        """In order, as far as what happens for the first time and was never given up."""
        id = send.claimed.id
        if self._truth.trace(id).effects.total() > 1 or id in self._was_uncertain or send.too_late:
            return
        for other in self._after(id):
            has_happened = self._truth.trace(other.id).effects.total() > 0
            self._truth.require(not has_happened, id, "it happened after one that comes later in its group")

    # --- the end

    def is_stuck(self, id: UUID, never: Collection[UUID]) -> bool:
        """Whether it waits for an earlier entry that needs an operator or an adapter.

        Where the one that blocked the group has ended, those before it wait too that are to be sent again.
        """
        key, queue = self._truth.entries[id].ordering_key, self._truth.store.queue
        if key is None:
            return False
        blocking = self._blocked.get(key)
        before = [other.id for other in self._before(id)]
        is_blocked = blocking is not None and (blocking in before or blocking not in queue)
        return is_blocked or any(other in never and other in queue for other in before)

    # --- groups

    def _before(self, id: UUID) -> list[Entry]:
        return self._split(id)[0]

    def _after(self, id: UUID) -> list[Entry]:
        return self._split(id)[1]

    def _split(self, id: UUID) -> tuple[list[Entry], list[Entry]]:
        """The others of its group, by their place in the commit order."""
        this = self._truth.entries[id]
        before: list[Entry] = []
        after: list[Entry] = []
        others = before
        for other in self._truth.entries.values() if this.ordering_key is not None else ():
            if other is this:
                others = after
            elif other.ordering_key == this.ordering_key:
                others.append(other)
        return before, after
