"""How many rows a query has: counted up to a limit, and estimated above it by PostgreSQL's planner."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, Subquery, case, func, select

from outbox.sql.dialect import dialect_of
from outbox.sql.schema.tables import Tables
from outbox.sql.statements import read_by_index

MAX_COUNTED = 10_000
"""Up to this number rows are counted: some 10 ms."""

MAX_DOUBTFUL = 10_000
"""How many entries that may have been sent are read to count the uncertain ones: some 10 ms, and 100 ms if far apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """value: so many rows. is_exact: whether they were counted; else it is an estimate, and at least what was counted."""

    value: int
    is_exact: bool


EXACT_ZERO = Count(value=0, is_exact=True)


def count_rows(connection: Connection, rows: Select[Any], *, max_counted: int = MAX_COUNTED) -> Count:
    """How many rows `rows` has. It must find each by an index: else the counting reads until it has enough of them."""
    some = rows.order_by(None).limit(max_counted + 1).subquery()
    counted = connection.execute(select(func.count()).select_from(some)).scalar_one()
    if counted <= max_counted:
        return Count(value=counted, is_exact=True)
    return Count(value=max(max_counted, planned_rows(connection, rows)), is_exact=False)


def planned_rows(connection: Connection, rows: Select[Any]) -> int:
    """How many rows the planner expects, from its statistics; 0 if it does not say."""
    return dialect_of(connection).planned_rows(connection, rows)


def count_uncertain(connection: Connection, tables: Tables) -> Count:
    """Count the uncertain entries in the index of entries that may have been sent, of which an outage leaves many more."""
    read_by_index(connection)
    queue = tables.queue
    uncertain, is_whole = connection.execute(select(doubtful_counted(tables))).one()
    if is_whole:
        return Count(value=uncertain, is_exact=True)
    planned = planned_rows(connection, select(queue.c.id).where(queue.c.maybe_sent, queue.c.state == "uncertain"))
    return Count(value=max(uncertain, planned), is_exact=False)


def doubtful_counted(tables: Tables) -> Subquery:
    """One row: how many of the first `MAX_DOUBTFUL` entries that may have been sent are uncertain, and whether these are all."""
    queue = tables.queue
    doubtful = select(queue.c.state, queue.c.known).where(queue.c.maybe_sent).limit(MAX_DOUBTFUL).subquery()
    is_uncertain = case(((doubtful.c.state == "uncertain") & doubtful.c.known.is_(None), 1))
    counted = select(func.count(is_uncertain).label("uncertain"), (func.count() < MAX_DOUBTFUL).label("is_whole"))
    return counted.select_from(doubtful).subquery("counted")
