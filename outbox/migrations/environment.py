"""For the `env.py` of the app's own Alembic: the outbox's tables among the app's, or left out of its comparison."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from sqlalchemy import BigInteger, DateTime, LargeBinary, MetaData, Text, Uuid
from sqlalchemy.types import TypeEngine

from outbox.migrations.scripts import without_alembic
from outbox.migrations.targets import dialect_to_migrate
from outbox.sql.schema.body_partitions import body_tables
from outbox.sql.schema.column_types import Instant
from outbox.sql.schema.tables import define_tables, key_lock, tables_of

NameFilter: TypeAlias = Callable[[str | None, Any, Any], bool]


def metadata(dialect: str | None = None, *, schema: str | None = None, prefix: str = "outbox_") -> MetaData:
    """The outbox's tables for the app's `target_metadata`, so that its own Alembic makes and follows them.

        target_metadata = [Base.metadata, outbox.migrations.metadata()]

    `alembic revision --autogenerate` then writes out tables, CHECKs and indexes, and what Alembic knows nothing of: the
    PostgreSQL schema, the sequence, storage parameters and the function that cancels. The script runs as it is written and
    imports nothing of the outbox. With a schema, `context.configure` needs `include_schemas=True`.

    dialect: `mariadb` for its types, the collation of its tables and the table of locks; `portable` for the table of locks; left
        out for PostgreSQL and SQLite.

    Raises: SchemaError without Alembic, or for a dialect that has no migrations.
    """
    try:
        import outbox.migrations.portable  # noqa: F401  # Alembic is an extra, which other functions do without
        from outbox.migrations.comparison import NAMES
    except ModuleNotFoundError as error:
        raise without_alembic() from error
    of = dialect_to_migrate(dialect or "postgresql")
    made = MetaData(info={NAMES: (schema, prefix)})
    tables = define_tables(made, schema=schema, prefix=prefix)
    if of.has_key_locks:
        key_lock(tables).to_metadata(made)
    for table in made.tables.values():
        for column in table.columns:
            # what a script can name without importing us
            column.type = of.scripted_type(column.type) or _plain_type(column.type)
        table.kwargs.update(of.table_options)
    return made


def _plain_type(type: TypeEngine[Any]) -> TypeEngine[Any]:
    if isinstance(type, Instant):
        return DateTime(timezone=True).with_variant(BigInteger(), "sqlite")
    if isinstance(type, Uuid):
        return Uuid()
    if isinstance(type, LargeBinary):
        return LargeBinary(type.length)
    return Text() if isinstance(type, Text) else type


def include_name(also: NameFilter | None = None, *, schema: str | None = None, prefix: str = "outbox_") -> NameFilter:
    """An `include_name` for `context.configure`: the app's own Alembic leaves the outbox's tables alone.

        context.configure(..., include_name=outbox.migrations.include_name())

    For an app whose migrations call `upgrade(op.get_bind())`; without it, autogenerate would drop what the app's metadata
    does not know. `also` is the app's own filter, or that of another outbox: a name is included if both say so.
    """
    with suppress(ModuleNotFoundError):
        import outbox.migrations.portable  # noqa: F401  # Alembic in the app's `env.py` finds the dialect by it
    ours = {table.name for table in tables_of(schema, prefix).metadata.tables.values()}
    ours |= {f"{prefix}version", f"{prefix}key_lock"}
    bodies = body_tables(prefix)

    def is_included(name: str | None, kind: str, parents: Mapping[str, str | None]) -> bool:
        is_ours = name is not None and (name in ours or bodies.fullmatch(name) is not None)
        if kind == "table" and is_ours and parents["schema_name"] == schema:
            return False
        return also is None or also(name, kind, parents)

    return is_included
