"""Copies what the outbox keeps of one scope, for example of one tenant, to another database: see docs/sharding.md."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Select, Table, func, insert, select

from outbox.sql.dialect import dialect_of
from outbox.sql.schema.tables import Tables, is_open, tables_of
from outbox.sql.statements import stored_body

BATCH_ROWS = 500


def copy_scope(
    source: Connection, target: Connection, scope: str, *, schema: str | None = None, prefix: str = "outbox_"
) -> int:
    """Copy the ended entries and the answered requests of a scope. Returns how many are not ended yet: then nothing is copied.

    A blocked ordering group is not ended either. So a copy that was complete once answers repeated requests, and nothing of the
    scope is left to send in `source`. The app must write nothing for the scope in `source` from before the first call on.
    The caller commits. A repeated call copies only what is missing. Reads every entry and every record of `source`, where
    nothing is changed: retention deletes the rows.
    """
    tables = tables_of(schema, prefix)
    unfinished: int = sum(source.execute(count).scalar_one() for count in _unfinished(tables, scope))
    if not unfinished:
        for rows in _batches(source, select(tables.entry).where(tables.entry.c.scope == scope)):
            _copy_entries(source, target, tables, rows)
        for table in (tables.record, tables.tombstone):
            for rows in _batches(source, _of_scope(table, scope, tables)):
                _copy(target, table, rows)
    return unfinished


def _unfinished(tables: Tables, scope: str) -> Iterator[Select[Any]]:
    """Count what is unfinished, in this order: a request that ends may enqueue entries, and an entry may block its group."""
    entry, queue, blocked, record = tables.entry, tables.queue, tables.blocked_group, tables.record
    for state in ("accepted", "leased"):
        yield select(func.count()).select_from(record).where(is_open(record, state), record.c.scope == scope)
    counted = select(func.count()).where(entry.c.scope == scope)
    yield counted.select_from(queue.join(entry, entry.c.id == queue.c.id))
    yield counted.select_from(blocked.join(entry, entry.c.id == blocked.c.entry_id))


def _of_scope(table: Table, scope: str, tables: Tables) -> Select[Any]:
    if table is not tables.record:
        return select(table).where(table.c.scope == scope)
    # the target may have other partitions of bodies, or none: it puts the body where it belongs
    kept = [column for column in table.c if column.name not in ("body", "body_day")]
    return select(*kept, stored_body(table).label("body")).where(table.c.scope == scope)


def _copy_entries(source: Connection, target: Connection, tables: Tables, rows: Sequence[Mapping[str, Any]]) -> None:
    """Copy entries with their settlements and histories. An entry that is already there was copied with both."""
    ids = [row["id"] for row in rows]
    present = set(target.execute(select(tables.entry.c.id).where(tables.entry.c.id.in_(ids))).scalars())
    new = [id for id in ids if id not in present]
    _copy(target, tables.entry, (row for row in rows if row["id"] not in present))
    _copy(target, tables.settlement, _read(source, select(tables.settlement).where(tables.settlement.c.id.in_(new))))
    event = tables.event
    history = [column for column in event.c if not column.primary_key]  # its numbers are those of one database
    events = _read(source, select(*history).where(event.c.entry_id.in_(new)).order_by(event.c.id))
    if events:
        target.execute(insert(event), events)


def _copy(target: Connection, table: Table, rows: Iterable[Mapping[str, Any]]) -> None:
    found = list(rows)
    if found:
        target.execute(dialect_of(target).insert_unless_present(table), found)


def _read(source: Connection, query: Select[Any]) -> list[dict[str, Any]]:
    return [dict(row) for row in source.execute(query).mappings()]


def _batches(source: Connection, query: Select[Any]) -> Iterator[Sequence[Mapping[str, Any]]]:
    rows = iter(source.execution_options(yield_per=BATCH_ROWS).execute(query).mappings())
    while batch := [dict(row) for row in islice(rows, BATCH_ROWS)]:
        yield batch
