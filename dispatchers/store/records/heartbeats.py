"""The heartbeat rows, one for each run of a process: which dispatchers run, and which stopped reporting recently."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, delete, insert, select, update

from outbox.sql.clock import clock
from outbox.sql.schema.tables import Tables

BEAT_SECONDS = 10.0  # between two heartbeats: 0.1 transactions a second
LIVE_FOR = timedelta(seconds=45)  # four missed heartbeats: one may wait for a slow batch of maintenance
KEPT_FOR = timedelta(hours=1)  # the row of a crashed process


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The report of a process about itself. declared: its settings, operations and schedules, as JSON, with what is used up and
    the next instants of the schedules.
    """

    id: UUID
    host: str
    pid: int
    version: str
    in_flight: int
    declared: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherSeen:
    """A dispatcher, as its last heartbeat shows it.

    since: its first heartbeat. is_live: whether the last one is recent; a process that stopped cleanly has no row.
    settings_digest: equal for processes with equal settings. operations: the operations, or prefixes, that it serves.
    is_readable: whether this release can read its settings. Another release may write them otherwise; `operations` and `settings`
        are then empty.
    used_up: the settings whose budgets were used up, each with the destinations that waited for that; none means all.
    upcoming: the next instants of each of its schedules, in ISO 8601. failing: what has failed of those that fail at present.
    """

    host: str
    pid: int
    version: str
    since: datetime
    seen_at: datetime
    is_live: bool
    in_flight: int
    settings_digest: str
    operations: list[str]
    settings: Mapping[str, Any]
    is_readable: bool = True
    used_up: Mapping[str, list[str]] = field(default_factory=dict)
    upcoming: Mapping[str, list[str]] = field(default_factory=dict)
    failing: Mapping[str, str] = field(default_factory=dict)

    @property
    def schedules(self) -> Mapping[str, Mapping[str, Any]]:
        """The schedules that it serves, by name, with their `expression`, `jitter` and `catch_up`."""
        found: Mapping[str, Mapping[str, Any]] = self.settings.get("schedules", {})
        return found

    @property
    def name(self) -> str:
        return f"{self.host}:{self.pid}"


def beat(connection: Connection, tables: Tables, heartbeat: Heartbeat) -> None:
    """Write the heartbeat. Maintenance may have deleted the row of a process that was stopped for long: insert it again."""
    dispatcher = tables.dispatcher
    seen = {"seen_at": clock(), "in_flight": heartbeat.in_flight, "declared": heartbeat.declared}
    if connection.execute(update(dispatcher).where(dispatcher.c.id == heartbeat.id).values(seen)).rowcount:
        return
    fields = {name: getattr(heartbeat, name) for name in ("id", "host", "pid", "version")}
    connection.execute(insert(dispatcher).values(**fields, **seen, since=clock()))


def leave(connection: Connection, tables: Tables, id: UUID) -> None:
    """Delete the row of a process that has stopped cleanly."""
    connection.execute(delete(tables.dispatcher).where(tables.dispatcher.c.id == id))


def forget_dead(connection: Connection, tables: Tables) -> int:
    """Delete the rows of the processes that crashed long ago; returns how many."""
    dispatcher = tables.dispatcher
    now: datetime = connection.execute(select(clock())).scalar_one()
    seen_at = dispatcher.c.seen_at
    # A row of the future: the clock was set back after the process had died.
    return connection.execute(
        delete(dispatcher).where((seen_at < now - KEPT_FOR) | (seen_at > now + KEPT_FOR))
    ).rowcount


def read_dispatchers(connection: Connection, tables: Tables, now: datetime) -> list[DispatcherSeen]:
    """The running dispatchers and those that crashed recently, by host and process."""
    dispatcher = tables.dispatcher
    lately = select(dispatcher).where(dispatcher.c.seen_at >= now - KEPT_FOR)
    rows = connection.execute(lately.order_by(dispatcher.c.host, dispatcher.c.pid, dispatcher.c.since))
    return [seen(row._mapping, now) for row in rows]


def seen(row: Mapping[Any, Any], now: datetime) -> DispatcherSeen:
    """The dispatcher of a heartbeat row, at the time `now`."""
    settings = _declared(row["declared"])
    used_up, upcoming, failing = (
        (settings.pop(name, {}) if settings else {}) for name in ("used_up", "upcoming", "failing")
    )
    alike = json.dumps(settings, sort_keys=True) if settings else row["declared"]
    return DispatcherSeen(
        **{name: row[name] for name in ("host", "pid", "version", "since", "seen_at", "in_flight")},
        is_live=abs(now - row["seen_at"]) <= LIVE_FOR,  # not in the future either: the clock may have been set back
        settings_digest=hashlib.sha256(alike.encode()).hexdigest()[:8],
        operations=sorted(settings["operations"]) if settings else [],
        settings=settings or {},
        is_readable=settings is not None,
        used_up=used_up,
        upcoming=upcoming,
        failing=failing,
    )


_NUMBERS = ("lease", "margin", "retention", "callback_concurrency")
_NUMBERS_OF_OPERATION = ("timeout", "max_attempts", "max_age")


def _declared(text: str) -> dict[str, Any] | None:
    """The settings, or None if they lack what this release reads of them: another release wrote them."""
    try:
        declared = json.loads(text)
        operations = declared["operations"].values()
        most = declared["max_connections"]
        is_known = (
            _are_numbers(declared, _NUMBERS)
            and all(_are_numbers(each, _NUMBERS_OF_OPERATION) for each in operations)
            and all(each["window"] in (None, "forever") or _is_number(each["window"]) for each in operations)
            and all(isinstance(name, str) for name in declared["callbacks"])
            and (most is None or _is_number(most))
            and all(
                isinstance(text, str)
                for lists in ("used_up", "upcoming")
                for texts in declared.get(lists, {}).values()
                for text in texts
            )
            and all(isinstance(text, str) for text in declared.get("failing", {}).values())
            and all(isinstance(each["expression"], str) for each in declared.get("schedules", {}).values())
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return declared if is_known else None


def _are_numbers(fields: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return all(_is_number(fields[name]) for name in names)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
