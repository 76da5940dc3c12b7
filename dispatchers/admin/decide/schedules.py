"""Operator decisions about a schedule: pause, resume, trigger and forget. Each is in the audit log, with a name and a reason."""

from typing import Any

from sqlalchemy import Connection, delete, update

from dispatchers.admin.decide.audit import write_audit
from dispatchers.admin.decide.decisions import check_decision
from dispatchers.admin.read.schedules import schedule_row, serving
from dispatchers.errors import DecisionRefused
from dispatchers.store.records.heartbeats import read_dispatchers
from outbox.sql.clock import clock, database_now
from outbox.sql.schema.tables import Tables


def pause_schedule(connection: Connection, tables: Tables, name: str, *, actor: str, reason: str) -> None:
    """Pause a schedule: no instant of it is enqueued until it is resumed. It withdraws a trigger that is not carried out yet. A
    second pause replaces the first.

    Raises `EntryNotFound` and `InvalidValue`.
    """
    check_decision(actor, reason)
    schedule_row(connection, tables, name, lock=True)
    withdrawn = {"triggered_at": None, "triggered_by": None}
    _write(connection, tables, name, actor, paused=True, paused_reason=reason, **withdrawn)
    write_audit(connection, tables, actor=actor, action="pause", kind="schedule", target=name, reason=reason)


def resume_schedule(connection: Connection, tables: Tables, name: str, *, actor: str, reason: str) -> None:
    """Resume a schedule from now: what was due during the pause is not enqueued.

    Raises `EntryNotFound`, `InvalidValue`, and `DecisionRefused` if it is not paused.
    """
    check_decision(actor, reason)
    row = schedule_row(connection, tables, name, lock=True)
    if not row.paused:
        raise DecisionRefused(f"schedule {name!r} is not paused", "running")
    enqueued_to = max(row.enqueued_to, database_now(connection))
    values = {"paused": False, "paused_reason": None, "enqueued_to": enqueued_to, "next_at": None}
    _write(connection, tables, name, actor, **values)
    write_audit(connection, tables, actor=actor, action="resume", kind="schedule", target=name, reason=reason)


def trigger_schedule(connection: Connection, tables: Tables, name: str, *, actor: str, reason: str) -> None:
    """Let a dispatcher call the schedule's function once, within about ten seconds, also while the schedule is paused.

    Its entries have a parent of their own, with the time and the actor: no instant of the schedule has the same one.
    Raises `EntryNotFound`, `InvalidValue`, and `DecisionRefused` if no live dispatcher serves it, or if an earlier trigger is not
    carried out yet.
    """
    check_decision(actor, reason)
    row = schedule_row(connection, tables, name, lock=True)
    if row.triggered_at is not None:
        raise DecisionRefused(
            f"schedule {name!r} was triggered by {row.triggered_by} at {row.triggered_at.isoformat()}, which no dispatcher has"
            " carried out yet",
            "triggered",
        )
    now = database_now(connection)
    if not serving(name, read_dispatchers(connection, tables, now)):
        raise DecisionRefused(
            f"no running dispatcher has the schedule {name!r}: nothing would carry it out", "unserved"
        )
    changed = update(tables.schedule).where(tables.schedule.c.name == name)
    connection.execute(changed.values(triggered_at=now, triggered_by=actor))
    write_audit(connection, tables, actor=actor, action="trigger", kind="schedule", target=name, reason=reason)


def forget_schedule(connection: Connection, tables: Tables, name: str, *, actor: str, reason: str) -> None:
    """Forget a schedule that was removed from the code. Its entries stay.

    Raises `EntryNotFound`, `InvalidValue`, and `DecisionRefused` if a live dispatcher serves it.
    """
    check_decision(actor, reason)
    schedule_row(connection, tables, name, lock=True)
    served = serving(name, read_dispatchers(connection, tables, database_now(connection)))
    if served:
        raise DecisionRefused(
            f"{served[0].name} has the schedule {name!r}: remove it from the code first, or pause it", "served"
        )
    connection.execute(delete(tables.schedule).where(tables.schedule.c.name == name))
    write_audit(connection, tables, actor=actor, action="forget", kind="schedule", target=name, reason=reason)


def _write(connection: Connection, tables: Tables, name: str, actor: str, **values: Any) -> None:
    decided = {"decided_by": actor, "decided_at": clock()}
    connection.execute(update(tables.schedule).where(tables.schedule.c.name == name).values(values | decided))
