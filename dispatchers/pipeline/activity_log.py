"""Collects the dispatcher's events for the app's observer, and reports them each second. No send waits for the observer."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from dispatchers.delivery import (
    Absent,
    CannotTell,
    Deferred,
    Delivered,
    Finding,
    Found,
    InProgress,
    KeyConflict,
    Outcome,
    Rejected,
    Unknown,
)
from dispatchers.pipeline.unstarted import BLOCKED
from dispatchers.store.protocol import Exchange
from dispatchers.telemetry.errors import ErrorReports, Reporter
from dispatchers.telemetry.events import Activity, Attempt, Event, GuardedObserver, Levels, Observer
from dispatchers.telemetry.log_ids import of_entry
from dispatchers.telemetry.tally import WAITED, Tally
from dispatchers.telemetry.tracing import GuardedTrace, Trace
from dispatchers.transitions import (
    AwaitLookup,
    ClaimedEntry,
    Ending,
    MarkUncertain,
    Release,
    Retry,
    RetryCallback,
    SendAgain,
    Settle,
    Transition,
)

log = logging.getLogger("outbox.dispatcher")

REPORT_SECONDS = 1.0
NO_SEND = "none"  # something other than a send blocked the event loop

_FINDINGS = (Found, Absent, CannotTell)  # a union type here would be built again for each attempt

_RESULTS: dict[type, str] = {
    Delivered: "delivered",
    Rejected: "rejected",
    KeyConflict: "key_conflict",
    Deferred: "deferred",
    InProgress: "in_progress",
    Unknown: "unknown",
    Found: "found",
    Absent: "absent",
    CannotTell: "cannot_tell",
}
_TRANSITIONS = {
    Retry: "retry",
    MarkUncertain: "uncertain",
    AwaitLookup: "await_lookup",
    SendAgain: "send_again",
    RetryCallback: "callback_retry",
    Release: "released",
}


class ActivityLog:
    """Counts attempts, claims and settlements between two reports.

    trace: begins a span for each attempt; None if there is no tracing.
    errors: reports unexpected exceptions to the app.
    tally: counts the attempts for the next heartbeat.
    is_observed: whether there is an observer. Without one nothing else is collected.
    """

    def __init__(self, observe: Observer | None, trace: Trace | None, report: Reporter | None = None) -> None:
        self.errors = ErrorReports(report)
        self.trace = None if trace is None else GuardedTrace(trace)
        self._observer = None if observe is None else GuardedObserver(observe)
        self.is_observed = observe is not None
        self.tally = Tally()
        self._levels: Callable[[], Levels] | None = None
        self._attempts: list[Attempt] = []
        self._claims: Counter[str] = Counter()
        self._settlements: Counter[tuple[str, str]] = Counter()
        self._lost: Counter[str] = Counter()
        self._blocked: dict[tuple[str, str], float] = {}
        self._skipped: Counter[str] = Counter()

    def observe(self, observe: Observer) -> None:
        """Report to this observer from now on."""
        self._observer, self.is_observed = GuardedObserver(observe), True

    def read_levels_from(self, levels: Callable[[], Levels]) -> None:
        self._levels = levels

    # --- called by the pipeline

    def note_attempt(self, entry: ClaimedEntry, answer: Outcome | Finding, *, seconds: float, waited: float) -> None:
        """waited: the seconds from the claim's start until the adapter was called."""
        is_lookup = isinstance(answer, _FINDINGS)
        result = result_of(answer)
        delay = None
        if entry.deliveries == 1 and not (is_lookup or entry.maybe_sent):
            delay = (entry.leased_at - max(entry.due_at, entry.created_at)).total_seconds() + waited
            self.tally.add(entry.destination, WAITED, delay)
        self.tally.add(entry.destination, result, seconds)
        if self.is_observed:
            self._attempts.append(Attempt(entry.destination, entry.operation, is_lookup, result, seconds, delay))

    def note_exchange(self, settlements: Sequence[Ending], exchange: Exchange) -> Sequence[Ending]:
        """Note the claims and settlements of an exchange, and log lost leases. Returns the settlements that were stored."""
        written, lost = settlements, list[Ending]()
        if len(exchange.settled) != len(settlements):
            written = [ending for ending in settlements if ending[0].lease in exchange.settled]
            ours = exchange.settled | exchange.postponed
            lost = [ending for ending in settlements if ending[0].lease not in ours]
        if lost:
            self.note_lost(lost)
        if self.is_observed:
            self._claims.update([entry.destination for entry in exchange.claimed])
            self._settlements.update([(entry.destination, _transition(change)) for entry, change in written])
        return written

    def note_settled(self, entry: ClaimedEntry, change: Transition) -> None:
        """Note an entry that settled together with its callback, in a transaction of its own."""
        if self.is_observed:
            self._settlements[entry.destination, _transition(change)] += 1

    def note_lost(self, lost: Sequence[Ending]) -> None:
        """Log the outcomes of a batch that were not stored, in one line."""
        lost = [ending for ending in lost if not _was_released_meanwhile(ending)]
        if not lost:
            return
        kinds = Counter(type(change).__name__ for _, change in lost)
        first = lost[0][0]
        log.warning(
            "%d outcomes were not stored (%s): their leases were lost. The entries were claimed again, by this process or another"
            " one, or have ended, or sending is suspended. The first is entry %s (%s)",
            len(lost),
            ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()),
            first.id,
            first.operation,
            extra=of_entry(first),
        )
        if self.is_observed:
            self._lost.update([entry.destination for entry, _ in lost])

    def note_blocked(self, destination: str | None, operation: str | None, seconds: float) -> None:
        """Note that the event loop was blocked. destination, operation: of the send that blocked it; None if no send did."""
        if self.is_observed:
            name = destination or NO_SEND, operation or NO_SEND
            self._blocked[name] = self._blocked.get(name, 0.0) + seconds

    def note_skipped(self, schedule: str, count: int) -> None:
        """Note instants of a schedule that were missed and are not enqueued."""
        if self.is_observed:
            self._skipped[schedule] += count

    # --- the reports

    @asynccontextmanager
    async def reporting(self) -> AsyncIterator[None]:
        """Report each second until the end of the block, and at its end."""
        if not self.is_observed:
            yield
            return
        reports = asyncio.ensure_future(self._report_regularly())
        try:
            yield
        finally:
            reports.cancel()
            self._report_all()

    async def _report_regularly(self) -> None:
        while True:
            self._report_all()
            await asyncio.sleep(REPORT_SECONDS)

    def _report_all(self) -> None:
        if self._attempts or self._claims or self._settlements or self._lost or self._blocked or self._skipped:
            activity = Activity(
                attempts=self._attempts,
                claims=self._claims,
                settlements=self._settlements,
                lost_leases=self._lost,
                blocked_seconds=self._blocked,
                skipped_instants=self._skipped,
            )
            self._attempts, self._claims, self._settlements, self._lost = [], Counter(), Counter(), Counter()
            self._blocked, self._skipped = {}, Counter()
            self.report(activity)
        if self._levels is not None:
            self.report(self._levels())

    def report(self, event: Event) -> None:
        if self._observer is not None:
            self._observer.report(event)


def _transition(change: Transition) -> str:
    return change.state if isinstance(change, Settle) else _TRANSITIONS[type(change)]


def result_of(answer: object) -> str:
    """The name of the answer's class, or of its base class. An object of another class is `unknown`."""
    if isinstance(answer, Delivered) and answer.replayed:
        return "replayed"
    result = _RESULTS.get(type(answer))  # finds nearly all answers
    if result is None:
        result = next((result for kind, result in _RESULTS.items() if isinstance(answer, kind)), "unknown")
    return result


def _was_released_meanwhile(ending: Ending) -> bool:
    """Whether another thread of this process has released the entry already, because the event loop was blocked."""
    _, change = ending
    return isinstance(change, Release) and change.reason == BLOCKED
