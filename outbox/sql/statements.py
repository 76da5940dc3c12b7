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
    ScalarSelect,
    Select,
    Table,
    TextClause,
    Update,
    bindparam,
    quoted_name,
    select,
    text,
)
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.functions import FunctionElement

from outbox.sql.dialect import dialect_of, dialect_rendered
from outbox.sql.schema.rendering import renders
from outbox.sql.schema.tables import MAX_STATEMENTS


def read_by_index(connection: Connection) -> None:
    """Make the rest of the transaction read its tables by their indexes, in the index's order.

    For a page of rows in an index's order, the planner may choose to read and sort the whole table, because its statistics of a
    queue are seldom right.
    """
    dialect_of(connection).read_by_index(connection)


def deletion(dialect: Dialect, column: Column[Any]) -> str:
    """The beginning of a DELETE that names values of the column, as MariaDB and MySQL need it. Otherwise it may read all rows of
    a small table, and waits for each that another transaction has locked or inserted.
    """
    preparer, table = dialect.identifier_preparer, column.table
    indexes = [index.name for index in table.indexes if next(iter(index.columns)) is column]
    index = "PRIMARY" if column.primary_key else str(indexes[0])
    return dialect_rendered(dialect).deletion.format(
        preparer.format_table(table), preparer.quote(table.name), preparer.quote(index)
    )


@lru_cache(MAX_STATEMENTS)
def deleting_by_index(dialect: Dialect, column: Column[Any]) -> TextClause:
    """The DELETE of the rows with these `ids` on MariaDB and MySQL."""
    condition = f"WHERE {dialect.identifier_preparer.format_column(column)} IN :ids"
    ids = bindparam("ids", type_=column.type, expanding=True)
    return text(f"{deletion(dialect, column)} {condition}").bindparams(ids)


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


def own_row(row: Select[Any]) -> ScalarSelect[Any]:
    """The value of a query with a limit, for an UPDATE of the table that it reads. MySQL refuses that table in a subquery (error
    1093), but not in the FROM of one, and with a limit it does not merge the two.
    """
    found = row.subquery()
    return select(*found.c).scalar_subquery()


def change_in_order(change: Update, values: Mapping[str, Any]) -> Update:
    """An UPDATE that sets the columns in the order of `values`. MariaDB sets one after another: an expression sees the new values
    of those before it. So an expression that reads other columns must be before these.
    """
    return change.ordered_values(*values.items())
