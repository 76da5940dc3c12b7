"""Finds where a page of a list of entries begins and ends: by keyset, and if asked within a bound of how much is read."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from sqlalchemy import Connection, FromClause, Select, func, literal, select, true, union_all

from dispatchers.admin.read.entry_filter import Filter, compared_columns, entry_conditions, instant_of, narrowed
from dispatchers.admin.read.keyset import following
from dispatchers.admin.read.plain_values import Place
from dispatchers.store.records.queries import destination_names
from outbox.sql.dialect import dialect_of
from outbox.sql.schema.column_types import Instant
from outbox.sql.schema.tables import Tables
from outbox.sql.statements import read_by_index
from outbox.times import NEVER

Rows: TypeAlias = Select[*tuple[Any, ...]]
"""Each has `at` and `id`."""
Narrow: TypeAlias = Callable[[Rows], Rows]
Scan: TypeAlias = Callable[[Place[UUID] | None, int], Rows]
"""The next rows of a list after a place, so many, with the columns that a filter compares."""
Compare: TypeAlias = Callable[[FromClause, Rows], Rows]
"""A statement about rows of a scan, with the filter's conditions."""


class Places(NamedTuple):
    """The entries of a page, and where the next page begins; None at the end. A page may be short, and not the last."""

    places: list[Place[UUID]]
    next: Place[UUID] | None


def read_places(
    connection: Connection,
    tables: Tables,
    wanted: Filter,
    now: datetime,
    *,
    max_entries: int,
    after: Place[UUID] | None = None,
    max_rows: int | None = None,
) -> Places:
    """A page of what `wanted` selects. max_rows: so many entries are compared with the filter; None for no bound."""
    if max_rows is not None or _are_uncertain(wanted):
        read_by_index(connection)
    if max_rows is None or _has_index(wanted):
        narrow = partial(narrowed, tables, wanted, now)
        found = ordered(connection, tables, wanted, now, narrow, after=after, limit=max_entries + 1)
        places = _fetched(connection, found)
        return Places(places[:max_entries], places[max_entries - 1] if len(places) > max_entries else None)
    if not (wanted.is_ended or _are_uncertain(wanted)):
        return _read_waiting(connection, tables, wanted, now, max_entries, after, max_rows)
    columns = _with_columns(tables, wanted)
    if _are_uncertain(wanted) and entry_conditions(tables, wanted, now):
        max_rows = max(
            max_rows // 2, 1
        )  # each costs two reads, its own and that of its entry: these rows lie far apart

    def scan(after: Place[UUID] | None, limit: int) -> Rows:
        return ordered(connection, tables, wanted, now, columns, after=after, limit=limit)

    return _compare(connection, wanted, scan, _comparison(tables, wanted, now), max_entries, after, max_rows)


def _compare(
    connection: Connection,
    wanted: Filter,
    scan: Scan,
    compare: Compare,
    max_entries: int,
    after: Place[UUID] | None,
    max_rows: int,
) -> Places:
    """Compare the rows of a list with the filter, a part of the list after another, until the page is full.

    The parts grow: a filter that selects much costs little, and one that selects little takes few statements. The limit of the
    part keeps the conditions out of the choice of its index, also in a kept plan and with wrong statistics.
    """
    places: list[Place[UUID]] = []
    limit = max_entries + 1
    while True:
        limit = min(limit, max_rows)
        rows = scan(after, limit).subquery("scanned")
        at = rows.c.at.desc() if wanted.is_ended else rows.c.at
        part = select(rows.c.at, rows.c.id).order_by(at, rows.c.id)
        places += _fetched(connection, compare(rows, part).limit(max_entries + 1 - len(places)))
        if len(places) > max_entries:
            return Places(places[:max_entries], places[max_entries - 1])
        last = _fetched(connection, part.offset(limit - 1).limit(1))
        max_rows -= limit
        if not last or max_rows <= 0:
            return Places(places, last[0] if last else None)
        after, limit = last[0], limit * 4


def _comparison(tables: Tables, wanted: Filter, now: datetime) -> Compare:
    return lambda rows, found: narrowed(tables, wanted, now, found, rows)


def _with_columns(tables: Tables, wanted: Filter) -> Narrow:
    columns = compared_columns(wanted.rows(tables), wanted)
    return lambda rows: rows.add_columns(*columns)


