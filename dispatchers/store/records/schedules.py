"""The rows of the schedules: up to which instant each was enqueued, by dispatchers of whatever release.

A row is written in the transaction that enqueues an instant, under its lock. So it says what was enqueued after a crash too, and
after retention has deleted the entries.
"""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, select, update

from dispatchers.periodic.instants import TriggerFailed, next_if_known, next_instant
from dispatchers.periodic.schedules import Schedule, Tick
from dispatchers.store.records.heartbeats import read_dispatchers
from outbox.sql.clock import database_now
from outbox.sql.dialect import dialect_of
from outbox.sql.schema.parent_index import is_under
from outbox.sql.schema.tables import Tables

log = logging.getLogger("outbox.dispatcher")

MAX_RECENT = 20  # instants that a row names

SET_BACK = timedelta(hours=1)
"""If the last instant is further than this in the future, the database's clock was ahead when it was enqueued. Less is left to
time: until then each instant was enqueued already."""

BEING_ENQUEUED = timedelta(minutes=1)
"""How long a due instant is left to the dispatchers with the expression that a new one replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRow:
    """What a dispatcher must know of a schedule. is_ours: whether this dispatcher enqueues its instants.

    problem: why the next instants are unknown.
    """

    enqueued_to: datetime
    paused: bool = False
    triggered_at: datetime | None = None
    triggered_by: str | None = None
    is_ours: bool = True
    problem: TriggerFailed | None = None


class ScheduleRows:
    """Reads the schedules of one dispatcher, and records them.

    The expression of the dispatcher that started last counts, while one with it is live: during a deploy that changes an
    expression the older dispatchers leave the schedule to the new ones. If these are gone, the older ones continue.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._recorded: set[str] = set()
        self._orphans: dict[str, str] = {}  # expressions of others for which no live dispatcher was found, by schedule

    def read(
        self, connection: Connection, schedules: Collection[Schedule]
    ) -> tuple[datetime, Mapping[str, ScheduleRow]]:
        """The database's clock, and these schedules by name. Records those that are new or changed."""
        table, now = self._tables.schedule, database_now(connection)
        in_order = sorted(schedules, key=lambda each: each.name)  # so that two dispatchers do not deadlock
        names = [each.name for each in in_order]
        found = {row.name: row for row in connection.execute(select(table).where(table.c.name.in_(names)))}
        return now, {each.name: self._read(connection, each, found.get(each.name), now) for each in in_order}

    def _read(self, connection: Connection, schedule: Schedule, row: Row[Any] | None, now: datetime) -> ScheduleRow:
        if row is None:
            self._insert(connection, schedule, now)
            self._recorded.add(schedule.name)
            return ScheduleRow(enqueued_to=now)
        known = ScheduleRow(
            enqueued_to=row.enqueued_to,
            paused=row.paused,
            triggered_at=row.triggered_at,
            triggered_by=row.triggered_by,
        )
        try:
            return self._compared(connection, schedule, row, known, now)
        except TriggerFailed as problem:  # before the row was changed
            return replace(known, problem=problem)

    def _compared(
        self, connection: Connection, schedule: Schedule, row: Row[Any], known: ScheduleRow, now: datetime
    ) -> ScheduleRow:
        """The row for this dispatcher, which may have another expression."""
        if row.expression == schedule.expression:
            self._orphans.pop(schedule.name, None)
            known = self._with_clock_set_back(connection, schedule, known, now)
            is_unknown = row.next_at is None or row.next_at <= known.enqueued_to  # as after a resume
            if is_unknown or schedule.name not in self._recorded:  # or another release of the time zones computed it
                next_at = next_instant(schedule.trigger, known.enqueued_to)
                if next_at != row.next_at:
                    self._update(connection, schedule, known.enqueued_to, next_at=next_at)
        elif schedule.name in self._recorded:
            known = replace(known, is_ours=self._takes_back(connection, schedule, row, now))
        elif row.next_at is not None and now - BEING_ENQUEUED < row.next_at <= now and not row.paused:
            return replace(known, is_ours=False)  # recorded at a later check
        else:
            counted = self._change(connection, schedule, row, known, now)
            if counted is None:
                return replace(known, is_ours=False)
            known = counted
        self._recorded.add(schedule.name)
        return known

    def _insert(self, connection: Connection, schedule: Schedule, now: datetime) -> None:
        values = {
            "name": schedule.name,
            "expression": schedule.expression,
            "since": now,
            "enqueued_to": now,
            "next_at": next_if_known(schedule.trigger, now),
            "recent": "[]",
            "paused": False,
        }
        connection.execute(dialect_of(connection).insert_unless_present(self._tables.schedule).values(values))
        log.info("schedule %r recorded: %s", schedule.name, schedule.expression)

    def _change(
        self, connection: Connection, schedule: Schedule, row: Row[Any], known: ScheduleRow, now: datetime
    ) -> ScheduleRow | None:
        """A new expression counts from now: of its instants before, none was promised. None: to be done at a later check."""
        enqueued_to = max(row.enqueued_to, now)
        next_at = next_instant(schedule.trigger, enqueued_to)
        changed = {"expression": schedule.expression, "enqueued_to": enqueued_to, "next_at": next_at}
        if not self._update(connection, schedule, row.enqueued_to, **changed):
            return None
        log.info("schedule %r changed from %s to %s", schedule.name, row.expression, schedule.expression)
        return replace(known, enqueued_to=enqueued_to)

    def _takes_back(self, connection: Connection, schedule: Schedule, row: Row[Any], now: datetime) -> bool:
        """Whether no live dispatcher has the expression that replaced ours; seen twice, as a heartbeat may come late."""
        declared = [
            each.schedules.get(schedule.name, {}).get("expression")
            for each in read_dispatchers(connection, self._tables, now)
            if each.is_live
        ]
        if row.expression in declared:
            self._orphans.pop(schedule.name, None)
            return False
        if self._orphans.get(schedule.name) != row.expression:
            self._orphans[schedule.name] = row.expression
            return False
        if not self._update(connection, schedule, row.enqueued_to, expression=schedule.expression):
            return False
        del self._orphans[schedule.name]
        log.warning(
            "schedule %r: no dispatcher with %s runs any more, so that this one continues with %s",
            schedule.name,
            row.expression,
            schedule.expression,
        )
        return True

    def _with_clock_set_back(
        self, connection: Connection, schedule: Schedule, known: ScheduleRow, now: datetime
    ) -> ScheduleRow:
        if known.enqueued_to <= now + SET_BACK or not self._update(
            connection, schedule, known.enqueued_to, enqueued_to=now, next_at=next_instant(schedule.trigger, now)
        ):
            return known
        log.warning(
            "schedule %r was enqueued up to %s, and it is %s: the database's clock was set back. It continues from now; an"
            " instant with entries is not enqueued again",
            schedule.name,
            known.enqueued_to.isoformat(),
            now.isoformat(),
        )
        return replace(known, enqueued_to=now)

    def _update(self, connection: Connection, schedule: Schedule, read: datetime, **values: Any) -> bool:
        """Change the row, unless its last instant is another one than was read. A row that another dispatcher has locked, while
        it calls the function, is left for a later check.
        """
        table = self._tables.schedule
        unchanged = table.c.name == schedule.name, table.c.enqueued_to == read
        locking = select(table.c.name).where(*unchanged).with_for_update(skip_locked=True)
        if connection.execute(locking).one_or_none() is None:
            return False
        return connection.execute(update(table).where(*unchanged).values(values)).rowcount == 1


