"""Finds the entries under one parent by the primary key, because their ids begin with the first bytes of their parent's id.

An index on the parent's id would cost each enqueue another random page (docs/keys.md, "The ids").
"""

from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Table, and_
from sqlalchemy.sql.functions import FunctionElement

from outbox.keys import PARENT_BYTES, ids_under
from outbox.sql.dialect import dialect_named
from outbox.sql.schema.column_types import ID
from outbox.sql.schema.rendering import renders


def is_under(entry: Table, parent: UUID | ColumnElement[Any]) -> ColumnElement[bool]:
    """Whether an entry belongs to this parent. parent: its id, or the column that holds it."""
    least, greatest = ids_under(parent) if isinstance(parent, UUID) else (_Least(parent), _Greatest(parent))
    return and_(entry.c.id.between(least, greatest), entry.c.parent_id == parent)


def is_under_sql(entry: str, parent: str) -> str:
    """The condition as PostgreSQL text. entry: the alias of the entry table. parent: an expression of type uuid."""
    least, greatest = (dialect_named("postgresql").filled_id(PARENT_BYTES, digit).format(parent) for digit in "0f")
    return f"{entry}.id BETWEEN {least} AND {greatest} AND {entry}.parent_id = {parent}"


@renders(lambda dialect: dialect.filled_id(PARENT_BYTES, "0"))
class _Least(FunctionElement[UUID]):
    type = ID
    inherit_cache = True


@renders(lambda dialect: dialect.filled_id(PARENT_BYTES, "f"))
class _Greatest(FunctionElement[UUID]):
    type = ID
    inherit_cache = True
