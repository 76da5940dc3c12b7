"""Counts each destination's unsettled entries by state. However long the queue is, it reads a limited number of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import CTE, Connection, Select, func, select

from dispatchers.store.records.queries import found_destinations, rows_of_each
from outbox.sql.schema.tables import Tables
from outbox.sql.statements import read_by_index

MAX_ROWS = 100_000  # rows of all destinations together: about 100 ms
MAX_ROWS_OF_ONE = 10_000
ROWS_OF_ONE_MIN = 10


@dataclass(frozen=True, slots=True)
class Gauge:
    """states: how many entries are in each state. is_whole: all entries are counted; otherwise only those due last.

    Uncertain entries without a due time count as due last.
    """

    states: dict[str, int]
    is_whole: bool


def read_gauges(connection: Connection, tables: Tables, max_rows: int = MAX_ROWS) -> dict[str, Gauge]:
    """The gauge of each destination with unsettled entries. Reads at most `max_rows` rows of the queue, by an index."""
    read_by_index(connection)
    found = found_destinations(connection, tables)
    if not found:
        return {}
    most = max(min(max_rows // len(found), MAX_ROWS_OF_ONE), ROWS_OF_ONE_MIN)
    counts: dict[str, dict[str, int]] = {}
    for name, state, count in _counted(connection, tables, found, most):
        counts.setdefault(name, {})[state] = count
    return {name: Gauge(states, sum(states.values()) < most) for name, states in counts.items()}


def count_blocked_groups(connection: Connection, tables: Tables) -> int:
    """The number of ordering groups that an operator must release, counted up to `MAX_ROWS_OF_ONE`."""
    some = select(tables.blocked_group.c.ordering_key).limit(MAX_ROWS_OF_ONE).subquery()
    return connection.execute(select(func.count()).select_from(some)).scalar_one()


def _counted(connection: Connection, tables: Tables, found: Sequence[str], most: int) -> list[tuple[Any, ...]]:
    """Destination, state, and how many of its entries are in it."""
    queue = tables.queue

    def counting(name: Any, names: CTE) -> Select[*tuple[Any, ...]]:
        last = select(queue.c.state).where(queue.c.destination == name).order_by(queue.c.due_at.desc()).limit(most)
        each = last.correlate(names).subquery("last")
        return select(each.c.state, func.count()).group_by(each.c.state)

    return rows_of_each(connection, tables, found, counting)