def skip_to(connection: Connection, tables: Tables, schedule: Schedule, read: datetime, last: datetime) -> bool:
    """Deal with the instants up to `last` without enqueueing them. read: the last instant before; False if it is another now."""
    table = tables.schedule
    values = {"enqueued_to": last, "next_at": next_if_known(schedule.trigger, last)}
    unchanged = table.c.name == schedule.name, table.c.enqueued_to == read, table.c.paused.is_(False)
    return connection.execute(update(table).where(*unchanged).values(values)).rowcount == 1


def lock_tick(connection: Connection, tables: Tables, tick: Tick) -> Row[Any] | None:
    """The row of the schedule, locked, if the tick is still to be enqueued. None also if another dispatcher has the lock."""
    table = tables.schedule
    read = select(table).where(table.c.name == tick.schedule).with_for_update(skip_locked=True)
    row = connection.execute(read).one_or_none()
    if row is None:
        return None
    if tick.actor is not None:
        at = tick.at.astimezone(UTC)  # Python: a local time that occurs twice equals no time of another zone
        return row if (row.triggered_at, row.triggered_by) == (at, tick.actor) else None
    return row if row.enqueued_to < tick.at and not row.paused else None


def has_entries(connection: Connection, tables: Tables, parent_id: UUID) -> bool:
    """Whether anything was enqueued under this parent."""
    entry = tables.entry
    return connection.execute(select(entry.c.id).where(is_under(entry, parent_id)).limit(1)).first() is not None


def record_tick(
    connection: Connection, tables: Tables, schedule: Schedule, tick: Tick, row: Row[Any], parent_id: UUID
) -> bool:
    """Record that the tick was enqueued, in the transaction that enqueues it; False if another one has recorded it."""
    table = tables.schedule
    recent = [{"at": tick.at.isoformat(), "actor": tick.actor, "parent_id": parent_id.hex}, *_parsed(row.recent)]
    values: dict[str, Any] = {"recent": json.dumps(recent[:MAX_RECENT])}
    if tick.actor is not None:
        values |= {"triggered_at": None, "triggered_by": None}
        unchanged = table.c.triggered_at == row.triggered_at
    else:
        values |= {"enqueued_to": tick.at, "next_at": next_if_known(schedule.trigger, tick.at)}
        unchanged = table.c.enqueued_to == row.enqueued_to
    return (
        connection.execute(update(table).where(table.c.name == tick.schedule, unchanged).values(values)).rowcount == 1
    )


# --- for operators


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentTick:
    """One of the last instants of a schedule. actor: who triggered it. parent_id: under which its entries are."""

    at: datetime
    actor: str | None
    parent_id: UUID


def read_recent(text: str) -> list[RecentTick]:
    """The last instants, the latest first. Those that another release wrote otherwise are left out."""
    found: list[RecentTick] = []
    for each in _parsed(text):
        try:
            at, parent_id = datetime.fromisoformat(each["at"]), UUID(each["parent_id"])
            found.append(RecentTick(at=at, actor=each["actor"], parent_id=parent_id))
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _parsed(text: str) -> Sequence[Any]:
    try:
        stored = json.loads(text)
    except ValueError:
        return []
    return stored if isinstance(stored, list) else []


def read_next_instants(connection: Connection, tables: Tables) -> tuple[datetime, dict[str, datetime | None]]:
    """The database's clock, and the next instant of each schedule. Without those that are paused."""
    table, now = tables.schedule, database_now(connection)
    rows = connection.execute(select(table.c.name, table.c.next_at).where(table.c.paused.is_(False)))
    return now, {row.name: row.next_at for row in rows}
