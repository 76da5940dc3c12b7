"""A schedule, as an app declares it: its trigger, and the function that enqueues what is due at an instant of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Literal, Protocol, TypeAlias

from outbox.keys import ParentKey

SOURCE = "schedule"
"""The source of the parent keys of schedules: no other key of an app has it."""

MANUAL = "manual"
"""How the parent key of an operator's trigger begins. That of an instant begins with its year."""

MAX_ACTOR_BYTES = 180  # of an operator's name in a parent key, which has 255

CatchUp: TypeAlias = Literal["latest", "all", "none"]


class Trigger(Protocol):
    """A trigger of APScheduler 3."""

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime, /) -> datetime | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """An instant of a schedule: the argument of its function.

    at: the instant, in the schedule's time zone. Equal in all processes, and at each retry.
    actor: the operator who triggered it by hand, at `at`; None for an instant of the schedule itself.
    """

    schedule: str
    at: datetime
    actor: str | None = None

    @property
    def parent(self) -> ParentKey:
        """The parent of what the function enqueues."""
        return parent_of(self.schedule, self.at, self.actor)


def parent_of(schedule: str, at: datetime, actor: str | None = None) -> ParentKey:
    """The parent of an instant, or of the trigger of an operator, which is to the microsecond."""
    if actor is None:
        return ParentKey(f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}", scope=schedule, source=SOURCE)
    name = actor.encode()[:MAX_ACTOR_BYTES].decode(errors="ignore")
    return ParentKey(f"{MANUAL}:{at.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}:{name}", scope=schedule, source=SOURCE)


TickFunction: TypeAlias = Callable[[Any, Tick], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One schedule. expression: its trigger as text; two processes with one expression have the same instants."""

    name: str
    expression: str
    trigger: Trigger = field(repr=False)
    zone: tzinfo = UTC
    jitter: timedelta = timedelta(0)
    catch_up: CatchUp = "latest"
    function: TickFunction = field(repr=False)

    def tick(self, at: datetime, actor: str | None = None) -> Tick:
        return Tick(schedule=self.name, at=at.astimezone(self.zone), actor=actor)
