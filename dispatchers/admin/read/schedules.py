"""Reads the schedules for operators: who serves each, how far it has come, and what its last instants have enqueued."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row, or_, select

from dispatchers.admin.read.dispatchers import live
from dispatchers.admin.read.entries import EntrySummary, read_entries_where
from dispatchers.errors import EntryNotFound
from dispatchers.names import did_you_mean
from dispatchers.periodic.schedules import parent_of
from dispatchers.store.records.heartbeats import DispatcherSeen, read_dispatchers
from dispatchers.store.records.schedules import RecentTick, read_recent
from outbox.sql.clock import database_now
from outbox.sql.schema.parent_index import is_under
from outbox.sql.schema.tables import Tables

MAX_SHOWN = 500  # schedules


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleState:
    """One schedule.

    expression: its trigger and time zone. catch_up, jitter_seconds: as a live dispatcher declares them; None without one.
    enqueued_to: every instant up to it was enqueued or skipped. next_at: the next one, None if there is none.
    behind_seconds: for how long the next instant has been due, its jitter left out; 0 if it is not due; None while it is paused.
    served_by: the live dispatchers with this schedule. Without one nothing is enqueued.
    expressions: what these have instead of `expression`, during a deploy that changes it.
    failures: what has failed at present, by live dispatcher: its function, or its trigger.
    triggered_at, triggered_by: the trigger of an operator that a dispatcher has yet to carry out.
    decided_by, decided_at: who paused or resumed it last, and when.
    """

    name: str
    expression: str
    catch_up: str | None
    jitter_seconds: float | None
    since: datetime
    enqueued_to: datetime
    next_at: datetime | None
    behind_seconds: float | None
    served_by: list[str]
    expressions: list[str]
    failures: list[str]
    paused: bool
    paused_reason: str | None
    decided_by: str | None
    decided_at: datetime | None
    triggered_at: datetime | None
    triggered_by: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStates:
    """The schedules by name, at one moment of the database's clock."""

    at: datetime
    schedules: list[ScheduleState]


@dataclass(frozen=True, slots=True, kw_only=True)
class TickState:
    """One of the last instants. actor: who triggered it; None for an instant of the schedule itself.

    entries: what it has enqueued; none also after retention has deleted them.
    """

    at: datetime
    actor: str | None
    entries: list[EntrySummary]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDetails(ScheduleState):
    """One schedule. upcoming: its next instants, as a live dispatcher computes them. recent: its last ones, the latest first."""

    at: datetime
    upcoming: list[datetime]
    recent: list[TickState]


def list_schedules(connection: Connection, tables: Tables) -> ScheduleStates:
    """Every schedule that a dispatcher has recorded, also those that are not in its code any more."""
    now, schedule = database_now(connection), tables.schedule
    dispatchers = live(read_dispatchers(connection, tables, now))
    rows = connection.execute(select(schedule).order_by(schedule.c.name).limit(MAX_SHOWN))
    return ScheduleStates(at=now, schedules=[ScheduleState(**_state(row, dispatchers, now)) for row in rows])


def read_schedule(connection: Connection, tables: Tables, name: str) -> ScheduleDetails:
    """One schedule. Raises `EntryNotFound` if no dispatcher has recorded it."""
    now = database_now(connection)
    row = schedule_row(connection, tables, name)
    dispatchers = live(read_dispatchers(connection, tables, now))
    return ScheduleDetails(
        **_state(row, dispatchers, now),
        at=now,
        upcoming=_upcoming(name, dispatchers),
        recent=_with_entries(connection, tables, name, read_recent(row.recent)),
    )


def schedule_row(connection: Connection, tables: Tables, name: str, *, lock: bool = False) -> Row[Any]:
    """The schedule's row. Raises `EntryNotFound`."""
    schedule = tables.schedule
    read = select(schedule).where(schedule.c.name == name)
    row = connection.execute(read.with_for_update() if lock else read).one_or_none()
    if row is None:
        names = connection.execute(select(schedule.c.name).limit(MAX_SHOWN)).scalars().all()
        raise EntryNotFound(
            f"no dispatcher has recorded a schedule {name!r}{did_you_mean(name, names)}; `outbox schedules list` lists all"
        )
    return row


def serving(name: str, dispatchers: Sequence[DispatcherSeen]) -> list[DispatcherSeen]:
    """The live dispatchers with this schedule."""
    return [each for each in live(dispatchers) if name in each.schedules]


def _state(row: Row[Any], dispatchers: Sequence[DispatcherSeen], now: datetime) -> dict[str, Any]:
    served = serving(row.name, dispatchers)
    declared: Mapping[str, Any] = next(
        (each.schedules[row.name] for each in served if each.schedules[row.name]["expression"] == row.expression), {}
    )
    late = timedelta(0) if row.next_at is None else now - row.next_at - timedelta(seconds=declared.get("jitter") or 0)
    others = {each.schedules[row.name]["expression"] for each in served} - {row.expression}
    same = ("name", "expression", "since", "enqueued_to", "next_at", "paused", "paused_reason")
    decided = ("decided_by", "decided_at", "triggered_at", "triggered_by")
    return {column: getattr(row, column) for column in (*same, *decided)} | {
        "catch_up": declared.get("catch_up"),
        "jitter_seconds": declared.get("jitter"),
        "behind_seconds": None if row.paused else max(late.total_seconds(), 0.0),
        "served_by": [each.name for each in served],
        "expressions": sorted(others),
        "failures": [f"{each.name}: {each.failing[row.name]}" for each in served if row.name in each.failing],
    }


def _upcoming(name: str, dispatchers: Sequence[DispatcherSeen]) -> list[datetime]:
    texts = next((each.upcoming[name] for each in dispatchers if each.upcoming.get(name)), [])
    try:
        return [datetime.fromisoformat(text) for text in texts]
    except ValueError:  # another release writes them otherwise
        return []


def _with_entries(connection: Connection, tables: Tables, name: str, recent: Sequence[RecentTick]) -> list[TickState]:
    if not recent:
        return []
    under = or_(*(is_under(tables.entry, each.parent_id) for each in recent))
    entries: dict[str, list[EntrySummary]] = {}
    for entry in read_entries_where(connection, tables, under):
        entries.setdefault(entry.parent, []).append(entry)
    return [
        TickState(at=each.at, actor=each.actor, entries=entries.get(parent_of(name, each.at, each.actor).key, []))
        for each in recent
    ]
