"""One entry and its queue row in one statement, for MariaDB: most transactions write one, and each statement is a round trip."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Dialect

from outbox.sql.schema import SCHEMA_VERSION, STATEMENTS_MAX, Tables
from outbox.times import MICROSECOND


def insert_entry(connection: Connection, tables: Tables, entry: Mapping[str, Any], queued: Mapping[str, Any]) -> bool:
    """Write an entry without an ordering key. Returns False, having written nothing, if its id is there.

    entry: the values of its row, with the `due_at` and the `delay` that the app gave, or None. queued: what else the queue row
    has, its id too, beside the due time and what is equal for all.
    """
    stored = {name: value for name, value in entry.items() if name not in ("due_at", "delay")}
    delay: timedelta | None = entry["delay"]
    due_at: datetime | None = entry["due_at"]
    naive = None if due_at is None else due_at.astimezone(UTC).replace(tzinfo=None)
    given = (naive, 0 if delay is None else delay // MICROSECOND, *stored.values(), *queued.values())
    parameters = tuple(value.bytes if isinstance(value, UUID) else value for value in given)
    statement = _block(connection.dialect, tables, tuple(stored), tuple(queued))
    return bool(connection.exec_driver_sql(statement, parameters).scalar_one())


@lru_cache(STATEMENTS_MAX)
def _block(dialect: Dialect, tables: Tables, stored: tuple[str, ...], queued: tuple[str, ...]) -> str:
    """A compound statement, which needs no right of its own."""
    names = dialect.identifier_preparer
    return (
        "BEGIN NOT ATOMIC"
        " DECLARE enqueued_at DATETIME(6) DEFAULT UTC_TIMESTAMP(6);"
        " DECLARE first_due DATETIME(6) DEFAULT GREATEST(COALESCE(CAST(%s AS DATETIME(6)), enqueued_at), enqueued_at)"
        " + INTERVAL %s MICROSECOND;"
        f" INSERT IGNORE INTO {names.format_table(tables.entry)} ({_names(dialect, stored)}, schema_version, due_at, created_at)"
        f" VALUES ({_marks(stored)}, {SCHEMA_VERSION}, first_due, enqueued_at);"
        " IF ROW_COUNT() = 1 THEN"
        f" INSERT INTO {names.format_table(tables.queue)}"
        f" ({_names(dialect, queued)}, state, due_at, deliveries, attempts, maybe_sent, key_epoch)"
        f" VALUES ({_marks(queued)}, 'pending', first_due, 0, 0, FALSE, 0);"
        " SELECT 1; ELSE SELECT 0; END IF; END"
    )


def _names(dialect: Dialect, columns: tuple[str, ...]) -> str:
    return ", ".join(dialect.identifier_preparer.quote(name) for name in columns)


def _marks(columns: tuple[str, ...]) -> str:
    return ", ".join(["%s"] * len(columns))
