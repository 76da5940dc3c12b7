"""Finds the entries under one parent by the primary key, because their ids begin with the first bytes of their parent's id.

An index on the parent's id would cost each enqueue another random page (docs/keys.md, "The ids").
"""

from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Table, and_
from sqlalchemy.sql.functions import FunctionElement

from outbox.keys import PARENT_BYTES, ids_under
from outbox.sql.column_types import ID
from outbox.sql.rendering import renders

_KEPT = 2 * PARENT_BYTES  # hexadecimal digits
_REST = 32 - _KEPT


def is_under(entry: Table, parent: UUID | ColumnElement[Any]) -> ColumnElement[bool]:
    """Whether an entry belongs to this parent. parent: its id, or the column that holds it."""
    least, greatest = ids_under(parent) if isinstance(parent, UUID) else (_Least(parent), _Greatest(parent))
    return and_(entry.c.id.between(least, greatest), entry.c.parent_id == parent)


def is_under_sql(entry: str, parent: str) -> str:
    """The condition as PostgreSQL text. entry: the alias of the entry table. parent: an expression of type uuid."""
    return f"{entry}.id BETWEEN {_filled(parent, '0')} AND {_filled(parent, 'f')} AND {entry}.parent_id = {parent}"


def _filled(parent: str, digit: str) -> str:
    return f"CAST(left(CAST({parent} AS text), {_KEPT}) || '{digit * _REST}' AS uuid)"


@renders(
    postgresql=_filled("{0}", "0"),
    sqlite=f"substr({{0}}, 1, {_KEPT}) || '{'0' * _REST}'",
    mariadb=f"CONCAT(SUBSTR({{0}}, 1, {PARENT_BYTES}), X'{'0' * _REST}')",
)
class _Least(FunctionElement[UUID]):
    type = ID
    inherit_cache = True


@renders(
    postgresql=_filled("{0}", "f"),
    sqlite=f"substr({{0}}, 1, {_KEPT}) || '{'f' * _REST}'",
    mariadb=f"CONCAT(SUBSTR({{0}}, 1, {PARENT_BYTES}), X'{'F' * _REST}')",
)
class _Greatest(FunctionElement[UUID]):
    type = ID
    inherit_cache = True
