"""How many rows a query has: counted up to a limit, and estimated above it by PostgreSQL's planner."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, func, select

from outbox.sql.dialect import dialect_of

MAX_COUNTED = 10_000
"""Up to this number rows are counted: some 10 ms."""


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
