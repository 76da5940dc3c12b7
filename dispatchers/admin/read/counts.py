"""How many rows a query has: counted up to a limit, and estimated above it by PostgreSQL's planner."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Executable, Select, func, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import ClauseElement
from sqlalchemy.sql.compiler import SQLCompiler

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
    """How many rows the planner expects, from its statistics; 0 on SQLite, whose planner does not report that."""
    if connection.dialect.name != "postgresql":
        return 0
    (plan,) = connection.execute(_Explain(rows)).scalar_one()
    return int(plan["Plan"]["Plan Rows"])


class _Explain(Executable, ClauseElement):
    inherit_cache = False

    def __init__(self, rows: Select[Any]) -> None:
        self.rows = rows


@compiles(_Explain)
def _explained(explain: _Explain, compiler: SQLCompiler, **kw: Any) -> str:
    return f"EXPLAIN (FORMAT JSON) {compiler.process(explain.rows, **kw)}"
