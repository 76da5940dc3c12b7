"""How the entries under one parent are found: by the primary key, as their ids begin with their parent's first bytes.

An index on the parent's id would cost each enqueue one more random page (docs/keys.md, "The ids").
"""

from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Table, Uuid, and_
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from outbox.keys import PARENT_BYTES, ids_under

_KEPT = 2 * PARENT_BYTES  # hexadecimal digits


def is_under(entry: Table, parent: UUID | ColumnElement[Any]) -> ColumnElement[bool]:
    """Whether an entry belongs to this parent. parent: its id, or the column that holds it."""
    least, greatest = ids_under(parent) if isinstance(parent, UUID) else (_least(parent), _greatest(parent))
    return and_(entry.c.id.between(least, greatest), entry.c.parent_id == parent)


def is_under_sql(entry: str, parent: str) -> str:
    """The condition as PostgreSQL text. entry: the alias of the entry table. parent: an expression of type uuid."""
    return f"{entry}.id BETWEEN {_filled(parent, '0')} AND {_filled(parent, 'f')} AND {entry}.parent_id = {parent}"


class _least(FunctionElement[UUID]):  # noqa: N801
    type = Uuid()
    inherit_cache = True


class _greatest(FunctionElement[UUID]):  # noqa: N801
    type = Uuid()
    inherit_cache = True


def _filled(parent: str, digit: str) -> str:
    rest = digit * (32 - _KEPT)
    return f"CAST(left(CAST({parent} AS text), {_KEPT}) || '{rest}' AS uuid)"


@compiles(_least)
def _least_sql(element: _least, compiler: SQLCompiler, **kw: Any) -> str:
    return _filled(compiler.process(element.clauses, **kw), "0")


@compiles(_greatest)
def _greatest_sql(element: _greatest, compiler: SQLCompiler, **kw: Any) -> str:
    return _filled(compiler.process(element.clauses, **kw), "f")


@compiles(_least, "sqlite")
def _least_sqlite(element: _least, compiler: SQLCompiler, **kw: Any) -> str:
    return f"substr({compiler.process(element.clauses, **kw)}, 1, {_KEPT}) || '{'0' * (32 - _KEPT)}'"


@compiles(_greatest, "sqlite")
def _greatest_sqlite(element: _greatest, compiler: SQLCompiler, **kw: Any) -> str:
    return f"substr({compiler.process(element.clauses, **kw)}, 1, {_KEPT}) || '{'f' * (32 - _KEPT)}'"
