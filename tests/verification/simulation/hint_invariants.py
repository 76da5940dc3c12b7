"""The invariant of hints: a dispatcher that has room when it hears of an entry asks for its destination soon."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from uuid import UUID

from dispatchers.flow_control.state import FlowState, service_of
from dispatchers.transitions import ClaimedEntry
from outbox.sql.postgresql.hint_messages import Due
from outbox.sql.schema.tables import SCHEMA_VERSION
from simulation.reference_history import is_suspended
from simulation.trace import Truth
from simulation.world import Process

SOON_SECONDS = 0.4  # much longer than a few claims, shorter than the time between two sweeps or polls
SLOW_SECONDS = 0.1  # longer than a request takes if nothing is wrong
CALM_SECONDS = 10.0  # after a failed request a dispatcher may wait for as long


class HintInvariants:
    """Knows what each process has asked for, what it has claimed, and when a request of it failed or was slow.

    has_budgets: whether a process may claim many entries at a time. called_back: the destinations whose callbacks limit that.
    serves: the destinations of each process. is_stopping: whether it only finishes what it has.
    """

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._asked: dict[tuple[Process, str], float] = {}
        self._requests: dict[Process, dict[object, float]] = defaultdict(dict)  # since when each is unanswered
        self._troubled: dict[Process, float] = {}
        self._claimed: dict[Process, float] = {}
        self._holders: dict[UUID, Process] = {}  # by lease token
        self.has_budgets = False
        self.called_back: Collection[str] = ()
        self.serves: dict[Process, Collection[str]] = {}
        self.is_stopping: dict[Process, Callable[[], bool]] = {}

    # --- the requests of a process

    def requesting(self, process: Process) -> object:
        request = object()
        self._requests[process][request] = self._truth.world.now
        return request

    def answered(self, process: Process, request: object, *, failed: bool) -> None:
        now = self._truth.world.now
        began = self._requests[process].pop(request)
        if failed or now - began > SLOW_SECONDS:
            self._troubled[process] = now

    def asked(self, process: Process, destinations: Collection[str], claimed: Collection[ClaimedEntry]) -> None:
        """The server has served a claim."""
        now = self._truth.world.now
        self._asked.update({(process, name): now for name in destinations})
        if claimed:
            self._claimed[process] = now
            self._holders.update({entry.lease_token: process for entry in claimed})

    # --- hints

    def heard(self, process: Process, due: Due) -> None:
        """due: None for anything; the claims that follow name no destination then."""
        self._truth.note(f"{process.name} hears a hint")
        for name in sorted({destination for destination, _ in due or ()}):
            found = self._claimable(name) if self._has_room(process, name) else None
            if found is not None and service_of(name) in self.serves[process]:
                self._truth.world.at(SOON_SECONDS, self._check, process, name, found, self._truth.world.now)

    def _check(self, process: Process, name: str, id: UUID, since: float) -> None:
        """id: an entry that could be claimed when the process heard of its destination."""
        had_room = self._has_room(process, name, since) and not process.frozen_seconds(since)
        if had_room and self._claimable(name, id) is not None:
            has_asked = self._asked.get((process, name), -1.0) >= since
            self._truth.require(has_asked, id, f"{process.name} heard of it, and did not ask for it soon")

    def _has_room(self, process: Process, name: str, since: float = math.inf) -> bool:
        """Whether nothing keeps the process from a claim. since: without budgets, it must have claimed nothing since then."""
        if not self._is_well(process):
            return False
        if self.has_budgets and service_of(name) not in self.called_back:
            return True
        leased = [row.lease_token for row in self._truth.store.queue.values() if row.lease_token is not None]
        has_claimed = self._claimed.get(process, -1.0) >= since
        return not has_claimed and not any(self._holders.get(token) is process for token in leased)

    def _is_well(self, process: Process) -> bool:
        now = self._truth.world.now
        is_up = process.alive and now >= process.frozen_until and not self.is_stopping[process]()
        is_calm = now - self._troubled.get(process, -CALM_SECONDS) >= CALM_SECONDS
        is_calm = is_calm and all(now - began <= SLOW_SECONDS for began in self._requests[process].values())
        return is_up and is_calm

    def _claimable(self, name: str, id: UUID | None = None) -> UUID | None:
        """An entry of this destination, or only this one, if nothing stops its claim."""
        store = self._truth.store
        is_open = all(store.flow.get(each, FlowState()) == FlowState() for each in (name, service_of(name)))
        if not is_open or is_suspended(store):
            return None
        return next((each for each in ([id] if id else store.queue) if self._is_claimable(each, name)), None)

    def _is_claimable(self, id: UUID, name: str) -> bool:
        store = self._truth.store
        row = store.queue.get(id)
        if row is None or row.lease_token is not None or id in store.locked or row.due_at > store.clock():
            return False
        entry = store.entries[id]
        is_plain = row.callback is None and row.known is None and entry.schema_version <= SCHEMA_VERSION
        return entry.destination == name and is_plain
