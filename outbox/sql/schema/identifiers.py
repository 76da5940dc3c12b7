"""Checks and quotes the names of the outbox's tables. Pure."""

from functools import cache

from sqlalchemy import Dialect, MetaData, Table, make_url

from outbox.errors import InvalidValue

MAX_NAME_BYTES = 63  # PostgreSQL, "Lexical Structure": it cuts a longer name off, and two of ours could become one
MAX_PREFIX_BYTES = 32
"""The longest prefix: it leaves room for names such as `settlement_settled`, and for those of later releases."""

FORBIDDEN = "%:$\\."
"""Characters that are special in SQL text even in a quoted name: for a parameter, the end of a function's body, the end of a
schema's name."""


def check_table_names(schema: str | None, prefix: str) -> None:
    """Raise `InvalidValue` for a schema or prefix with which tables cannot be created, or would be ambiguous."""
    _check("prefix", prefix, 0, MAX_PREFIX_BYTES, "give a shorter one, or put the tables into a separate schema")
    if schema is not None:
        _check(
            "schema", schema, 1, MAX_NAME_BYTES, "name one that PostgreSQL can have, or None for the connection's own"
        )


def _check(field: str, value: object, bytes_min: int, max_bytes: int, way_out: str) -> None:
    if not isinstance(value, str) or not value.isprintable() or not bytes_min <= len(value.encode()) <= max_bytes:
        raise InvalidValue(field, value, f"must be printable text of {bytes_min} to {max_bytes} bytes: {way_out}")
    if any(character in FORBIDDEN for character in value):
        raise InvalidValue(field, value, f"must not contain any of {' '.join(FORBIDDEN)}")


@cache
def postgresql() -> Dialect:
    """The dialect for SQL as text, without a database. An app on another database never loads it."""
    return make_url("postgresql://").get_dialect()()


def literal(value: str) -> str:
    """A text as a PostgreSQL literal."""
    return "'" + value.replace("'", "''") + "'"


def quoted(name: str, schema: str | None = None) -> str:
    """A name for PostgreSQL, quoted if necessary."""
    return quoted_table(Table(name, MetaData(), schema=schema))


def quoted_table(table: Table) -> str:
    """The quoted name of an existing table."""
    return postgresql().identifier_preparer.format_table(table)
