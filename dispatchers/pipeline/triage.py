"""What becomes of a claim before anything is sent: it is sent, looked for, concluded from what is on record, or handed back."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta

from dispatchers.decide import admit, conclude, has_no_taker
from dispatchers.decide_lookup import admit_lookup
from dispatchers.delivery import Outcome
from dispatchers.pipeline.flow_monitor import FlowMonitor
from dispatchers.pipeline.routing import Route, Routes
from dispatchers.pipeline.scheduler import Scheduler
from dispatchers.pipeline.unserved_log import UnservedLog
from dispatchers.stored_outcome import SEND_AGAIN, Known, LookupState
from dispatchers.transitions import (
    ClaimedEntry,
    MarkUncertain,
    Release,
    Settle,
    Transition,
)
from outbox.sql.schema import SCHEMA_VERSION

PINNED_DELAY = timedelta(seconds=2)  # until what was sent in another form is claimed again: few, in flight at a deploy
FOREIGN_DELAY = timedelta(days=1)  # until an entry of another env is claimed, and reported, again
CANCELLED_DELAY = timedelta(
    seconds=2
)  # until an entry that others serve, and an operator has cancelled, is claimed again
UNSERVED_SECONDS = 5.0  # how long it leaves a destination alone of which it serves nothing


class Triage:
    """Sorts claims.

    env: this process's, which is the database's. fencing_delay: after a lease's start, by when any earlier sender has noticed
    that it lost it. flow: knows what to believe of a service's memory. done: called with each entry that is not sent.
    """

    def __init__(
        self,
        routes: Routes,
        turns: Scheduler,
        *,
        env: Callable[[], str],
        fencing_delay: timedelta,
        clock: Callable[[], float],
        flow: FlowMonitor,
        done: Callable[[ClaimedEntry, Outcome | None, Transition | None], None],
    ) -> None:
        self._routes = routes
        self._scheduler = turns
        self._env = env
        self._fencing_delay = fencing_delay
        self._clock = clock
        self._flow = flow
        self._done = done
        self._reports = UnservedLog(clock)

    def sort(self, claimed: Iterable[ClaimedEntry], started: float) -> Iterator[tuple[ClaimedEntry, Route, float]]:
        """The claims that this process may send or look for, each with its route and our clock before the claim."""
        env = self._env()
        for entry in claimed:
            route = self._routes.find(entry.operation)
            if route is None:
                self._leave_unserved(entry)
            elif entry.schema_version > SCHEMA_VERSION:
                self._scheduler.pass_over(None, entry.destination)
                self._leave_to_others(entry, "a newer release wrote it")
            elif entry.env != env and not _has_ended(entry):
                self._leave_foreign(entry, env)
            elif (known := entry.outcome.known) is not None:
                self._conclude(entry, known, route)
            elif (looks := entry.outcome.lookup) is not None:
                if self._may_look(entry, looks, route):
                    yield entry, route, started
            elif entry.in_doubt_since is not None and not route.sends_alike(entry):
                self._leave_pinned(entry, route)
            else:
                yield entry, route, started

    def _leave_unserved(self, entry: ClaimedEntry) -> None:
        """Another process may serve it. A destination that is none of ours is left alone, for those whose it is."""
        self._scheduler.pass_over(entry.operation, entry.destination)
        if entry.destination not in self._scheduler.home:
            self._scheduler.leave_alone(entry.destination, self._clock() + UNSERVED_SECONDS)
        self._leave_to_others(entry, f"no adapter here serves it{self._routes.suggestion(entry.operation)}")

    def _leave_to_others(self, entry: ClaimedEntry, reason: str) -> None:
        """What is on record for it is for those who serve it; only a cancellation that they leave for long is concluded here.

        Claims do not pass over one that is cancelled: it is claimed again after a while, and not at once.
        """
        known = entry.outcome.known
        if known is not None and has_no_taker(known, entry.leased_at):
            self._turn_back(entry, Settle("cancelled", entry.attempts, reason=known.reason, decided=True))
        else:
            self._leave(entry, reason, timedelta(0) if known is None else CANCELLED_DELAY)

    def _leave_foreign(self, entry: ClaimedEntry, env: str) -> None:
        """It is neither sent nor looked for: the deployment that it names may send it, too."""
        reason = (
            f"it is of env {entry.env!r}, and this database is of env {env!r}, so no dispatcher here sends it: an app with"
            f" another OUTBOX_ENV enqueued it here; `outbox cancel {entry.id}` ends it"
        )
        self._leave(entry, reason, FOREIGN_DELAY)

    def _may_look(self, entry: ClaimedEntry, looks: LookupState, route: Route) -> bool:
        memory = self._flow.memory(entry, route.memory)
        change = admit_lookup(entry, looks, memory, entry.leased_at, route.form)
        if change is None:
            return True
        self._turn_back(entry, change)
        return False

    def _leave_pinned(self, entry: ClaimedEntry, route: Route) -> None:
        """It may have been sent in another form. That waits for a process of that form, but not past the window."""
        past = admit(entry, replace(route.memory, can_look_up=False), entry.leased_at)  # nor may it be looked for so
        if isinstance(past, MarkUncertain):
            self._turn_back(entry, past)
        else:
            reason = f"it was sent as {entry.sent_as!r}; the adapter would now send it as {route.form!r}"
            self._leave(entry, reason, PINNED_DELAY, served=True)

    def _leave(
        self, entry: ClaimedEntry, reason: str, delay: timedelta = timedelta(0), *, served: bool = False
    ) -> None:
        self._reports.leave(entry, reason)
        self._turn_back(entry, Release(reason, delay, shown=True, served=served))

    def _conclude(self, entry: ClaimedEntry, known: Known, route: Route) -> None:
        """What becomes of it is on record already: a person's decision, or an outcome whose callback failed."""
        self._turn_back(entry, conclude(entry, known, route.memory, self._fencing_delay))

    def _turn_back(self, entry: ClaimedEntry, change: Transition) -> None:
        self._done(entry, None, change)


def _has_ended(entry: ClaimedEntry) -> bool:
    """Whether what becomes of it is on record, and that is no sending."""
    known = entry.outcome.known
    return known is not None and known.state != SEND_AGAIN
