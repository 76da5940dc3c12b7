"""Counts of all dispatchers' sends, minute by minute: written with the heartbeats, and kept for a little more than an hour."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, delete, func, select

from dispatchers.telemetry.tally import Tallied
from outbox.sql.clock import database_now
from outbox.sql.dialect import dialect_of
from outbox.sql.schema.tables import Tables

KEPT_FOR = timedelta(hours=2)  # what is shown, and as much again for a clock that was set


def add_counts(connection: Connection, tables: Tables, counts: Mapping[Tallied, int]) -> None:
    """Add them to the present minute's. In one order for all processes: two of them never wait for each other."""
    if not counts:
        return
    table = tables.send_count
    minute = database_now(connection).replace(second=0, microsecond=0)
    rows = [{**key._asdict(), "minute": minute, "sends": sends} for key, sends in sorted(counts.items())]
    dialect_of(connection).upsert(connection, table, rows, added=["sends"])


def forget_old(connection: Connection, tables: Tables) -> int:
    """Delete what is no longer shown; returns how many rows."""
    table = tables.send_count
    return connection.execute(delete(table).where(table.c.minute < database_now(connection) - KEPT_FOR)).rowcount


def read_counts(connection: Connection, tables: Tables, since: datetime, *by: str) -> list[Mapping[str, Any]]:
    """The counts since then, added up by these columns."""
    table = tables.send_count
    columns = [table.c[name] for name in by]
    found = select(*columns, func.sum(table.c.sends).label("sends")).where(table.c.minute >= since).group_by(*columns)
    return [{**row._mapping, "sends": int(row.sends)} for row in connection.execute(found)]
