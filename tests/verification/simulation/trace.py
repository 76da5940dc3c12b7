"""What is known of the truth: every send, every effect, every entry's trace."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from dispatchers.time_limits import Window
from dispatchers.transitions import ClaimedEntry
from simulation.reference import ReferenceStore
from simulation.reference_rows import Entry
from simulation.world import Process, World

LEASE = timedelta(seconds=6)
MARGIN = timedelta(seconds=0.5)
TIMEOUT = timedelta(seconds=2.5)
FENCING_DELAY = LEASE + MARGIN


class InvariantViolated(AssertionError):
    """What must never be seen."""


@dataclass(slots=True)
class Send:
    """One call of an adapter. claimed: under which claim. form: what it is pinned to. began: by the world's clock, as all
        instants here.

    harmless: its outcome said that it was certainly not executed. has_left: it does not need its process any more.
    is_answered: the service is done with it. is_over: so is the adapter, or it gave up. decided_at: its outcome was.
    is_gone: it was lost, or never left. too_late: its process froze, and the service may have forgotten the key meanwhile.
    """

    claimed: ClaimedEntry
    process: Process
    began: float
    service: "Declared"
    form: str = ""
    harmless: bool = False
    has_left: bool = False
    has_arrived: bool = False
    is_answered: bool = False
    is_over: bool = False
    decided_at: float | None = None
    is_gone: bool = False
    too_late: bool = False
    is_forgotten: bool = False  # with its key, or its entry: a restore took it

    @property
    def may_arrive(self) -> bool:
        return not self.has_arrived and not self.is_gone and (self.has_left or self.process.alive)

    @property
    def may_happen(self) -> bool:
        return not self.is_answered and (self.has_arrived or self.may_arrive)


@dataclass(frozen=True, slots=True)
class Declared:
    """What an adapter declares of its service."""

    name: str
    window: Window
    at_least_once: bool
    max_attempts: int
    max_age: timedelta
    shows_what_it_did: bool = False
    failure_blocks_group: bool = True


@dataclass(slots=True)
class Trace:
    """What really became of one entry."""

    sends: list[Send] = field(default_factory=list)
    effects: Counter[int] = field(default_factory=Counter)  # by key epoch
    late_effects: int = 0  # those of sends that came too late
    lease: tuple[UUID, float] | None = None  # token, until
    deliveries: int = 0
    sends_before: int = 0  # an operator decided "send again"
    was_in_doubt: bool = False
    in_doubt: tuple[int, Any] = (0, None)  # key epoch, since
    reported: list[str] = field(default_factory=list)
    is_cancelled_by_app: bool = False
    ended_before_its_callback: bool = False  # before any dispatcher had one
    was_set_back: bool = False  # by a restore: its holder still counts what the database has lost


class Truth:
    """All that is known of a run. log: what happened, step by step. declared: the services, by destination."""

    store: ReferenceStore

    def __init__(self, world: World, start: datetime) -> None:
        self.world = world
        self._start = start
        self.traces: dict[UUID, Trace] = {}
        self.declared: dict[str, Declared] = {}
        self.entries: dict[UUID, Entry] = {}  # those too that a restore has made the database forget
        self.log: list[str] = []

    def trace(self, id: UUID) -> Trace:
        return self.traces.setdefault(id, Trace())

    def note(self, text: str) -> None:
        self.log.append(f"{self.world.now:.6f} {text}")

    def require(self, holds: bool, id: UUID, invariant: str) -> None:
        if not holds:
            self.note(f"{id.hex[:6]} BROKEN: {invariant}")
            self.world.broken = self.world.broken or InvariantViolated(f"entry {id}: {invariant}")
            raise self.world.broken

    def instant(self, instant: Any) -> float:
        """By the world's clock."""
        seconds: float = (instant - self._start).total_seconds()
        return seconds
