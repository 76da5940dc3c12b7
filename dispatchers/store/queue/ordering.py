"""Which entry of an ordering group may be sent, and what its end does to the group.

The app's side is `outbox/sql/ordering.py`, which explains why the order is kept. Entries without an ordering key cost no
statement here.
"""

import logging
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, Delete, Row, bindparam, delete, select, update

from dispatchers.store.queue.queue_update import queue_update
from dispatchers.transitions import (
    ClaimedEntry,
    Ending,
    Lease,
    MarkUncertain,
    Release,
    RetryCallback,
    SendAgain,
    Settle,
    Transition,
)
from outbox.sql.clock import clock, later
from outbox.sql.dialect import dialect_of
from outbox.sql.key_locks import certify
from outbox.sql.ordering import Place, advance_unlocked, unblocked
from outbox.sql.schema.tables import MAX_STATEMENTS, Tables
from outbox.times import MICROSECOND, NEVER

log = logging.getLogger("outbox.dispatcher")

MOMENT = timedelta(milliseconds=100)
"""If another transaction has locked the head of a group, its entries are checked again after this delay."""


class Sorted(NamedTuple):
    """The claims of an exchange. may_go: they may be sent. must_wait: they may not be sent yet, and are released."""

    may_go: list[ClaimedEntry]
    must_wait: list[Ending]


def sort_out(connection: Connection, tables: Tables, claimed: list[ClaimedEntry]) -> Sorted:
    """Separate the heads of their groups from the other entries. An entry whose outcome is already decided need not wait."""
    ordered = [entry for entry in claimed if entry.position is not None and entry.outcome.known is None]
    if not ordered:
        return Sorted(claimed, [])
    ids = [entry.id for entry in ordered]
    groups = {row.ordering_key: row for row in connection.execute(_heads(tables), {"ids": ids})}
    of = {entry.id: groups[entry.ordering_key] for entry in ordered}
    blocks = {entry.id: of[entry.id].blocked_by for entry in ordered if _is_blocked(entry, of[entry.id])}
    heads = {id: group.head for id, group in of.items() if id not in blocks and group.head != id}
    keys = {entry.id: entry.ordering_key or "" for entry in ordered}
    certified = certify(connection, tables, {keys[id] for id in (*heads, *blocks)}, waits=False)
    blocked = _touch_blocks(connection, tables, {keys[id] for id in blocks if keys[id] in certified})
    touched = _touch_heads(connection, tables, {head for id, head in heads.items() if keys[id] in certified}, claimed)
    waits = {id: _waits(head, head in touched) for id, head in heads.items()}
    waits |= {id: _waits(head, keys[id] in blocked) for id, head in blocks.items()}
    must_wait: list[Ending] = [(entry, waits[entry.id]) for entry in ordered if entry.id in waits]
    return Sorted([entry for entry in claimed if entry.id not in waits], must_wait)


def _waits(head: UUID, is_touched: bool) -> Release:
    return Release(
        f"it waits for entry {head}, which is before it in its ordering group", None if is_touched else MOMENT
    )


@lru_cache(MAX_STATEMENTS)
def _heads(tables: Tables) -> Any:
    """For each group of the entries `ids`: its first entry that is not uncertain, and the entry that blocks the group.

    It searches once for each group, not for each entry, because a search reads dead rows that vacuum could not remove yet.
    """
    queue, blocked = tables.queue, tables.blocked_group
    first, blocking = queue.alias("first"), queue.alias("blocking")
    group = (
        select(queue.c.ordering_key)
        .where(queue.c.id.in_(bindparam("ids", expanding=True)))
        .distinct()
        .subquery("ordering_group")
    )
    head = (
        select(first.c.id)
        .where(first.c.ordering_key == group.c.ordering_key, first.c.state != "uncertain")
        .order_by(first.c.position)
        .limit(1)
        .scalar_subquery()
    )
    rows = group.outerjoin(blocked, blocked.c.ordering_key == group.c.ordering_key)
    rows = rows.outerjoin(blocking, blocking.c.id == blocked.c.entry_id)
    found = select(
        group.c.ordering_key,
        head.label("head"),
        blocked.c.entry_id.label("blocked_by"),
        blocking.c.position.label("blocked_at"),
    )
    return found.select_from(rows)


def _is_blocked(entry: ClaimedEntry, group: Row[Any]) -> bool:
    """Whether the entry comes after the one that blocks its group. That one and earlier ones may be sent again, if an operator
    has decided so.
    """
    if group.blocked_by is None or entry.position is None:
        return False
    return group.blocked_at is None or entry.position > group.blocked_at


def _touch_heads(
    connection: Connection, tables: Tables, heads: set[UUID], claimed: Sequence[ClaimedEntry]
) -> set[UUID]:
    """Lock the heads, so that none leaves its group before it sees the entries that this transaction blocks.

    A head that is blocked itself becomes due. This transaction's own claims are locked already. Returns the heads that are
    locked; the other ones may have left their groups.
    """
    ours = {entry.id for entry in claimed}
    if not heads - ours:
        return heads
    queue = tables.queue
    still = select(queue.c.id).where(queue.c.id.in_(heads - ours), queue.c.state != "uncertain")
    locked = set(connection.execute(still.with_for_update(skip_locked=True)).scalars())
    if locked:
        touch = update(queue).where(queue.c.id.in_(locked)).values(due_at=unblocked(connection, tables))
        connection.execute(touch)
    return locked | (heads & ours)


