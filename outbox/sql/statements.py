"""Statements, and parts of them, that each database has in its own form."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Dialect,
    Function,
    LargeBinary,
    Table,
    TextClause,
    Update,
    bindparam,
    quoted_name,
    text,
)
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.functions import FunctionElement

from outbox.sql.dialect import dialect_of
from outbox.sql.schema.rendering import renders
from outbox.sql.schema.tables import MAX_STATEMENTS


def read_by_index(connection: Connection) -> None:
    """Make the rest of the transaction read its tables by their indexes, in the index's order.

    For a page of rows in an index's order, the planner may choose to read and sort the whole table, because its statistics of a
    queue are seldom right.
    """
    dialect_of(connection).read_by_index(connection)


DELETE_BY_INDEX = "SET STATEMENT sql_safe_updates = 1 FOR "
"""Before a DELETE on MariaDB that names ids. Otherwise it may read all rows of a small table, and waits for each that another
transaction has locked or inserted.
"""


@lru_cache(MAX_STATEMENTS)
def deleting_by_index(dialect: Dialect, column: Column[Any]) -> TextClause:
    """The DELETE of the rows with these `ids` on MariaDB."""
    preparer = dialect.identifier_preparer
    named = f"{preparer.format_table(column.table)} WHERE {preparer.format_column(column)} IN :ids"
    ids = bindparam("ids", type_=column.type, expanding=True)
    return text(f"{DELETE_BY_INDEX}DELETE FROM {named}").bindparams(ids)


@lru_cache(MAX_STATEMENTS)  # every claim uses it, and building it costs about 0.1 ms
def stored_body(record: Table) -> ColumnElement[bytes]:
    """The body of a record: from its row, or on PostgreSQL from its day's partition; NULL if the partition was dropped.

    The SQL function is called only for a record with a partition.
    """
    return _StoredBody(record)


@renders(lambda dialect: dialect.stored_body)
class _StoredBody(FunctionElement[bytes]):
    type = LargeBinary()
    inherit_cache = True

    def __init__(self, record: Table) -> None:
        prefix = record.name.removesuffix("record")
        read: Function[bytes] = Function(
            quoted_name(f"{prefix}body_of", quote=None),
            record.c.id,
            record.c.body_day,
            packagenames=None if record.schema is None else (quoted_name(record.schema, quote=None),),
        )
        super().__init__(record.c.body, record.c.body_day, read)


def change_in_order(change: Update, values: Mapping[str, Any]) -> Update:
    """An UPDATE that sets the columns in the order of `values`. MariaDB sets one after another: an expression sees the new values
    of those before it. So an expression that reads other columns must be before these.
    """
    return change.ordered_values(*values.items())
