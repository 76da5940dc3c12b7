"""The schedules: who serves each, its next and its last instants; and the decisions to pause, resume and trigger one."""

from dataclasses import dataclass

from dispatchers.admin.decide import schedules as decide
from dispatchers.admin.read.schedules import ScheduleDetails, ScheduleStates, list_schedules, read_schedule
from dispatchers.dashboard.actions import Action, Deciding
from dispatchers.dashboard.parameters import Nothing, parameter
from dispatchers.dashboard.views import Reading, View


def read(reading: Reading, query: Nothing) -> ScheduleStates:
    """List the schedules with their next instants."""
    return list_schedules(reading.connection, reading.tables)


VIEW = View("schedules", read)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleQuery:
    """Which schedule."""

    name: str = parameter("The schedule's name.")


def read_one(reading: Reading, query: ScheduleQuery) -> ScheduleDetails:
    """Show one schedule with its next instants, and the entries of the last ones."""
    return read_schedule(reading.connection, reading.tables, query.name)


SCHEDULE = View("schedule", read_one, in_navigation=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDecision:
    """About one schedule."""

    name: str = parameter("The schedule's name.")
    reason: str = parameter("Why; it is recorded with your name.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDecided:
    """A decision about a schedule that is recorded. The dispatchers follow it within about ten seconds."""

    name: str
    decision: str
    actor: str


def _pause(deciding: Deciding, form: ScheduleDecision) -> ScheduleDecided:
    """Pause a schedule: no instant of it is enqueued until it is resumed."""
    actor, where = deciding.identity.name, (deciding.connection, deciding.tables)
    decide.pause_schedule(*where, form.name, actor=actor, reason=form.reason)
    return ScheduleDecided(name=form.name, decision="pause", actor=actor)


def _resume(deciding: Deciding, form: ScheduleDecision) -> ScheduleDecided:
    """Resume a schedule from now on."""
    actor, where = deciding.identity.name, (deciding.connection, deciding.tables)
    decide.resume_schedule(*where, form.name, actor=actor, reason=form.reason)
    return ScheduleDecided(name=form.name, decision="resume", actor=actor)


def _trigger(deciding: Deciding, form: ScheduleDecision) -> ScheduleDecided:
    """Trigger a schedule once: its function enqueues new effects."""
    actor, where = deciding.identity.name, (deciding.connection, deciding.tables)
    decide.trigger_schedule(*where, form.name, actor=actor, reason=form.reason)
    return ScheduleDecided(name=form.name, decision="trigger", actor=actor)


ACTIONS = (
    Action("pause-schedule", "/schedules/pause", _pause, done="The schedule is paused."),
    Action("resume-schedule", "/schedules/resume", _resume, done="The schedule is resumed from now on."),
    Action(
        "trigger-schedule",
        "/schedules/trigger",
        _trigger,
        done="The schedule is triggered. A dispatcher calls its function within about ten seconds.",
    ),
)