# --- what waits: first what has a due time


def _read_waiting(
    connection: Connection,
    tables: Tables,
    wanted: Filter,
    now: datetime,
    max_entries: int,
    after: Place[UUID] | None,
    max_rows: int,
) -> Places:
    """Thousands may have no due time: uncertain, suspended and blocked ones. Their index has them in no order."""
    compare, columns = _comparison(tables, wanted, now), _with_columns(tables, wanted)
    is_dated = not wanted.suspended and (after is None or after.at < NEVER)
    dated = Places([], None)
    if is_dated:
        any_parent = replace(wanted, parent=None)  # `compare` compares it

        def narrow(rows: Rows) -> Rows:
            return columns(rows).where(tables.queue.c.due_at < NEVER)

        def due(after: Place[UUID] | None, limit: int) -> Rows:
            return ordered(connection, tables, any_parent, now, narrow, after=after, limit=limit)

        of_each = max(max_rows // parts_of(connection, tables, wanted), max_entries + 1)
        dated = _compare(connection, wanted, due, compare, max_entries, after, of_each)
        if dated.next is not None:
            return dated
    left = max_entries - len(dated.places)

    def compare_undated(rows: FromClause, found: Rows) -> Rows:
        return compare(rows, found).where(rows.c.due_at == NEVER)

    scan, start = _undated_scan(connection, tables, wanted, max_rows), None if is_dated else after
    found = _compare(connection, wanted, scan, compare_undated, max(left, 1), start, max_rows)
    if left == 0:
        return Places(dated.places, dated.places[-1] if found.places or found.next else None)
    return Places([*dated.places, *found.places], found.next)


def parts_of(connection: Connection, tables: Tables, wanted: Filter) -> int:
    """How many places of an index a list is read from: one for each destination, if the list is of waiting entries."""
    is_apart = not (wanted.is_ended or _are_uncertain(wanted) or _has_index(wanted))
    if not is_apart or wanted.destination is not None or not dialect_of(connection).has_lateral:
        return 1
    names = destination_names(tables)
    return max(connection.execute(select(func.count(names.c.name))).scalar_one(), 1)


def _undated_scan(connection: Connection, tables: Tables, wanted: Filter, max_rows: int) -> Scan:
    """How those without a due time are read, by their ids. Few of them: all, by the queue's index. Many: the whole queue by its
    primary key, in which they are then not far apart.
    """
    queue = tables.queue
    id, is_undated, columns = queue.c.id, queue.c.due_at == NEVER, _with_columns(tables, wanted)

    def one_by_one(after: Place[UUID] | None, limit: int) -> Rows:
        rows = columns(select(literal(NEVER, Instant).label("at"), id))
        return (rows if after is None else rows.where(id > after.id)).order_by(id).limit(limit)

    def all_at_once(after: Place[UUID] | None, limit: int) -> Rows:
        rows = one_by_one(after, limit).where(is_undated)
        if wanted.destination is not None:
            return rows.where(queue.c.destination == wanted.destination)
        return rows if not dialect_of(connection).has_lateral else _of_each_destination(tables, rows, limit)

    some = select(id).where(is_undated)
    if wanted.destination is not None:
        some = some.where(queue.c.destination == wanted.destination)
    elif dialect_of(connection).has_lateral:
        names = destination_names(tables)
        some = some.where(queue.c.destination == names.c.name).correlate(names).limit(max_rows)
        each = some.lateral("each")
        some = select(each.c.id).select_from(names.join(each, true()))
    counted = select(func.count()).select_from(some.limit(max_rows).subquery())
    are_few = connection.execute(counted).scalar_one() < max_rows
    return all_at_once if are_few else one_by_one


def _fetched(connection: Connection, found: Rows) -> list[Place[UUID]]:
    return [Place(row.at, row.id) for row in connection.execute(found)]


def everything(rows: Rows) -> Rows:
    """No condition."""
    return rows


def _has_index(wanted: Filter) -> bool:
    """Whether an index finds exactly what waits in an ordering group, or belongs to one parent."""
    parent = wanted.parent
    is_whole = parent is not None and None not in (parent.key, parent.env, parent.scope, parent.source)
    return is_whole or (wanted.ordering_key is not None and not wanted.is_ended)


def _are_uncertain(wanted: Filter) -> bool:
    return set(wanted.states) == {"uncertain"}


def ordered(
    connection: Connection,
    tables: Tables,
    wanted: Filter,
    now: datetime,
    narrow: Narrow,
    *,
    after: Place[UUID] | None,
    limit: int,
) -> Rows:
    """The next `limit` rows in the list's order, each by an index: what ended newest first, what is only uncertain by when its
    doubt began, all else by its due time.
    """
    since = None if wanted.since is None else instant_of(wanted.since, now)
    if wanted.is_ended:
        return _ended(tables, narrow, since, after, limit)
    if _are_uncertain(wanted):
        return _doubtful(tables, narrow, after, limit)
    return _waiting(connection, tables, wanted, narrow, since, after, limit)


def beginning(connection: Connection, tables: Tables, wanted: Filter, limit: int) -> Rows:
    """The first `limit` rows of the whole list of these states, in its order, which no page continues. Those that wait for one
    instant come in any order: thousands may have no due time, and to sort them all would be read.
    """
    if wanted.is_ended:
        return _ended(tables, everything, None, None, limit)
    if _are_uncertain(wanted):
        return _doubtful(tables, everything, None, limit)
    queue = tables.queue
    due = select(queue.c.due_at.label("at"), queue.c.id).order_by(queue.c.due_at).limit(limit)
    return due if not dialect_of(connection).has_lateral else _of_each_destination(tables, due, limit)


def _ended(tables: Tables, narrow: Narrow, since: datetime | None, after: Place[UUID] | None, limit: int) -> Rows:
    settlement = tables.settlement
    at, id = settlement.c.settled_at, settlement.c.id
    found = narrow(select(at.label("at"), id))
    if since is not None:
        found = found.where(at >= since)
    return found.where(*following(after, at, id, is_descending=True)).order_by(at.desc(), id).limit(limit)


def _doubtful(tables: Tables, narrow: Narrow, after: Place[UUID] | None, limit: int) -> Rows:
    """What may have been sent. Last, as if their doubt began at NEVER, those whose present key was certainly never sent."""
    queue = tables.queue
    at, id = queue.c.in_doubt_since, queue.c.id
    unsent = narrow(select(literal(NEVER, Instant).label("at"), id)).where(queue.c.maybe_sent, at.is_(None))
    if after is not None and after.at >= NEVER:
        return unsent.where(id > after.id).order_by(at, id).limit(limit)
    sent = narrow(select(at.label("at"), id)).where(queue.c.maybe_sent, at.is_not(None), *following(after, at, id))
    parts = [
        sent.order_by(at, id).limit(limit).subquery("sent"),
        unsent.order_by(at, id).limit(limit).subquery("unsent"),
    ]
    both = union_all(*(select(*part.c) for part in parts)).subquery("doubtful")
    return select(*both.c).order_by(both.c.at, both.c.id).limit(limit)


def _waiting(
    connection: Connection,
    tables: Tables,
    wanted: Filter,
    narrow: Narrow,
    since: datetime | None,
    after: Place[UUID] | None,
    limit: int,
) -> Rows:
    queue = tables.queue
    at, id = queue.c.due_at, queue.c.id
    found = narrow(select(at.label("at"), id))
    if wanted.destination is not None:
        found = found.where(queue.c.destination == wanted.destination)
    if wanted.suspended:
        found = found.where(at == NEVER)  # as they have no due time
    if since is not None:
        found = found.where(at >= since)
    found = found.where(*following(after, at, id)).order_by(at, id).limit(limit)
    by_parent = wanted.parent is not None and wanted.parent.key is not None
    if by_parent or _has_index(wanted) or wanted.destination is not None or not dialect_of(connection).has_lateral:
        return found
    return _of_each_destination(tables, found, limit)


def _of_each_destination(tables: Tables, found: Rows, limit: int) -> Rows:
    """The first of all, from the first of each: the queue's index begins with the destination."""
    names = destination_names(tables)
    each: Any = found.where(tables.queue.c.destination == names.c.name).correlate(names).lateral("each")
    return select(*each.c).select_from(names.join(each, true())).order_by(each.c.at, each.c.id).limit(limit)
