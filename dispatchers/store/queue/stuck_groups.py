"""Finds ordering groups whose first entry is blocked although nothing blocks it, and makes that entry due.

Each transaction that takes an entry out of its group makes the next one due, so there are no such groups. This is for what should
be impossible: a defect, another program, a row that was changed by hand. Otherwise the group would wait permanently.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Select, Text, bindparam, exists, select

from dispatchers.store.records.queries import ordering_keys
from outbox.sql.ordering import Place, advance, is_blocked
from outbox.sql.schema.tables import MAX_STATEMENTS, Tables
from outbox.sql.statements import read_by_index

log = logging.getLogger("outbox.dispatcher")

MAX_GROUPS = 20
"""Groups of one sweep. A group costs two probes of an index; with more groups, the next sweeps read the others."""


class StuckGroups:
    """Goes through all groups with waiting entries, some in each sweep."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._after: str | None = None  # the last group of the last sweep

    def sweep(self, connection: Connection) -> None:
        """Look at the next groups, and make the stuck ones due."""
        read_by_index(connection)
        asked = _next_groups(self._tables, MAX_GROUPS, is_first=self._after is None)
        groups = [row for row in connection.execute(asked, {"after": self._after}) if row[0] is not None]
        for key in free_stuck(connection, self._tables, [head for _, head in groups if head is not None]):
            log.error(
                "ordering group %r was stuck: its first entry was blocked, but nothing blocked it. The entry is due now. This"
                " should never happen: please report it",
                key,
            )
        self._after = groups[-1][0] if len(groups) == MAX_GROUPS else None


@lru_cache(MAX_STATEMENTS)
def _next_groups(tables: Tables, most: int, *, is_first: bool) -> Select[str, UUID]:
    """The keys of the next groups with the first entry of each; the last row may be NULL. is_first: not after a key."""
    keys = ordering_keys(tables, None if is_first else bindparam("after", type_=Text), most)
    head = head_of(tables, keys.c.key).correlate(keys).scalar_subquery()
    return select(keys.c.key, head).order_by(keys.c.number)


def head_of(tables: Tables, ordering_key: Any) -> Select[UUID]:
    """The first entry of a group that is not uncertain."""
    queue = tables.queue.alias()
    first = select(queue.c.id).where(queue.c.ordering_key == ordering_key, queue.c.state != "uncertain")
    return first.order_by(queue.c.position).limit(1)


def free_stuck(connection: Connection, tables: Tables, ids: Sequence[UUID]) -> list[str]:
    """Make those of these entries due that are blocked by nothing: each is the first one of its group, and no entry that failed
    blocks the group. Returns the keys of their groups.

    An entry that becomes due although it must wait is not sent: it costs a claim.
    """
    if not ids:
        return []
    found = [row for row in connection.execute(_checks(tables), {"ids": ids}) if row.is_stuck]
    advance(connection, tables, [Place(row.ordering_key, row.position - 1) for row in found])
    return sorted(row.ordering_key for row in found)


@lru_cache(MAX_STATEMENTS)
def _checks(tables: Tables) -> Select[*tuple[Any, ...]]:
    """The places of the entries `ids`, and whether each is stuck."""
    queue, blocked = tables.queue, tables.blocked_group
    has_block = exists().where(blocked.c.ordering_key == queue.c.ordering_key)
    is_first = queue.c.id == head_of(tables, queue.c.ordering_key).correlate(queue).scalar_subquery()
    # The conditions are columns: in WHERE, with stale statistics, the planner uses another index than that of the ids.
    stuck = (is_blocked(queue) & is_first & ~has_block).label("is_stuck")
    of_these = queue.c.id.in_(bindparam("ids", expanding=True))
    return select(queue.c.ordering_key, queue.c.position, stuck).where(of_these)
