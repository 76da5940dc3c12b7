"""Many rows in one PostgreSQL statement: a value that all rows share is sent once, and other columns as arrays."""

import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import Connection

from outbox.sql.postgresql.fast_execute import forget_cursor, speaks_binary


class Shape(NamedTuple):
    """The properties of a batch that its statement depends on: the columns that differ between rows, and those with a value.

    In a batch of one row no column differs.
    """

    differing: frozenset[str]
    given: tuple[str, ...]


def typed_columns(declared: str) -> dict[str, str]:
    """Each column's type, of columns declared as in SQL: `id uuid, env text`."""
    return dict(column.split() for column in declared.split(","))


class Batch:
    """The rows of one statement. types: PostgreSQL's type of each column, in the order of each row's values."""

    def __init__(self, connection: Connection, types: Mapping[str, str], rows: Sequence[tuple[Any, ...]]) -> None:
        differing: frozenset[str] = frozenset()
        if len(rows) == 1:
            shared = zip(types, rows[0], strict=True)
            self.parameters = {name: value for name, value in shared if value is not None}
        else:
            columns = dict(zip(types, zip(*rows, strict=True), strict=True))
            differing = frozenset(name for name, column in columns.items() if not _is_one_value(column))
            self.parameters = {
                name: _array(connection, types[name], column) if name in differing else column[0]
                for name, column in columns.items()
                if name in differing or column[0] is not None
            }
        self.shape = Shape(differing, tuple(self.parameters))


def _is_one_value(column: Sequence[Any]) -> bool:
    return column[0] == column[-1] and column.count(column[0]) == len(
        column
    )  # first the ends, where most columns differ


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
    return f"CAST({f':{name}' if name in shape.given else 'NULL'} AS {type}) AS {name}"


# --- arrays


def _array(connection: Connection, type: str, values: Sequence[Any]) -> Any:
    if not speaks_binary(connection):
        return list(values)
    _teach(connection)
    if type not in _PACKINGS:
        return _BinaryList(values)
    packing = _PACKINGS[type]
    items = [None if value is None else packing.encode(value) for value in values]
    return packing.array(_pack(packing.element_oid, items))


def _pack(element_oid: int, items: Sequence[bytes | None]) -> bytes:
    """One array in PostgreSQL's binary format. Source: array_recv() in src/backend/utils/adt/arrayfuncs.c."""
    data = [_NULL if item is None else len(item).to_bytes(4, "big") + item for item in items]
    return _HEAD.pack(1, None in items, element_oid, len(items), 1) + b"".join(data)


# number of dimensions, whether there are NULLs, the elements' type; size and first index of the dimension
_HEAD = struct.Struct("!iiIii")
_NULL = (-1).to_bytes(4, "big", signed=True)


class _UuidArray(bytes): ...


class _TextArray(bytes): ...


class _ByteaArray(bytes): ...


class _Packing(NamedTuple):
    """How to pack an array of one type. psycopg's own packing is Python code too, but takes three times as long.

    array: the class for psycopg. The oids of built-in types never change: src/include/catalog/pg_type.dat.
    """

    array: type[bytes]
    array_oid: int
    element_oid: int
    encode: Callable[[Any], bytes]


_PACKINGS: Mapping[str, _Packing] = {
    "uuid": _Packing(_UuidArray, 2951, 2950, operator.attrgetter("bytes")),
    "text": _Packing(_TextArray, 1009, 25, str.encode),
    "bytea": _Packing(_ByteaArray, 1001, 17, bytes),
}


class _BinaryList(list[Any]):
    """A list that psycopg sends in binary format: in text format, each element costs several regular expressions."""


def _teach(connection: Connection) -> None:
    """Register these types with psycopg, once for each connection; `connection.info` stores that."""
    if _BinaryList in connection.info:
        return
    driver_connection: Any = connection.connection.driver_connection
    for kind, dumper in _dumpers().items():
        driver_connection.adapters.register_dumper(kind, dumper)
    connection.info[_BinaryList] = True
    forget_cursor(connection)


@cache
def _dumpers() -> Mapping[type[Any], type[Any]]:
    """The dumper of each of these types. Defined once: a connection's own classes would outlive it until a full collection."""
    from psycopg.adapt import Dumper  # psycopg may not be installed
    from psycopg.pq import Format
    from psycopg.types.array import ListBinaryDumper

    class PackedDumper(Dumper):
        format = Format.BINARY

        def dump(self, obj: bytes) -> bytes:
            return obj

    packed: dict[type[Any], type[Any]] = {
        packing.array: type(f"{packing.array.__name__}Dumper", (PackedDumper,), {"oid": packing.array_oid})
        for packing in _PACKINGS.values()
    }
    return {_BinaryList: ListBinaryDumper, **packed}
