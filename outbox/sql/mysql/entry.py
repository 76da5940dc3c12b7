"""Writes entries on MySQL, which returns nothing of what it writes: one entry with its queue row in two statements; and many."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Dialect, Table
from sqlalchemy.exc import IntegrityError

from outbox.sql.mariadb.entry import rows_on_a_page, run_counted
from outbox.sql.mariadb.errors import DUPLICATE, number_of
from outbox.sql.schema.tables import MAX_STATEMENTS, Tables
from outbox.times import MICROSECOND


def insert_entry(
    connection: Connection, tables: Tables, version: int, entry: Mapping[str, Any], queued: Mapping[str, Any]
) -> bool:
    """See `mariadb.entry.insert_entry`. The queue row takes the due time from the entry."""
    stored = {name: value for name, value in entry.items() if name not in ("due_at", "delay")}
    delay: timedelta | None = entry["delay"]
    due = (entry["due_at"], 0 if delay is None else delay // MICROSECOND)
    inserting, queueing = _insertions(connection.dialect, tables, version, tuple(stored), tuple(queued))
    if not run_counted(connection, inserting, _plain((*stored.values(), *due))):
        return False
    run_counted(connection, queueing, _plain((*queued.values(), entry["id"])))
    return True


def insert_all(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> set[UUID]:
    """Insert those of the rows whose ids do not exist; returns their ids. All rows have the same columns.

    A page is one statement, which the server undoes if one of its ids exists: then each row has its own.
    """
    size = rows_on_a_page(rows)
    written: set[UUID] = set()
    for start in range(0, len(rows), size):
        page = rows[start : start + size]
        try:
            _insert(connection, table, "INSERT", page)
        except IntegrityError as error:
            if number_of(error.orig) != DUPLICATE:
                raise
            written.update([row["id"] for row in page if _insert(connection, table, "INSERT IGNORE", [row])])
        else:
            written.update([row["id"] for row in page])
    return written


def _insert(connection: Connection, table: Table, verb: str, rows: Sequence[Mapping[str, Any]]) -> int:
    columns = tuple(rows[0])
    preparer = connection.dialect.identifier_preparer
    row = f"({_marks(columns)})"
    statement = (
        f"{verb} INTO {preparer.format_table(table)} ({_names(connection.dialect, columns)})"
        f" VALUES {', '.join([row] * len(rows))}"
    )
    return run_counted(connection, statement, _plain(tuple(value for each in rows for value in each.values())))


@lru_cache(MAX_STATEMENTS)
def _insertions(
    dialect: Dialect, tables: Tables, version: int, stored: tuple[str, ...], queued: tuple[str, ...]
) -> tuple[str, str]:
    name = dialect.identifier_preparer.format_table
    due_at = "GREATEST(COALESCE(CAST(%s AS DATETIME(6)), UTC_TIMESTAMP(6)), UTC_TIMESTAMP(6)) + INTERVAL %s MICROSECOND"
    entry = (
        f"INSERT IGNORE INTO {name(tables.entry)} ({_names(dialect, stored)}, schema_version, due_at, created_at)"
        f" VALUES ({_marks(stored)}, {version}, {due_at}, UTC_TIMESTAMP(6))"
    )
    queue = (
        f"INSERT INTO {name(tables.queue)}"
        f" ({_names(dialect, queued)}, state, due_at, deliveries, attempts, maybe_sent, key_epoch)"
        f" SELECT {_marks(queued)}, 'pending', due_at, 0, 0, FALSE, 0 FROM {name(tables.entry)} WHERE id = %s"
    )
    return entry, queue


def _plain(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values as the drivers take them."""
    return tuple([_plain_one(value) for value in values])


def _plain_one(value: Any) -> Any:
    if isinstance(value, UUID):
        return value.bytes
    return value.astimezone(UTC).replace(tzinfo=None) if isinstance(value, datetime) else value


def _names(dialect: Dialect, columns: tuple[str, ...]) -> str:
    return ", ".join(dialect.identifier_preparer.quote(name) for name in columns)


def _marks(columns: tuple[str, ...]) -> str:
    return ", ".join(["%s"] * len(columns))
