"""Sorts the entries of a claim: sends and status lookups become attempts; other transitions end the lease without a send."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from uuid import UUID

from dispatchers.decide import leave, leave_unopened, plan
from dispatchers.pipeline.attempt import Attempt, AttemptContext
from dispatchers.pipeline.routing import Route, Routes
from dispatchers.pipeline.scheduler import Scheduler
from dispatchers.transitions import ClaimedEntry, Lookup, Release, Send, Transition
from outbox.encryption import NO_KEYS, UNOPENED
from outbox.sql.schema.tables import ENCRYPTED_VERSION, SCHEMA_VERSION

UNSERVED_SECONDS = 5.0  # how long claims leave out a destination of which this process serves nothing


class Triage:
    """Calls `plan` for each claimed entry, and executes the result.

    context: what the attempts use. env: the deployment of this process, which is also the database's.
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

    def sort(
        self, claimed: Iterable[ClaimedEntry], claimed_at: float, unopened: Mapping[UUID, str] = MappingProxyType({})
    ) -> Iterator[Attempt]:
        """The attempts for the entries to send or to look up. claimed_at: the process's clock before the claim.

        unopened: why entries cannot be decrypted.
        """
        env = self._env()
        for entry in claimed:
            route = self._routes.find(entry.operation)
            why = unopened.get(entry.id) if unopened else None
            if route is None or (entry.schema_version > SCHEMA_VERSION and why is None):
                self._skip(entry, route)
                continue
            if not route.is_repeatable:
                self._scheduler.destinations.exclude(entry.destination)
            memory, jitter, sends_alike = route.memory, 0.0, True
            if entry.deliveries > 1 or entry.maybe_sent:  # for a first send no rule needs the memory
                memory, jitter = self._context.memory(entry, memory), self._context.rng.random()
                sends_alike = entry.in_doubt_since is None or route.sends_alike(entry)
            step = plan(entry, memory, entry.leased_at, jitter, env=env, alike=sends_alike)
            if why is not None:
                self._end(entry, leave_unopened(entry, step, why))
            elif isinstance(step, (Send, Lookup)):
                yield Attempt(entry, route, step, claimed_at, self._context)
            else:
                self._end(entry, step)

    def _skip(self, entry: ClaimedEntry, route: Route | None) -> None:
        """Leave the entry for other processes. If this one serves nothing of its destination, stop claiming there for a while."""
        destination, why, operation = entry.destination, "a newer release wrote it", None
        if entry.schema_version == ENCRYPTED_VERSION:
            why = f"{UNOPENED}: {NO_KEYS}"
        if route is None:
            operation = entry.operation
            why = f"no adapter of this dispatcher serves it{self._routes.suggestion(operation)}"
            if destination not in self._scheduler.own_destinations:
                self._scheduler.skip_until(destination, self._context.clock() + UNSERVED_SECONDS)
        self._scheduler.skip_operation(operation, destination)
        self._end(entry, leave(entry, why))

    def _end(self, entry: ClaimedEntry, change: Transition) -> None:
        if isinstance(change, Release) and change.shown:
            self._context.skipped.log_skipped(entry, change.reason)
        self._unsent(entry, change)
