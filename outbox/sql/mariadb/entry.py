"""Writes entries on MariaDB: one with its queue row in one statement, as most transactions write one; and many in several."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Dialect, Executable
from sqlalchemy.exc import DBAPIError

from outbox.sql.mariadb.settings import note_undone
from outbox.sql.schema.tables import MAX_STATEMENTS, Tables
from outbox.times import MICROSECOND


def insert_entry(
    connection: Connection, tables: Tables, version: int, entry: Mapping[str, Any], queued: Mapping[str, Any]
) -> bool:
    """Write an entry without an ordering key. Returns False, and writes nothing, if its id exists.

    version: of its format.
    entry: the values of its row, with the `due_at` and the `delay` that the app gave, or None. queued: what else the queue row
    has, its id too, besides the due time and what is equal for all.
    """
    stored = {name: value for name, value in entry.items() if name not in ("due_at", "delay")}
    delay: timedelta | None = entry["delay"]
    due_at: datetime | None = entry["due_at"]
    naive = None if due_at is None else due_at.astimezone(UTC).replace(tzinfo=None)
    given = (naive, 0 if delay is None else delay // MICROSECOND, *stored.values(), *queued.values())
    parameters = tuple(value.bytes if isinstance(value, UUID) else value for value in given)
    statement = _block(connection.dialect, tables, version, tuple(stored), tuple(queued))
    return bool(run_counted(connection, statement, parameters))


def run_counted(connection: Connection, statement: str, parameters: tuple[Any, ...]) -> int:
    """Run a statement without a result set; returns how many rows all its changes wrote.

    An error after a result set would be lost: SQLAlchemy only logs what a driver raises when it closes a cursor. A Galera node
    reports at the end of a statement that it has undone the transaction, and the app would commit what comes after.
    """
    result = connection.exec_driver_sql(statement, parameters, execution_options={"preserve_rowcount": True})
    return int(result.rowcount)


@contextmanager
def whole(connection: Connection) -> Iterator[None]:
    """Let the transaction, or its savepoint, not be committed if a statement of the block fails: the server undoes this statement
    only, and an entry without its queue row would never be sent.
    """
    try:
        yield
    except DBAPIError:
        note_undone(connection)
        raise


def insert_in_pages(connection: Connection, statement: Executable, rows: list[dict[str, Any]]) -> dict[UUID, datetime]:
    """Execute the INSERT of all rows, no statement longer than a server may take: `max_allowed_packet`. Returns the due times of
    those that it has written, by their ids.
    """
    page = rows_on_a_page(rows)
    given = rows[0] if len(rows) == 1 else rows  # SQLAlchemy executes one row with less work than a list of one
    written = connection.execute(statement, given, execution_options={"insertmanyvalues_page_size": page})
    return {row.id: row.due_at for row in written}


def rows_on_a_page(rows: Iterable[Mapping[str, Any]]) -> int:
    """How many of these rows one INSERT may have."""
    longest = max(sum(len(value) for value in row.values() if isinstance(value, bytes | str)) for row in rows)
    return min(1000, max(1, PAGE_BYTES // (2 * longest + ROW_BYTES)))


PAGE_BYTES = 1_000_000
"""What PyMySQL takes as its limit too: a server takes 16 MB by default, and many hosts set 1 MB."""

ROW_BYTES = 1000
"""A row's short values and the text around them. A long value may double, because quotes and zeros are escaped."""


@lru_cache(MAX_STATEMENTS)
def _block(dialect: Dialect, tables: Tables, version: int, stored: tuple[str, ...], queued: tuple[str, ...]) -> str:
    """A compound statement, which needs no right of its own."""
    names = dialect.identifier_preparer
    return (
        "BEGIN NOT ATOMIC"
        " DECLARE enqueued_at DATETIME(6) DEFAULT UTC_TIMESTAMP(6);"
        " DECLARE first_due DATETIME(6) DEFAULT GREATEST(COALESCE(CAST(%s AS DATETIME(6)), enqueued_at), enqueued_at)"
        " + INTERVAL %s MICROSECOND;"
        f" INSERT IGNORE INTO {names.format_table(tables.entry)} ({_names(dialect, stored)}, schema_version, due_at, created_at)"
        f" VALUES ({_marks(stored)}, {version}, first_due, enqueued_at);"
        " IF ROW_COUNT() = 1 THEN"
        f" INSERT INTO {names.format_table(tables.queue)}"
        f" ({_names(dialect, queued)}, state, due_at, deliveries, attempts, maybe_sent, key_epoch)"
        f" VALUES ({_marks(queued)}, 'pending', first_due, 0, 0, FALSE, 0);"
        " END IF; END"
    )


def _names(dialect: Dialect, columns: tuple[str, ...]) -> str:
    return ", ".join(dialect.identifier_preparer.quote(name) for name in columns)


def _marks(columns: tuple[str, ...]) -> str:
    return ", ".join(["%s"] * len(columns))
