"""Reads ordering groups for operators: which of them are blocked and by what, and what waits in one."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import CTE, Connection, ScalarSelect, Select, String, column, func, select, values

from dispatchers.admin.read.counts import Count, count_rows, planned_rows
from dispatchers.admin.read.entries import EntrySummary, read_entries_where
from dispatchers.store.records.queries import of_each, ordering_keys
from outbox.sql.clock import database_now
from outbox.sql.schema.tables import Tables
from outbox.sql.statements import read_by_index

MAX_WAITING = 1000
"""Up to this number the entries of one group are counted in a list of groups."""
MAX_SHOWN = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """An ordering group with entries that wait, or that is blocked.

    blocked_by, reason, since: the entry that blocks it until an operator releases it, why, and since when; None if it is not
    blocked. head: the first entry that waits; the others wait for it. head_state: its state.
    waiting: how many wait; above `MAX_WAITING` an estimate.
    """

    ordering_key: str
    blocked_by: UUID | None
    reason: str | None
    since: datetime | None
    head: UUID | None
    head_state: str | None
    waiting: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPage:
    """Groups by their ordering key, and the key after which the next page begins; None at the end.

    blocked: how many groups are blocked in all.
    """

    at: datetime
    groups: list[GroupSummary]
    next: str | None
    blocked: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDetails(GroupSummary):
    """One group. blocking: the entry that blocks it. first: the first `MAX_SHOWN` entries that wait, in the group's order."""

    at: datetime
    blocking: EntrySummary | None
    first: list[EntrySummary]


def list_groups(
    connection: Connection, tables: Tables, *, max_groups: int, after: str | None = None, only_blocked: bool = True
) -> GroupPage:
    """A page of the blocked groups, or of all with entries that wait. On PostgreSQL each group costs a few probes of an index."""
    read_by_index(connection)
    keys = (_blocked_keys if only_blocked else _waiting_keys)(connection, tables, after, max_groups + 1)
    listed = keys[:max_groups]
    return GroupPage(
        at=database_now(connection),
        groups=_read(connection, tables, listed),
        next=listed[-1] if len(keys) > max_groups else None,
        blocked=count_rows(connection, select(tables.blocked_group.c.ordering_key)),
    )


def read_group(connection: Connection, tables: Tables, ordering_key: str) -> GroupDetails:
    """One group; an empty one if nothing of it waits, and it is not blocked."""
    read_by_index(connection)
    (group,) = _read(connection, tables, [ordering_key])
    ids = list(connection.execute(_of_group(tables, ordering_key, tables.queue.c.id).limit(MAX_SHOWN)).scalars())
    wanted = [*ids, *([] if group.blocked_by is None else [group.blocked_by])]
    entries = {each.id: each for each in read_entries_where(connection, tables, tables.entry.c.id.in_(wanted))}
    return GroupDetails(
        **{name: getattr(group, name) for name in GroupSummary.__slots__},
        at=database_now(connection),
        blocking=None if group.blocked_by is None else entries.get(group.blocked_by),
        first=[entries[id] for id in ids if id in entries],
    )


def _blocked_keys(connection: Connection, tables: Tables, after: str | None, limit: int) -> list[str]:
    key = tables.blocked_group.c.ordering_key
    keys = select(key).order_by(key).limit(limit)
    return list(connection.execute(keys if after is None else keys.where(key > after)).scalars())


def _waiting_keys(connection: Connection, tables: Tables, after: str | None, limit: int) -> list[str]:
    keys = ordering_keys(tables, after, limit)
    return [key for key in connection.execute(select(keys.c.key).order_by(keys.c.number)).scalars() if key is not None]


def _read(connection: Connection, tables: Tables, wanted: Sequence[str]) -> list[GroupSummary]:
    """These groups, in three statements."""
    if not wanted:
        return []
    queue, blocked_group = tables.queue, tables.blocked_group
    found = connection.execute(select(blocked_group).where(blocked_group.c.ordering_key.in_(wanted)))
    blocked = {row.ordering_key: row for row in found}
    keys = values(column("key", String), name="given").data([(key,) for key in wanted]).cte("keys")

    def head(key: Any, keys: CTE) -> ScalarSelect[UUID]:
        found: Select[UUID] = _of_group(tables, key, queue.c.id)
        return found.limit(1).correlate(keys).scalar_subquery()

    def waiting(key: Any, keys: CTE) -> ScalarSelect[int]:
        some = _waits(tables, key, queue.c.id).limit(MAX_WAITING + 1).correlate(keys).subquery()
        return select(func.count()).select_from(some).scalar_subquery()

    rows = {row[0]: _Row._make(row) for row in of_each(connection, keys.c.key, keys, head, waiting, known=wanted)}
    heads = select(queue.c.id, queue.c.state).where(queue.c.id.in_([row.head for row in rows.values() if row.head]))
    states: dict[UUID, str] = {row.id: row.state for row in connection.execute(heads)}
    return [
        GroupSummary(
            ordering_key=key,
            blocked_by=blocked[key].entry_id if key in blocked else None,
            reason=blocked[key].reason if key in blocked else None,
            since=blocked[key].since if key in blocked else None,
            head=rows[key].head,
            head_state=states.get(rows[key].head),  # type: ignore[arg-type]  # None is no key
            waiting=_count(connection, tables, key, rows[key].waiting),
        )
        for key in wanted
    ]


class _Row(NamedTuple):
    key: str
    head: UUID | None
    waiting: int


def _count(connection: Connection, tables: Tables, key: str, counted: int) -> Count:
    if counted <= MAX_WAITING:
        return Count(value=counted, is_exact=True)
    planned = planned_rows(connection, _waits(tables, key, tables.queue.c.id))
    return Count(value=max(MAX_WAITING, planned), is_exact=False)


def _of_group(tables: Tables, key: Any, *columns: Any) -> Any:
    """What waits in the group, in its order."""
    return _waits(tables, key, *columns).order_by(tables.queue.c.position)


def _waits(tables: Tables, key: Any, *columns: Any) -> Any:
    """An uncertain entry is no part of its group any more: it blocks the group, or does not."""
    queue = tables.queue
    return select(*columns).where(queue.c.ordering_key == key, queue.c.state != "uncertain")
