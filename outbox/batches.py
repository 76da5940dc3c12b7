"""Many rows in one PostgreSQL statement: a value that all rows share goes once, what differs goes as an array."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection


class Batch:
    """The rows of one statement. differing: the columns that are sent as arrays; `id` always is.

    types: PostgreSQL's type of each column, in the order of each row's values.
    """

    def __init__(self, connection: Connection, types: Mapping[str, str], rows: Sequence[tuple[Any, ...]]) -> None:
        columns = dict(zip(types, zip(*rows, strict=True), strict=True))
        shared = {
            name: column[0]
            for name, column in columns.items()
            if name != "id" and column.count(column[0]) == len(column)
        }
        self.differing = frozenset(columns.keys() - shared.keys())
        array = _array_type(connection)
        self.parameters = shared | {name: array(columns[name]) for name in self.differing}


def batch_query(types: Mapping[str, str], differing: Iterable[str]) -> str:
    """The query that yields a batch's rows, from its parameters."""
    names = [name for name in types if name in differing]
    arrays = ", ".join(f"CAST(:{name} AS {types[name]}[])" for name in names)
    values = [f"u.{name}" if name in names else f"CAST(:{name} AS {type}) AS {name}" for name, type in types.items()]
    return f"SELECT {', '.join(values)} FROM unnest({arrays}) AS u({', '.join(names)})"


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
