"""How many entries each destination has that have not ended, by state: counted within bounds, however long the queue is."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Select, func, select, true

from dispatchers.store.queries import destination_names
from outbox.sql.dialect import read_by_index
from outbox.sql.schema import Tables

ROWS_MAX = 100_000  # read in all: some 100 ms
ROWS_OF_ONE_MAX = 10_000
ROWS_OF_ONE_MIN = 10


@dataclass(frozen=True, slots=True)
class Gauge:
    """states: how many entries are in each state. is_whole: these are all; otherwise they are those due last.

    The uncertain entries without a due time come first of all.
    """

    states: dict[str, int]
    is_whole: bool


def read_gauges(connection: Connection, tables: Tables) -> dict[str, Gauge]:
    """Of each destination with unsettled entries. Reads `ROWS_MAX` rows of the queue at most, by an index."""
    read_by_index(connection)
    names = destination_names(tables)
    found = list(connection.execute(select(names.c.name).where(names.c.name.is_not(None))).scalars())
    if not found:
        return {}
    most = max(min(ROWS_MAX // len(found), ROWS_OF_ONE_MAX), ROWS_OF_ONE_MIN)
    counts: dict[str, dict[str, int]] = {}
    for name, state, count in _counted(connection, tables, found, most):
        counts.setdefault(name, {})[state] = count
    return {name: Gauge(states, sum(states.values()) < most) for name, states in counts.items()}


def count_blocked_groups(tables: Tables, connection: Connection) -> int:
    """Ordering groups that an operator must release; of very many, `ROWS_OF_ONE_MAX`."""
    some = select(tables.blocked_group.c.ordering_key).limit(ROWS_OF_ONE_MAX).subquery()
    return connection.execute(select(func.count()).select_from(some)).scalar_one()


def _counted(connection: Connection, tables: Tables, found: Sequence[str], most: int) -> list[tuple[str, str, int]]:
    queue = tables.queue

    def last_of(name: object) -> Select[str]:
        return select(queue.c.state).where(queue.c.destination == name).order_by(queue.c.due_at.desc()).limit(most)

    if connection.dialect.name != "postgresql":  # without LATERAL
        counted: list[tuple[str, str, int]] = []
        for name in found:
            last = last_of(name).subquery()
            rows = connection.execute(select(last.c.state, func.count()).group_by(last.c.state))
            counted += [(name, state, count) for state, count in rows]
        return counted
    names = destination_names(tables)
    each = last_of(names.c.name).correlate(names).lateral("each")
    grouped = select(names.c.name, each.c.state, func.count()).select_from(names.join(each, true()))
    rows = connection.execute(grouped.group_by(names.c.name, each.c.state))
    return [(name, state, count) for name, state, count in rows]
