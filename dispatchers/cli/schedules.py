"""`outbox schedules`: list the schedules, show one, pause, resume, trigger and forget it."""

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from dispatchers.admin.read.plain_values import instant, span
from dispatchers.cli import options
from dispatchers.cli.connections import deciding, reading
from dispatchers.cli.output import answer, cell, clean, pairs, prose, short, state_cell, table
from dispatchers.cli.over_databases import decision_options, over_databases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from dispatchers.admin.read.schedules import ScheduleDetails, ScheduleState, ScheduleStates


@click.group()
def schedules() -> None:
    """Manage the schedules of periodic effects.

    A dispatcher records its schedules when it starts. Each instant of a schedule is enqueued once, however many dispatchers run.
    """


@schedules.command("list")
@over_databases
def list_command(target: options.Target) -> None:
    """List the schedules, their next instants, and who serves them."""
    from dispatchers.admin.read.schedules import list_schedules

    with reading(target) as (connection, tables):
        found = list_schedules(connection, tables)
    answer(found, lambda: _listed(found))


@schedules.command()
@click.argument("name")
@over_databases
def show(name: str, target: options.Target) -> None:
    """Show one schedule: its next instants and its last entries."""
    from dispatchers.admin.read.schedules import read_schedule

    with reading(target) as (connection, tables):
        found = read_schedule(connection, tables, name)
    answer(found, lambda: _shown(found))


@schedules.command()
@click.argument("name")
@decision_options(over_databases)
def pause(name: str, actor: str, reason: str, target: options.Target) -> None:
    """Pause a schedule: no instant is enqueued until it is resumed."""
    from dispatchers.admin.decide.schedules import pause_schedule

    _decide(pause_schedule, "pause", "paused", name, actor, reason, target)


@schedules.command()
@click.argument("name")
@decision_options(over_databases)
def resume(name: str, actor: str, reason: str, target: options.Target) -> None:
    """Resume a schedule. What was due during the pause is not enqueued: trigger it if you need it."""
    from dispatchers.admin.decide.schedules import resume_schedule

    _decide(resume_schedule, "resume", "resumed", name, actor, reason, target)


@schedules.command()
@click.argument("name")
@decision_options(over_databases)
def trigger(name: str, actor: str, reason: str, target: options.Target) -> None:
    """Trigger a schedule once, within about ten seconds.

    A running dispatcher calls the schedule's function, also while the schedule is paused. Its entries have keys of their own:
    they are new effects, also if an instant of the schedule has enqueued the same.
    """
    from dispatchers.admin.decide.schedules import trigger_schedule

    _decide(trigger_schedule, "trigger", "triggered: a dispatcher carries it out", name, actor, reason, target)


@schedules.command()
@click.argument("name")
@decision_options(over_databases)
def forget(name: str, actor: str, reason: str, target: options.Target) -> None:
    """Forget a schedule that was removed from the code. Its entries stay."""
    from dispatchers.admin.decide.schedules import forget_schedule

    _decide(forget_schedule, "forget", "forgotten", name, actor, reason, target)


def _decide(
    decide: Callable[..., Any], decision: str, done: str, name: str, actor: str, reason: str, target: options.Target
) -> None:
    with deciding(target) as (connection, tables):
        decide(connection, tables, name, actor=actor, reason=reason)
    answer({"schedule": name, "decision": decision, "actor": actor}, f"schedule {clean(name)} {done}")


def _listed(found: "ScheduleStates") -> "Iterator[RenderableType]":
    if not found.schedules:
        yield prose("no schedule is recorded: a dispatcher records its schedules when it starts")
        return
    drawn = table("SCHEDULE", "TRIGGER", "NEXT", "STATE", "LAST DECISION", elastic=["TRIGGER"])
    for each in found.schedules:
        decided = "" if each.decided_by is None else f"{each.decided_by}: {each.paused_reason or 'resumed'}"
        drawn.add_row(
            cell(each.name), cell(each.expression), _next(each, found.at), cell(state_of(each)), cell(decided)
        )
    yield drawn


def _next(each: "ScheduleState", now: datetime) -> str:
    if each.paused or each.next_at is None:
        return "-"
    return f"{instant(each.next_at)} ({f'in {span(each.next_at - now)}' if each.next_at > now else 'due'})"


def state_of(each: "ScheduleState") -> str:
    """Whether it is at work, in words."""
    if each.paused:
        return "paused"
    if not each.served_by:
        return "not served"
    if each.behind_seconds:
        return f"behind {each.behind_seconds:.0f} s"
    return "failing" if each.failures else "on time"


def _shown(found: "ScheduleDetails") -> "Iterator[RenderableType]":
    yield pairs(
        [
            ("schedule", found.name),
            ("trigger", found.expression),
            ("other triggers", ", ".join(found.expressions) or None),
            ("state", state_of(found)),
            ("failing", "; ".join(found.failures) or None),
            ("paused because", found.paused_reason),
            ("decided by", found.decided_by),
            ("decided at", found.decided_at and instant(found.decided_at)),
            ("triggered by", found.triggered_by),
            ("triggered at", found.triggered_at and instant(found.triggered_at)),
            ("catch up", found.catch_up),
            ("jitter", f"{found.jitter_seconds:g} s" if found.jitter_seconds else None),
            ("since", instant(found.since)),
            ("enqueued to", instant(found.enqueued_to)),
            ("next", ", ".join(map(instant, found.upcoming)) or None),
            ("served by", ", ".join(found.served_by) or "no running dispatcher"),
        ]
    )
    if found.recent:
        drawn = table("INSTANT", "BY", "ENTRY", "OPERATION", "STATE")
        for tick in found.recent:
            at, actor = instant(tick.at), tick.actor or "schedule"
            if not tick.entries:
                drawn.add_row(at, cell(actor), "-", "", "")
            for entry in tick.entries:
                drawn.add_row(at, cell(actor), short(entry.id), cell(entry.operation), state_cell(entry.state))
        yield drawn
