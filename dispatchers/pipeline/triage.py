"""Sorts the entries of a claim: sends and status lookups become attempts; every other transition ends the lease at once."""

from collections.abc import Callable, Iterable, Iterator

from dispatchers.decide import leave, plan
from dispatchers.pipeline.attempt import Attempt, AttemptContext
from dispatchers.pipeline.routing import Route, Routes, UnservedLog
from dispatchers.pipeline.scheduler import Scheduler
from dispatchers.transitions import ClaimedEntry, Lookup, Plan, Release, Send, Transition
from outbox.sql.schema import SCHEMA_VERSION

UNSERVED_SECONDS = 5.0  # pause of the claims for a destination of which this process serves nothing


class Triage:
    """Calls `plan` for each claimed entry, and executes the result.

    context: of the attempts. env: of this process, which is also the database's.
    unsent: called for each entry that is not sent.
    """

    def __init__(
        self,
        routes: Routes,
        scheduler: Scheduler,
        context: AttemptContext,
        *,
        env: Callable[[], str],
        unsent: Callable[[ClaimedEntry, Transition], None],
    ) -> None:
        self._routes = routes
        self._scheduler = scheduler
        self._context = context
        self._env = env
        self._unsent = unsent
        self._reports = UnservedLog(context.clock)

    def sort(self, claimed: Iterable[ClaimedEntry], claimed_at: float) -> Iterator[Attempt]:
        """The attempts for the entries to send or to look up. claimed_at: the process's clock before the claim."""
        env = self._env()
        for entry in claimed:
            route = self._routes.find(entry.operation)
            if route is None:
                self._skip_unserved(entry)
                continue
            if entry.schema_version > SCHEMA_VERSION:
                self._skip_unreadable(entry)
                continue
            if not route.is_repeatable:
                self._scheduler.destinations.exclude(entry.destination)
            if entry.deliveries == 1 and not entry.maybe_sent:  # no rule needs the jitter, a pause or the form
                step = plan(entry, route.memory, entry.leased_at, 0.0, env=env, alike=True)
            else:
                step = self._plan_again(entry, route, env)
            if isinstance(step, (Send, Lookup)):
                yield Attempt(entry, route, step, claimed_at, self._context)
            else:
                self._decide_unsent(entry, step)

    def _plan_again(self, entry: ClaimedEntry, route: Route, env: str) -> Plan:
        memory = self._context.memory(entry, route.memory)
        alike = entry.in_doubt_since is None or route.sends_alike(entry)
        return plan(entry, memory, entry.leased_at, self._context.rng.random(), env=env, alike=alike)

    def _skip_unserved(self, entry: ClaimedEntry) -> None:
        """Leave the entry for other processes. If this one serves nothing of its destination, stop claiming there for a while."""
        self._scheduler.skip_operation(entry.operation, entry.destination)
        if entry.destination not in self._scheduler.own_destinations:
            self._scheduler.skip_until(entry.destination, self._context.clock() + UNSERVED_SECONDS)
        suggestion = self._routes.suggestion(entry.operation)
        self._decide_unsent(entry, leave(entry, f"no adapter of this dispatcher serves it{suggestion}"))

    def _skip_unreadable(self, entry: ClaimedEntry) -> None:
        self._scheduler.skip_operation(None, entry.destination)
        self._decide_unsent(entry, leave(entry, "a newer release wrote it"))

    def _decide_unsent(self, entry: ClaimedEntry, change: Transition) -> None:
        if isinstance(change, Release) and change.shown:
            self._reports.log_skipped(entry, change.reason)
        self._unsent(entry, change)
