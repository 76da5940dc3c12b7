"""For the `env.py` of the app's own Alembic: the outbox's tables among the app's, or left out of its comparison."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sqlalchemy import BigInteger, DateTime, LargeBinary, MetaData, Text, Uuid

from outbox.migrations.scripts import without_alembic
from outbox.sql.body_partitions import body_tables
from outbox.sql.schema import define_tables
from outbox.times import Instant

NameFilter: TypeAlias = Callable[[str | None, Any, Any], bool]


def metadata(*, schema: str | None = None, prefix: str = "outbox_") -> MetaData:
    """The outbox's tables for the app's `target_metadata`, so that its own Alembic makes and follows them.

        target_metadata = [Base.metadata, outbox.migrations.metadata()]

    `alembic revision --autogenerate` then writes out tables, CHECKs and indexes, and what Alembic knows nothing of: the
    PostgreSQL schema, the sequence, storage parameters and the function that cancels. The script runs as it is written and
    imports nothing of the outbox. With a schema, `context.configure` needs `include_schemas=True`.

    Raises: SchemaError without Alembic.
    """
    try:
        from outbox.migrations.comparison import NAMES  # Alembic is an extra, which the other functions do without
    except ModuleNotFoundError as error:
        raise without_alembic() from error
    made = MetaData(info={NAMES: (schema, prefix)})
    define_tables(made, schema=schema, prefix=prefix)
    for table in made.tables.values():
        for column in table.columns:
            # what a script can name without importing us; on MariaDB our own migrations make the tables
            if isinstance(column.type, Instant):
                column.type = DateTime(timezone=True).with_variant(BigInteger(), "sqlite")
            elif isinstance(column.type, Uuid):
                column.type = Uuid()
            elif isinstance(column.type, LargeBinary):
                column.type = LargeBinary(column.type.length)
            elif isinstance(column.type, Text):
                column.type = Text()
    return made


def include_name(also: NameFilter | None = None, *, schema: str | None = None, prefix: str = "outbox_") -> NameFilter:
    """An `include_name` for `context.configure`: the app's own Alembic leaves the outbox's tables alone.

        context.configure(..., include_name=outbox.migrations.include_name())

    For an app whose migrations call `upgrade(op.get_bind())`; without it, autogenerate would drop what the app's metadata
    does not know. `also` is the app's own filter, or that of another outbox: a name is included if both say so.
    """
    ours = {table.name for table in define_tables(MetaData(), schema=schema, prefix=prefix).metadata.tables.values()}
    ours.add(f"{prefix}version")
    bodies = body_tables(prefix)

    def is_included(name: str | None, kind: str, parents: Mapping[str, str | None]) -> bool:
        is_ours = name is not None and (name in ours or bodies.fullmatch(name) is not None)
        if kind == "table" and is_ours and parents["schema_name"] == schema:
            return False
        return also is None or also(name, kind, parents)

    return is_included
