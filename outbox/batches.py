"""Many rows in one PostgreSQL statement: a value that all rows share goes once, what differs goes as an array."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import Connection, CursorResult, Dialect, TextClause


class Shape(NamedTuple):
    """Which columns of a batch differ between its rows, and which are NULL in all: what a statement depends on.

    A batch of one row differs in nothing.
    """

    differing: frozenset[str]
    null: frozenset[str]


class Batch:
    """The rows of one statement. types: PostgreSQL's type of each column, in the order of each row's values."""

    def __init__(self, connection: Connection, types: Mapping[str, str], rows: Sequence[tuple[Any, ...]]) -> None:
        if len(rows) == 1:
            self.parameters = {name: value for name, value in zip(types, rows[0], strict=True) if value is not None}
            self.shape = Shape(frozenset(), frozenset(types.keys() - self.parameters.keys()))
            return
        columns = dict(zip(types, zip(*rows, strict=True), strict=True))
        shared = {name: column[0] for name, column in columns.items() if column.count(column[0]) == len(column)}
        null = frozenset(name for name, value in shared.items() if value is None)
        differing = frozenset(columns.keys() - shared.keys())
        array = _array_type(connection)
        self.parameters = {
            name: array(columns[name]) if name in differing else shared[name] for name in types if name not in null
        }
        self.shape = Shape(differing, null)


def batch_query(types: Mapping[str, str], shape: Shape) -> str:
    """The query that yields a batch's rows, from its parameters."""
    names = [name for name in types if name in shape.differing]
    values = [_value(name, type, shape) for name, type in types.items()]
    if not names:
        return f"SELECT {', '.join(values)}"
    arrays = ", ".join(f"CAST(:{name} AS {types[name]}[])" for name in names)
    return f"SELECT {', '.join(values)} FROM unnest({arrays}) AS u({', '.join(names)})"


def _value(name: str, type: str, shape: Shape) -> str:
    if name in shape.differing:
        return f"u.{name}"
    return f"CAST({'NULL' if name in shape.null else f':{name}'} AS {type}) AS {name}"


def execute(connection: Connection, statement: TextClause, parameters: Mapping[str, Any]) -> CursorResult[Any]:
    """Like `connection.execute`, without SQLAlchemy's work on each parameter where the driver takes them by name."""
    if connection.dialect.positional:
        return connection.execute(statement, parameters)
    return connection.exec_driver_sql(_sql(statement, connection.dialect), dict(parameters))


@cache
def _sql(statement: TextClause, dialect: Dialect) -> str:
    return str(statement.compile(dialect=dialect))


class _BinaryArray(list[Any]):
    """A list that psycopg sends in binary: as text, each element costs it several regular expressions."""


def _array_type(connection: Connection) -> type[list[Any]]:
    """The driver's type for arrays; psycopg is taught ours once for each connection, which `connection.info` goes with."""
    if connection.dialect.driver not in ("psycopg", "psycopg_async"):
        return list
    if _BinaryArray not in connection.info:
        from psycopg.types.array import ListBinaryDumper  # only where psycopg is in use

        driver_connection: Any = connection.connection.driver_connection
        driver_connection.adapters.register_dumper(_BinaryArray, ListBinaryDumper)
        connection.info[_BinaryArray] = True
    return _BinaryArray
