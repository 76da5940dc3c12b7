"""What an attempt needs before the adapter is called, and which transition the adapter's answer leads to."""

import logging
import random
from collections.abc import Callable
from datetime import datetime, timedelta

from dispatchers.decide import decide, decide_lookup, too_late
from dispatchers.delivery import Delivered, Delivery, Finding, Outcome
from dispatchers.pipeline.activity_log import ActivityLog
from dispatchers.pipeline.flow_monitor import FlowMonitor
from dispatchers.pipeline.routing import Route
from dispatchers.pipeline.unstarted import BLOCKED, Unstarted
from dispatchers.transitions import ClaimedEntry, Lookup, Release, Send, Transition
from outbox.keys import Tag

log = logging.getLogger("outbox.dispatcher")


class Attempts:
    """usable: the part of a lease in which an answer may arrive. flow: stores which destinations were paused.

    unstarted: what has not begun; another thread may take it.
    """

    def __init__(
        self,
        *,
        usable: timedelta,
        clock: Callable[[], float],
        rng: random.Random,
        flow: FlowMonitor,
        activity: ActivityLog,
        unstarted: Unstarted,
    ) -> None:
        self._unstarted = unstarted
        self._usable_seconds = usable.total_seconds()
        self._clock = clock
        self._rng = rng
        self._flow = flow
        self._activity = activity

    def refusal(self, entry: ClaimedEntry, route: Route, step: Send | Lookup, started: float) -> Transition | None:
        """Why nothing may be sent or looked up now: the window is over, the lease could end before the answer, or it was taken.

        After None the entry counts as begun: call the adapter next.
        """
        before = step.before if isinstance(step, Send) else None
        if before is not None and (now := self.database_now(entry, started)) >= before:
            return too_late(entry, route.memory, now)
        if self._clock() - started > self._usable_seconds - route.timeout_seconds:
            return Release("its lease was nearly over when it could be sent")
        return None if self._unstarted.begin(entry) else Release(BLOCKED)

    def note(self, entry: ClaimedEntry, answer: Outcome | Finding, began: float, started: float) -> None:
        """Count the attempt. began: when the adapter was called. started: before the claim; both by the process's clock."""
        self._activity.note_attempt(entry, answer, seconds=self._clock() - began, waited=began - started)

    def after_send(self, entry: ClaimedEntry, route: Route, outcome: Outcome, started: float) -> Transition:
        if isinstance(outcome, Delivered):  # neither the time nor the jitter matters for it
            return decide(entry, outcome, route.memory, entry.leased_at, 0.0)
        memory = self._flow.memory(entry, route.memory)
        return decide(entry, outcome, memory, self.database_now(entry, started), self._rng.random())

    def after_lookup(
        self, entry: ClaimedEntry, route: Route, step: Lookup, finding: Finding, started: float
    ) -> Transition:
        memory, now = self._flow.memory(entry, route.memory), self.database_now(entry, started)
        return decide_lookup(entry, step.state, finding, memory, now, self._rng.random())

    def report(self, entry: ClaimedEntry, error: Exception) -> None:
        """Log a bug in this library. The entry's lease must expire, and its outcome counts as unknown."""
        log.exception(
            "entry %s (%s): internal error; its lease will expire, and a dispatcher will claim it again",
            entry.id,
            entry.operation,
        )
        self._activity.errors.report("dispatcher", error, entry)

    def database_now(self, entry: ClaimedEntry, started: float) -> datetime:
        """The database's time, never too early: its clock at the lease's start, plus the time since before the claim."""
        return entry.leased_at + timedelta(seconds=self._clock() - started)


def delivery_of(entry: ClaimedEntry, route: Route, tag: Tag, deadline: float) -> Delivery | None:
    """The delivery for the adapter; None if it cannot be made, for a reason that is logged."""
    try:
        return Delivery(
            entry.id,
            entry.operation,
            entry.payload,
            route.encode_key(tag),
            entry.attempts + 1,
            entry.options,
            entry.headers,
            deadline,
            entry.due_at,
            entry.leased_at - entry.created_at,
            entry.ordering_key,
        )
    except Exception:
        log.exception(
            "entry %s (%s): cannot be sent, because no delivery can be made from its row; the traceback follows",
            entry.id,
            entry.operation,
        )
        return None