def _touch_blocks(connection: Connection, tables: Tables, ordering_keys: set[str]) -> set[str]:
    """Lock blocked groups, so that an operator's release sees the entries that this transaction blocks. Returns the locked."""
    if not ordering_keys:
        return set()
    blocked = tables.blocked_group
    still = select(blocked.c.ordering_key).where(blocked.c.ordering_key.in_(ordering_keys))
    locked = set(connection.execute(still.with_for_update(skip_locked=True)).scalars())
    if locked:
        connection.execute(update(blocked).where(blocked.c.ordering_key.in_(locked)).values(since=blocked.c.since))
    return locked


# --- what an end does to its group


class NextIsLocked(Exception):
    """Another transaction has locked the entries that follow these claims, for example to cancel them. Roll this transaction
    back.

    Settle `leases` a moment later; the other settlements need not wait.
    """

    def __init__(self, leases: Collection[Lease]) -> None:
        super().__init__(f"{len(leases)} entries are followed by one that another transaction has locked")
        self.leases = frozenset(leases)


def advance_groups(
    connection: Connection, tables: Tables, settled: Sequence[Ending], *, cutoff: datetime = NEVER
) -> None:
    """Block the groups of failed and uncertain entries, and advance the others, in the transaction that settles the entries.

    Raises `NextIsLocked`.
    """
    left: dict[Place, set[Lease]] = {}  # one entry may leave twice, as uncertain and then as delivered
    delivered: list[ClaimedEntry] = []
    for entry, change in settled:
        if entry.ordering_key is None or entry.position is None:
            continue
        if isinstance(change, SendAgain):
            _pass_later_ones(connection, tables, entry)
        elif _blocks(change):
            _block(connection, tables, entry, change)
        elif isinstance(change, Settle) or queue_update(entry, change).state == "uncertain":
            if isinstance(change, Settle) and change.state == "delivered":
                delivered.append(entry)
            left.setdefault(Place(entry.ordering_key, entry.position), set()).add(entry.lease)
    locked = advance_unlocked(connection, tables, [*left], cutoff=cutoff)
    if locked:
        raise NextIsLocked(set().union(*(left[place] for place in locked)))
    if delivered:
        _lift_blocks(connection, tables, delivered)


def _pass_later_ones(connection: Connection, tables: Tables, entry: ClaimedEntry) -> None:
    """On a Galera cluster, change the row of the first later entry of the group.

    The entry is sent again when all leases have ended that are given before this transaction. A node that lags may give one
    later, without seeing the entry: then the commit of that claim is refused, because the row that it leases has changed.
    """
    if not dialect_of(connection).is_galera(connection):
        return
    queue = tables.queue
    in_group = (queue.c.ordering_key == entry.ordering_key, queue.c.position > entry.position)
    first = select(queue.c.id).where(*in_group, queue.c.state != "uncertain").order_by(queue.c.position).limit(1)
    id = connection.execute(first).scalar()
    moved = later(queue.c.due_at, MICROSECOND)  # an equal value would not be written
    connection.execute(update(queue).where(queue.c.id == id, queue.c.due_at < NEVER).values(due_at=moved))


def _blocks(change: Transition) -> bool:
    end = change.end if isinstance(change, RetryCallback) and isinstance(change.end, MarkUncertain) else change
    if isinstance(end, Settle):
        return end.state == "failed" and end.failure_blocks_group
    return isinstance(end, MarkUncertain) and end.failure_blocks_group


def _block(connection: Connection, tables: Tables, entry: ClaimedEntry, change: Transition) -> None:
    reason = change.reason or "it failed"
    row = {"ordering_key": entry.ordering_key, "entry_id": entry.id, "reason": reason, "since": clock()}
    dialect_of(connection).upsert(connection, tables.blocked_group, [row])
    log.warning("ordering group %r blocked by entry %s: %s", entry.ordering_key, entry.id, reason)


def _lift_blocks(connection: Connection, tables: Tables, delivered: Sequence[ClaimedEntry]) -> None:
    """Release the groups that these entries blocked while they were uncertain or had failed.

    One statement checks all entries: hardly any has blocked its group, and one statement for each took most of a drain's time.
    """
    keys = {entry.ordering_key for entry in delivered}
    connection.execute(_lifting(tables), {"keys": [*keys], "ids": [entry.id for entry in delivered]})


@lru_cache(MAX_STATEMENTS)
def _lifting(tables: Tables) -> Delete:
    """Kept: the parameters of a list that is part of a statement refer to themselves, and wait for the garbage collector."""
    blocked = tables.blocked_group
    in_groups = blocked.c.ordering_key.in_(bindparam("keys", expanding=True))
    return delete(blocked).where(in_groups, blocked.c.entry_id.in_(bindparam("ids", expanding=True)))
