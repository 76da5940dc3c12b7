"""Deletes expired rows in batches, in plain SQL for every database.

The caller runs each batch in a transaction. A batch reads the next rows that are old enough, oldest first, and locks those that
are free (`SKIP LOCKED`: two maintenance runs divide the work). It deletes the rows that the rules allow, skips the others, and
returns where the next batch begins. Conditions get "now" as a value, because an index condition needs a constant.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Table,
    and_,
    func,
    insert,
    or_,
    select,
    tuple_,
)

from dispatchers.maintenance.retention import Children, Retention
from outbox.sql.clock import clock, database_now
from outbox.sql.dialect import dialect_of
from outbox.sql.schema.parent_index import is_under
from outbox.sql.schema.tables import Tables
from outbox.sql.statements import read_by_index


class Place(NamedTuple):
    """A row's place in the order in which a step reads its table."""

    at: datetime
    id: UUID


class Scan(NamedTuple):
    """The task of a batch. after: where the last batch ended. dry: delete nothing."""

    retention: Retention
    max_rows: int
    after: Place | None = None
    dry: bool = False


class Batch(NamedTuple):
    """The result of a batch. after: where the next batch begins; None if no more rows are old enough."""

    scanned: int
    deleted: int
    after: Place | None


Step: TypeAlias = Callable[[Connection, Tables, Scan], Batch]


def tombstone_records(connection: Connection, tables: Tables, scan: Scan) -> Batch:
    """Delete answered records past their `keep_until` whose entries are all settled. Tombstones then refuse their keys.

    A request whose lease expired is deleted too, because no attempt may take it over any more. Its handler may have had effects,
    so a tombstone always replaces it. No other open record is ever deleted.
    """
    now = database_now(connection)
    places = _next(connection, _of_records(tables), now, scan)
    tombstoned = _that_may_go(connection, tables, [place.id for place in places], now, scan)
    if tombstoned and not scan.dry:
        _write_tombstones(connection, tables, tombstoned, scan.retention)
        dialect_of(connection).delete(connection, tables.record.c.id, tombstoned)
    return _batch(places, len(tombstoned), scan)


def delete_entries(connection: Connection, tables: Tables, scan: Scan) -> Batch:
    """Delete settled entries without a record, with their settlements and events, `retention` after they were settled.

    An entry that blocks its group is kept until the group is released. A dry run ignores records that may be deleted.
    """
    entry, settlement = tables.entry, tables.settlement
    now, aged = database_now(connection), _of_entries(tables)
    before = now - scan.retention.entries
    places = _next(connection, aged, before, scan)
    is_queued = _row_of(tables.queue, settlement.c.id).is_not(None)
    ids = _taken(connection, aged, before, [place.id for place in places], scan, ~is_queued)
    needed = _needed(connection, tables, ids, now, scan)
    expired = [id for id in ids if id not in needed]
    if expired and not scan.dry:
        dialect_of(connection).delete(connection, tables.event.c.entry_id, expired)
        dialect_of(connection).delete(connection, settlement.c.id, expired)
        dialect_of(connection).delete(connection, entry.c.id, expired)
    return _batch(places, len(expired), scan)


def forget_tombstones(connection: Connection, tables: Tables, scan: Scan) -> Batch:
    """Delete tombstones past their `forget_at`: no service remembers their keys any more."""
    now, aged = database_now(connection), _of_tombstones(tables)
    places = _next(connection, aged, now, scan)
    expired = _taken(connection, aged, now, [place.id for place in places], scan)
    if expired and not scan.dry:
        dialect_of(connection).delete(connection, aged.id, expired)
    return _batch(places, len(expired), scan)


STEPS: Mapping[str, Step] = {
    # The order matters: rows that one step deletes allow the next step to delete others.
    "records": tombstone_records,
    "entries": delete_entries,
    "tombstones": forget_tombstones,
}


def overdue(connection: Connection, tables: Tables, retention: Retention) -> dict[str, int]:
    """How many rows each step has to read, for a progress bar. It reads all of them."""
    now = database_now(connection)
    before = {"records": now, "entries": now - retention.entries, "tombstones": now}
    aged = {"records": _of_records(tables), "entries": _of_entries(tables), "tombstones": _of_tombstones(tables)}
    return {
        name: connection.execute(select(func.count()).where(*_old_enough(aged[name], before[name]))).scalar_one()
        for name in STEPS
    }


# --- which rows come next


class _Aged(NamedTuple):
    """The rows of a table that may be deleted at some time, in order of age."""

    id: Column[Any]
    at: Column[Any]
    conditions: tuple[ColumnElement[bool], ...] = ()


def _of_records(tables: Tables) -> _Aged:
    record = tables.record
    return _Aged(
        record.c.id, record.c.keep_until, (or_(record.c.answered_at.is_not(None), record.c.lease_until < clock()),)
    )


def _of_entries(tables: Tables) -> _Aged:
    return _Aged(tables.settlement.c.id, tables.settlement.c.settled_at)


def _of_tombstones(tables: Tables) -> _Aged:
    return _Aged(tables.tombstone.c.id, tables.tombstone.c.forget_at)


def _old_enough(aged: _Aged, before: datetime) -> tuple[ColumnElement[bool], ...]:
    return (aged.at < before, *aged.conditions)


