"""Statements, and parts of them, that each database has in its own form."""

from collections.abc import Collection, Mapping, Sequence
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
    insert,
    quoted_name,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.functions import FunctionElement

from outbox.sql.rendering import renders
from outbox.sql.schema import MAX_STATEMENTS


def read_by_index(connection: Connection) -> None:
    """Make the rest of the transaction read its tables by their indexes, in the index's order.

    For a page of rows in an index's order, the planner may choose to read and sort the whole table, because its statistics of a
    queue are seldom right.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(_BY_INDEX)


_BY_INDEX = text("SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true)")


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


@renders(postgresql="CASE WHEN {1} IS NULL THEN {0} ELSE {2} END", sqlite="{0}", mariadb="{0}", portable="{0}")
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


def insert_unless_present(dialect: str, table: Table) -> Any:
    """An INSERT that does nothing if the primary key exists. An error would end the transaction.

    MariaDB's IGNORE also lets pass what is too long or breaks a CHECK: insert only what was checked. ON DUPLICATE KEY UPDATE
    would count an existing row as written, because SQLAlchemy asks the drivers for the number of rows found.
    """
    if dialect == "mariadb":
        return insert(table).prefix_with("IGNORE")
    name: Any = sqlite if dialect == "sqlite" else postgresql
    return name.insert(table).on_conflict_do_nothing(index_elements=list(table.primary_key))


def upsert(
    connection: Connection,
    table: Table,
    rows: Sequence[Mapping[str, Any]],
    *,
    added: Collection[str] = (),
    kept: Collection[str] = (),
) -> None:
    """Insert rows, or change those that exist.

    rows: all with the same columns, the primary key among them. An existing row gets the new values, except in columns that
    are `kept`, and in columns that are `added`, which get the sum of the old and the new value.
    """
    key = table.primary_key.columns.keys()
    if connection.dialect.name == "mariadb":
        connection.execute(_upsert_on_mariadb(table, rows, (*key, *kept), added))
        return
    name: Any = sqlite if connection.dialect.name == "sqlite" else postgresql
    inserting = name.insert(table).values(rows)
    changed = {column: inserting.excluded[column] for column in rows[0] if column not in (*key, *kept)}
    changed |= {column: table.c[column] + inserting.excluded[column] for column in added}
    connection.execute(inserting.on_conflict_do_update(index_elements=list(table.primary_key), set_=changed))


def _upsert_on_mariadb(
    table: Table, rows: Sequence[Mapping[str, Any]], kept: Collection[str], added: Collection[str]
) -> Any:
    from sqlalchemy.dialects import mysql  # it takes 40 ms, so other databases do not load it

    inserting = mysql.insert(table).values(rows)
    changed: dict[str, Any] = {column: inserting.inserted[column] for column in rows[0] if column not in kept}
    changed |= {column: table.c[column] + inserting.inserted[column] for column in added}
    return inserting.on_duplicate_key_update(changed)


def change_in_order(change: Update, values: Mapping[str, Any]) -> Update:
    """An UPDATE that sets the columns in the order of `values`. MariaDB sets one after another: an expression sees the new values
    of those before it. So an expression that reads other columns must be before these.
    """
    return change.ordered_values(*values.items())
