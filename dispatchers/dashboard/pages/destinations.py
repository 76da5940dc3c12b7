"""The destinations: what waits for each, its throttling, its rates; and the decisions to pause and to resume one."""

from dataclasses import dataclass
from datetime import datetime

from dispatchers.admin.decide import decisions
from dispatchers.admin.read.destinations import DestinationState, most_urgent, read_destinations
from dispatchers.admin.read.overview import Unserved, read_unserved
from dispatchers.admin.read.throughput import Sent, read_throughput
from dispatchers.dashboard.actions import Action, Deciding
from dispatchers.dashboard.parameters import Nothing, parameter
from dispatchers.dashboard.views import Reading, View


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationsPage:
    """at: the database's clock. destinations: the most urgent ones of `destinations_in_all`: throttled, or with most due.

    sent: what was sent within the last hour, by destination. unserved: operations whose entries wait for a dispatcher that serves
    or reads them; None for a role that may not read why entries wait.
    """

    at: datetime
    destinations: list[DestinationState]
    destinations_in_all: int
    sent: dict[str, Sent]
    unserved: list[Unserved] | None


def read(reading: Reading, query: Nothing) -> DestinationsPage:
    """List the destinations with their backlog and their throttling."""
    found = read_destinations(reading.connection, reading.tables)
    sent = read_throughput(reading.connection, reading.tables).destinations
    shown = most_urgent(found.destinations)
    own = {each.name: sent[each.name] for each in shown if each.name in sent}
    return DestinationsPage(
        at=found.at,
        destinations=shown,
        destinations_in_all=len(found.destinations),
        sent=own,
        unserved=read_unserved(reading.connection, reading.tables, found.at),
    )


VIEW = View("destinations", read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttling:
    """About one destination."""

    name: str = parameter("The destination's name.")
    reason: str = parameter("Why; it is recorded with your name.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttled:
    """A decision about a destination that is recorded. The dispatchers follow it within a second or two."""

    name: str
    decision: str
    actor: str


def _pause(deciding: Deciding, form: Throttling) -> Throttled:
    """Pause a destination: nothing is sent to it until it is resumed."""
    actor = deciding.identity.name
    decisions.pause(deciding.connection, deciding.tables, form.name, actor=actor, reason=form.reason)
    return Throttled(name=form.name, decision="pause", actor=actor)


def _resume(deciding: Deciding, form: Throttling) -> Throttled:
    """Resume a destination: end its pause and cooldown, and close its circuit breaker."""
    actor = deciding.identity.name
    decisions.resume(deciding.connection, deciding.tables, form.name, actor=actor, reason=form.reason)
    return Throttled(name=form.name, decision="resume", actor=actor)


ACTIONS = (
    Action("pause", "/destinations/pause", _pause, done="The destination is paused. Sends that are under way end."),
    Action("resume", "/destinations/resume", _resume, done="The destination is resumed."),
)