def _next(connection: Connection, aged: _Aged, before: datetime, scan: Scan) -> list[Place]:
    """The rows of the next batch. From here on, the transaction reads its tables by their indexes."""
    read_by_index(connection)
    query = select(aged.at, aged.id).where(*_old_enough(aged, before)).order_by(aged.at, aged.id).limit(scan.max_rows)
    if scan.after is not None:
        query = query.where(tuple_(aged.at, aged.id) > scan.after)
    return [Place(*row) for row in connection.execute(query)]


def _taken(
    connection: Connection,
    aged: _Aged,
    before: datetime,
    ids: Collection[UUID],
    scan: Scan,
    *conditions: ColumnElement[bool],
) -> list[UUID]:
    """Lock the rows that are free; returns their ids. A dry run returns all ids. Their age is checked again, because another
    maintenance run may have replaced the row that was checked by a new one.
    """
    query = select(aged.id).where(dialect_of(connection).among(aged.id, ids), *_old_enough(aged, before), *conditions)
    if not scan.dry:
        query = query.with_for_update(of=aged.id.table, skip_locked=True)
    return list(connection.execute(query).scalars())


def _batch(places: Sequence[Place], deleted: int, scan: Scan) -> Batch:
    return Batch(len(places), deleted, places[-1] if len(places) == scan.max_rows else None)


# --- which rows may be deleted


def _that_may_go(
    connection: Connection, tables: Tables, ids: Collection[UUID], now: datetime, scan: Scan
) -> dict[UUID, Children]:
    """Lock the records that may be deleted. Returns each with its entries' state."""
    taken = _taken(connection, _of_records(tables), now, ids, scan)
    children = _children(connection, tables, taken)
    for id, until in _abandoned(connection, tables, taken).items():
        children[id] += Children(last_settled_at=until)  # the handler's calls to services ended with the lease
    return {id: children[id] for id in taken if not children[id].unsettled}


def _needed(connection: Connection, tables: Tables, ids: Collection[UUID], now: datetime, scan: Scan) -> set[UUID]:
    """The settled entries that must be kept, because they have a record or block their group."""
    entry, blocked, record = tables.entry, tables.blocked_group, tables.record
    blocks = select(blocked.c.entry_id).where(blocked.c.ordering_key == entry.c.ordering_key).scalar_subquery()
    asked = select(entry.c.id, entry.c.parent_id, entry.c.record_id, blocks).where(
        dialect_of(connection).among(entry.c.id, ids)
    )
    rows = [tuple(row) for row in connection.execute(asked)]
    keys = {id for _, *of_request, _ in rows for id in of_request if id is not None}
    standing = set(
        connection.execute(select(record.c.id).where(dialect_of(connection).among(record.c.id, keys))).scalars()
    )
    if scan.dry:
        standing.difference_update(_that_may_go(connection, tables, standing, now, scan))
    return {id for id, parent_id, record_id, blocking in rows if blocking == id or {parent_id, record_id} & standing}


def _children(connection: Connection, tables: Tables, ids: Collection[UUID]) -> dict[UUID, Children]:
    """The state of each record's entries: those under its own key, and those that it caused under other keys."""
    entry, queue, settlement, record = tables.entry, tables.queue, tables.settlement, tables.record
    unsettled = func.count(_row_of(queue, entry.c.id))
    last_settled_at = func.max(_row_of(settlement, entry.c.id, settlement.c.settled_at))
    own = is_under(entry, record.c.id)
    elsewhere = and_(entry.c.record_id == record.c.id, entry.c.record_id != entry.c.parent_id)
    # Subqueries instead of a join: the planner cannot estimate a range of ids, and would read the whole table.
    counts = [
        select(column).where(entries).correlate(record).scalar_subquery()
        for entries in (own, elsewhere)
        for column in (unsettled, last_settled_at)
    ]
    children: dict[UUID, Children] = {}
    for id, *both in connection.execute(
        select(record.c.id, *counts).where(dialect_of(connection).among(record.c.id, ids))
    ):
        children[id] = Children(*both[:2]) + Children(*both[2:])
    return children


def _abandoned(connection: Connection, tables: Tables, ids: Collection[UUID]) -> dict[UUID, datetime]:
    record = tables.record
    leased = select(record.c.id, record.c.lease_until).where(dialect_of(connection).among(record.c.id, ids))
    return {row.id: row.lease_until for row in connection.execute(leased.where(record.c.lease_until.is_not(None)))}


def _row_of(table: Table, id: Column[Any], column: Column[Any] | None = None) -> Any:
    """A column of the row with this id, or NULL. Not a join, which may read the whole table if it has a few hundred pages."""
    return select(table.c.id if column is None else column).where(table.c.id == id).scalar_subquery()


def _write_tombstones(
    connection: Connection, tables: Tables, tombstoned: Mapping[UUID, Children], retention: Retention
) -> None:
    """Write a tombstone for each deleted record that has entries. It replaces a tombstone of an earlier use of the key."""
    record, tombstone = tables.record, tables.tombstone
    forget_at = {id: at for id, children in tombstoned.items() if (at := children.forget_at(retention)) is not None}
    if not forget_at:
        return
    kept = [record.c[column.name] for column in tombstone.c if column.name in record.c]
    rows = (
        connection.execute(select(*kept).where(dialect_of(connection).among(record.c.id, forget_at))).mappings().all()
    )
    dialect_of(connection).delete(connection, tombstone.c.id, forget_at)
    connection.execute(insert(tombstone), [{**row, "forget_at": forget_at[row["id"]]} for row in rows])
