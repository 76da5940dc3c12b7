"""The heartbeat rows: which dispatchers run, and which stopped reporting lately. One row for each process's run."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, delete, insert, select, update

from outbox.sql.dialect import clock
from outbox.sql.schema import Tables

BEAT_SECONDS = 10.0  # between two heartbeats: a tenth of a transaction a second
LIVE_FOR = timedelta(seconds=45)  # four are missed: one may wait for a slow batch of maintenance
KEPT_FOR = timedelta(hours=1)  # a dead one's row


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What a process reports of itself. declared: its settings and operations, as JSON."""

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

    @property
    def name(self) -> str:
        return f"{self.host}:{self.pid}"


def beat(connection: Connection, tables: Tables, heartbeat: Heartbeat) -> None:
    """Write it. A row that maintenance has deleted, of a process that was suspended for long, comes back."""
    dispatcher = tables.dispatcher
    seen = {"seen_at": clock(), "in_flight": heartbeat.in_flight}
    if connection.execute(update(dispatcher).where(dispatcher.c.id == heartbeat.id).values(seen)).rowcount:
        return
    fields = {name: getattr(heartbeat, name) for name in ("id", "host", "pid", "version", "declared")}
    connection.execute(insert(dispatcher).values(**fields, **seen, since=clock()))


def leave(connection: Connection, tables: Tables, id: UUID) -> None:
    """The process has stopped cleanly."""
    connection.execute(delete(tables.dispatcher).where(tables.dispatcher.c.id == id))


def forget_dead(connection: Connection, tables: Tables) -> int:
    """Delete the rows of those that died long ago; returns how many."""
    dispatcher = tables.dispatcher
    now: datetime = connection.execute(select(clock())).scalar_one()
    return connection.execute(delete(dispatcher).where(dispatcher.c.seen_at < now - KEPT_FOR)).rowcount


def read_dispatchers(connection: Connection, tables: Tables, now: datetime) -> list[DispatcherSeen]:
    """The live ones and those that died lately, by host and process."""
    dispatcher = tables.dispatcher
    lately = select(dispatcher).where(dispatcher.c.seen_at >= now - KEPT_FOR)
    rows = connection.execute(lately.order_by(dispatcher.c.host, dispatcher.c.pid, dispatcher.c.since))
    return [seen(row._mapping, now) for row in rows]


def seen(row: Mapping[Any, Any], now: datetime) -> DispatcherSeen:
    """A heartbeat's row as of `now`."""
    settings = json.loads(row["declared"])
    return DispatcherSeen(
        **{name: row[name] for name in ("host", "pid", "version", "since", "seen_at", "in_flight")},
        is_live=row["seen_at"] >= now - LIVE_FOR,
        settings_digest=hashlib.sha256(row["declared"].encode()).hexdigest()[:8],
        operations=sorted(settings["operations"]),
        settings=settings,
    )
