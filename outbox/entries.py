"""How entries are written: both tables, any number of rows, one statement on PostgreSQL."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, TextClause, insert, select, text
from sqlalchemy.dialects import postgresql

from outbox.batches import Batch, Shape, batch_query, execute
from outbox.configuration import Configuration
from outbox.databases import clock, insert_unless_present
from outbox.keys import KeyFields, Tag
from outbox.schema import SCHEMA_VERSION, Tables


class NewEntry(NamedTuple):
    """A validated entry that is not in the database yet. Without `due_at` and `delay` it is due at once."""

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
    delay: timedelta | None
    keep_first: bool


def insert_entries(connection: Connection, entries: Sequence[NewEntry]) -> set[UUID]:
    """Insert entries of one configuration and their queue rows; returns the ids that were there before, left as they were.

    Sorted by id, so that two transactions that write the same entries queue up instead of deadlocking.
    """
    entries = sorted(entries, key=lambda entry: entry.id.int)
    tables = entries[0].configuration.tables
    if connection.dialect.name == "postgresql":
        return _insert_together(connection, tables, entries)
    return {entry.id for entry in entries if not _insert_one(connection, tables, entry)}


# Name and type of each value of a new entry.
_COLUMNS = {
    "id": "uuid",
    "env": "text",
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
        fields.env,
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


def _insert_together(connection: Connection, tables: Tables, entries: Sequence[NewEntry]) -> set[UUID]:
    batch = Batch(connection, _COLUMNS, [_row(entry) for entry in entries])
    result = execute(connection, _statement(tables, batch.shape), batch.parameters)
    if result.rowcount == len(entries):
        result.close()
        return set()
    if len(entries) == 1:
        return {entries[0].id}
    return {entry.id for entry in entries}.difference(result.scalars())


@cache
def _statement(tables: Tables, shape: Shape) -> TextClause:
    """Both tables at once. The ids come back, to be read if they are fewer than the rows; for one row the count tells."""
    quote = postgresql.dialect().identifier_preparer.format_table  # type: ignore[no-untyped-call]  # untyped in SQLAlchemy
    stored = ", ".join(name for name in _COLUMNS if name not in ("due_at", "delay"))
    return text(
        f"""
        WITH written AS (
            INSERT INTO {quote(tables.entry)} ({stored}, headers, schema_version, due_at, created_at)
            SELECT {stored}, '{{}}', {SCHEMA_VERSION}, COALESCE(due_at, now()) + COALESCE(delay, '0'), now()
            FROM ({batch_query(_COLUMNS, shape)}) AS n
            ON CONFLICT (id) DO NOTHING
            RETURNING id, destination, ordering_key, due_at
        )
        INSERT INTO {quote(tables.queue)}
            (id, destination, state, due_at, deliveries, attempts, maybe_sent, key_epoch, ordering_key)
        SELECT id, destination, 'pending', due_at, 0, 0, false, 0, ordering_key FROM written
        {"RETURNING id" if shape.differing else ""}
        """
    )


def _insert_one(connection: Connection, tables: Tables, entry: NewEntry) -> bool:
    now: datetime = connection.execute(select(clock())).scalar_one()
    due_at = (entry.due_at or now) + (entry.delay or timedelta(0))
    stored = dict(zip(_COLUMNS, _row(entry), strict=True)) | {
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
