"""The invariants of destinations: nothing while they are paused, no more than their rate and permits, and no age meanwhile."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dispatchers.flow_control.state import Limits, service_of
from dispatchers.transitions import ClaimedEntry
from simulation.trace import LEASE, Send, Truth

ROUNDING = 1e-4  # of an entry: instants are rounded
STALE_SECONDS = 10.0  # a dispatcher that looked before a pause, and asked after it, may not know of it


class FlowControlInvariants:
    """Counts each destination's claims by a bucket of tokens, which the dispatcher does by another rule."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self.limits: Mapping[str, Limits] = {}
        self._paused: set[str] = set()
        self._resumed_at: dict[str, float] = {}
        self._tokens: dict[str, tuple[float, float]] = {}  # how many there were, and when
        self._sender: dict[str, list[Send]] = {}
        self._restored_at = 0.0

    def paused(self, destination: str) -> None:
        self._truth.note(f"{destination} is paused")
        self._paused.add(destination)

    def resumed(self, destination: str) -> None:
        self._truth.note(f"{destination} is resumed")
        self._paused.discard(destination)
        self._resumed_at[destination] = self._truth.world.now

    def restored(self) -> None:
        """What people said since the backup is forgotten, what was used up of a rate, and which permits were taken."""
        rows = self._truth.store.flow
        self._paused = {name for name, row in rows.items() if row.paused}
        self._resumed_at = {name: self._truth.instant(row.resumed_at) for name, row in rows.items() if row.resumed_at}
        self._tokens.clear()
        self._restored_at = self._truth.world.now

    # --- claims

    def claimed(self, entries: Sequence[ClaimedEntry]) -> None:
        for entry in [entry for entry in entries if not entry.is_known]:  # the others are not sent
            is_paused = entry.destination in self._paused
            self._truth.require(not is_paused, entry.id, "claimed though its destination is paused")
            if (limits := self.limits.get(entry.destination)) is not None and limits.rate is not None:
                left = self._take_token(entry.destination, limits.rate, limits.burst)
                self._truth.require(left > -ROUNDING, entry.id, "claimed beyond the rate")

    def released(self, destination: str, entries: int) -> None:
        """They were claimed, and not sent."""
        if destination in self._tokens:
            tokens, at = self._tokens[destination]
            self._tokens[destination] = tokens + entries, at

    def _take_token(self, destination: str, rate: float, burst: int | None) -> float:
        most, now = float(burst or max(1, math.floor(rate))), self._truth.world.now
        tokens, at = self._tokens.get(destination, (most, now))
        left = min(most, tokens + (now - at) * rate) - 1
        self._tokens[destination] = left, now
        return left

    # --- sends

    def sending(self, send: Send) -> None:
        """Check the number of concurrent sends. Those of dead processes count while their leases last."""
        name = send.claimed.destination
        limits = self.limits.get(name)
        if limits is not None and limits.total_concurrency is not None:
            self._sender[name] = under_way = [*filter(self._is_under_way, self._sender.get(name, [])), send]
            self._truth.require(len(under_way) <= limits.total_concurrency, send.claimed.id, "too many sends")

    def _is_under_way(self, send: Send) -> bool:
        leased_at = self._truth.instant(send.claimed.leased_at)
        is_leased = self._restored_at <= leased_at and self._truth.world.now < leased_at + LEASE.total_seconds()
        return is_leased and not send.is_over

    # --- age

    def age(self, entry: ClaimedEntry) -> float:
        """How old it is now, in seconds: since it was claimed first, or its destination was resumed."""
        since = max(self._truth.instant(entry.first_leased_at), self._resumed_at.get(entry.destination, 0.0))
        return self._truth.world.now - since

    def settled(self, entry: ClaimedEntry, change: Any) -> None:
        """Nothing is given up for its age but what is old; a process that froze knows of nothing since.

        An end that waits for its callback was decided earlier, by what was true then.
        """
        if entry.outcome.known is not None:
            return
        took = self._truth.world.now - self._truth.instant(entry.leased_at)
        if took < STALE_SECONDS and "the age limit of" in (getattr(change, "reason", None) or ""):
            oldest = self._truth.declared[service_of(entry.destination)].max_age.total_seconds()
            is_old = self.age(entry) >= oldest - STALE_SECONDS
            self._truth.require(is_old, entry.id, "given up for its age, which a pause had stopped")
