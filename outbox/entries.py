"""How entries are written: both tables, any number of rows, one statement on PostgreSQL."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, TextClause, insert, select, text
from sqlalchemy.dialects import postgresql

from outbox.configuration import Configuration
from outbox.databases import clock, insert_unless_present
from outbox.keys import KeyFields, Tag
from outbox.schema import SCHEMA_VERSION, Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEntry:
    """A validated entry that is not in the database yet. `due_at` None: due at once, or `delay` from now."""

    configuration: Configuration
    id: UUID
    fields: KeyFields
    kid: str
    tag: Tag
    parent_id: UUID
    record_id: UUID | None
    destination: str
    payload: bytes
    options: str
    ordering_key: str | None
    due_at: datetime | None
    delay: timedelta
    keep_first: bool


def insert_entries(connection: Connection, entries: Sequence[NewEntry]) -> set[UUID]:
    """Insert entries of one configuration and their queue rows; returns the ids that were not there before.

    Sorted by id, so that two transactions that write the same entries queue up instead of deadlocking.
    """
    entries = sorted(entries, key=lambda entry: entry.id)
    tables = entries[0].configuration.tables
    if connection.dialect.name == "postgresql":
        return _insert_together(connection, tables, entries)
    return {entry.id for entry in entries if _insert_one(connection, tables, entry)}


def _insert_together(connection: Connection, tables: Tables, entries: Sequence[NewEntry]) -> set[UUID]:
    first = entries[0].fields
    shared = {"env": first.env, "version": SCHEMA_VERSION}
    if len(entries) == 1:
        row = _row(entries[0])
        statement = _statement(tables, many=False)
        return set(connection.execute(statement, shared | dict(zip(_COLUMNS, row, strict=True))).scalars())
    columns = zip(*map(_row, entries), strict=True)
    values = {name: list(column) for name, column in zip(_COLUMNS, columns, strict=True)}
    return set(connection.execute(_statement(tables, many=True), shared | values).scalars())


# Name and type of each value that differs between the entries of one statement.
_COLUMNS = {
    "id": "uuid",
    "scope": "text",
    "source": "text",
    "parent": "text",
    "operation": "text",
    "discriminator": "text",
    "kid": "text",
    "tag": "bytea",
    "parent_id": "uuid",
    "record_id": "uuid",
    "destination": "text",
    "payload": "bytea",
    "options": "text",
    "ordering_key": "text",
    "due_at": "timestamptz",
    "delay": "interval",
}


def _row(entry: NewEntry) -> tuple[Any, ...]:
    fields, parent = entry.fields, entry.fields.parent
    return (
        entry.id,
        parent.scope,
        parent.source,
        parent.key,
        fields.operation,
        fields.discriminator,
        entry.kid,
        entry.tag,
        entry.parent_id,
        entry.record_id,
        entry.destination,
        entry.payload,
        entry.options,
        entry.ordering_key,
        entry.due_at,
        entry.delay,
    )


@cache
def _statement(tables: Tables, *, many: bool) -> TextClause:
    """One statement for both tables. A single row goes without arrays: they cost a third of so small a statement."""
    quote = postgresql.dialect().identifier_preparer.format_table  # type: ignore[no-untyped-call]  # untyped in SQLAlchemy
    if many:
        arrays = ", ".join(f"CAST(:{name} AS {type}[])" for name, type in _COLUMNS.items())
        source = f"unnest({arrays}) AS d({', '.join(_COLUMNS)})"
    else:
        values = ", ".join(f"CAST(:{name} AS {type})" for name, type in _COLUMNS.items())
        source = f"(VALUES ({values})) AS d({', '.join(_COLUMNS)})"
    stored = [name for name in _COLUMNS if name not in ("due_at", "delay")]
    return text(
        f"""
        WITH written AS (
            INSERT INTO {quote(tables.entry)}
                (env, {", ".join(stored)}, headers, schema_version, due_at, created_at)
            SELECT :env, {", ".join(f"d.{name}" for name in stored)}, '{{}}', CAST(:version AS smallint),
                COALESCE(d.due_at, now()) + d.delay, now()
            FROM {source}
            ON CONFLICT (id) DO NOTHING
            RETURNING id, destination, ordering_key, due_at
        )
        INSERT INTO {quote(tables.queue)}
            (id, destination, state, due_at, deliveries, attempts, maybe_sent, key_epoch, ordering_key)
        SELECT id, destination, 'pending', due_at, 0, 0, false, 0, ordering_key FROM written
        RETURNING id
        """
    )


def _insert_one(connection: Connection, tables: Tables, entry: NewEntry) -> bool:
    now: datetime = connection.execute(select(clock())).scalar_one()
    due_at = (entry.due_at or now) + entry.delay
    stored = dict(zip(_COLUMNS, _row(entry), strict=True)) | {
        "env": entry.fields.env,
        "headers": "{}",
        "schema_version": SCHEMA_VERSION,
        "due_at": due_at,
        "created_at": now,
    }
    del stored["delay"]
    written = connection.execute(insert_unless_present(connection, tables.entry).values(stored))
    if not written.rowcount:
        return False
    connection.execute(
        insert(tables.queue).values(
            id=entry.id,
            destination=entry.destination,
            state="pending",
            due_at=due_at,
            deliveries=0,
            attempts=0,
            maybe_sent=False,
            key_epoch=0,
            ordering_key=entry.ordering_key,
        )
    )
    return True
