"""The events that a dispatcher reports to its observer: `Dispatcher(observe=...)`. The bindings count and export it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import NamedTuple, Protocol, TypeAlias

from outbox.errors import ConfigurationError

log = logging.getLogger("outbox.observer")


class Attempt(NamedTuple):
    """One send or status lookup that has ended. (A tuple: it is made for each of them.)

    result: of a send `delivered`, `replayed` (the service says that it repeated an earlier answer), `rejected`, `key_conflict`,
        `deferred`, `in_progress` or `unknown`; of a lookup `found`, `absent` or `cannot_tell`.
    seconds: until the adapter answered.
    delay_seconds: of a first send: how long before it the entry was enqueued, or became due if that was later; else None.
    """

    destination: str
    operation: str
    is_lookup: bool
    result: str
    seconds: float
    delay_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a dispatcher has done since its last report, a second ago or less.

    claims: entries claimed, by destination. settlements: leases ended with a transition, by destination and transition:
        `delivered`, `failed`, `cancelled`, `retry`, `uncertain`, `await_lookup`, `send_again`, `callback_retry` or `released`.
    lost_leases: by destination: another process has claimed the entry before this one settled it.
    blocked_seconds: how long the event loop was blocked, by the destination and the operation whose send blocked it; `none` for
        what was no send. Blocks of less than 5 s, or a quarter of a short lease, are not counted.
    skipped_instants: instants that were missed and not enqueued, by schedule; of more than 1000 at a time only so many.
    """

    attempts: Sequence[Attempt]
    claims: Mapping[str, int]
    settlements: Mapping[tuple[str, str], int]
    lost_leases: Mapping[str, int]
    blocked_seconds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    skipped_instants: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """The state of a dispatcher at this moment; reported each second.

    in_flight: sends and lookups under way, by destination. claimed_ahead: entries that wait for a permit.
    permits: how many sends of a destination may be in flight.
    callbacks_waiting: entries that wait for their callback, with those whose callback runs.
    unsettled: outcomes that the database has not taken yet.
    throttled: why nothing is claimed for a destination: `paused`, `breaker` or `cooldown`.
    suspended: whether sending is suspended after a failover or a restore.
    served: whether the database answers, and admits this dispatcher.
    """

    in_flight: Mapping[str, int]
    claimed_ahead: Mapping[str, int]
    permits: Mapping[str, int]
    callbacks_waiting: int
    unsettled: int
    throttled: Mapping[str, str]
    suspended: bool
    served: bool


UNSERVED = Levels(
    in_flight={},
    claimed_ahead={},
    permits={},
    callbacks_waiting=0,
    unsettled=0,
    throttled={},
    suspended=False,
    served=False,
)
"""The levels of a database that a fleet names, and that is not served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What waits in the database, for all dispatchers; `outbox run` reads it each minute.

    entries: those that have not ended, by destination and state; of a long queue at least so many.
    oldest_due_seconds: how long the oldest due entry of a destination has waited for a claim; without those where nothing waits.
    blocked_groups: ordering groups that an operator must release.
    schedule_lag_seconds: for how long each schedule of this dispatcher has been due, 0 if it is not; without paused ones.
    """

    entries: Mapping[tuple[str, str], int]
    oldest_due_seconds: Mapping[str, float]
    blocked_groups: int
    schedule_lag_seconds: Mapping[str, float] = field(default_factory=dict)


Event: TypeAlias = Activity | Levels | Backlog
Observer: TypeAlias = Callable[[Event], object]


class Observers(Protocol):
    """What `Fleet(observe=...)` takes: an observer of each database's events."""

    def of(self, database: str, /) -> Observer:
        """The observer of this database, by its name in the fleet."""
        ...

    def forget(self, database: str, /) -> None:
        """The fleet does not serve this database any more: its last levels and its backlog mean nothing now."""
        ...


class GuardedObserver:
    """Calls an app's observer. An exception in it fails no send: the first one is logged."""

    def __init__(self, observe: Observer) -> None:
        if not callable(observe) or iscoroutinefunction(observe):
            raise ConfigurationError(
                "observe must be a plain function of one event of dispatchers.telemetry.events,"
                f" not {observe!r}: it is called, and not awaited, on the dispatcher's event loop"
            )
        self._observe = observe
        self._has_failed = False

    def report(self, event: Event) -> None:
        try:
            self._observe(event)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                log.exception("observe= raised; sending is not affected, and its further errors are not logged")
