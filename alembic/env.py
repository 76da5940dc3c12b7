"""Alembic's own commands over these migrations, for developers who write the next one: `alembic revision --autogenerate`.

Apps and `outbox db` do not come through here: `outbox.migrations` hands `op`, the schema and the prefix to the scripts
itself, so that Alembic's module-wide `op` and `context` stay those of the app's own migration, if one is running.

The database is `config.attributes["connection"]`, or `-x database=URL`; the names are the attributes `schema` and `prefix`.
"""

from alembic import context
from alembic.operations import Operations
from sqlalchemy import Connection, MetaData, create_engine

from outbox.sql.schema.tables import define_tables

schema: str | None = context.config.attributes.get("schema")
prefix: str = context.config.attributes.get("prefix", "outbox_")


def is_ours(name: str | None, kind: str, parents: object) -> bool:
    match kind:
        case "schema":
            return name == schema
        case "table":
            return name is not None and name.startswith(prefix)
        case _:
            return True


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=define_tables(MetaData(), schema=schema, prefix=prefix).metadata,
        version_table=f"{prefix}version",
        version_table_schema=schema,
        include_schemas=schema is not None,
        include_name=is_ours,
        compare_type=True,
        compare_server_default=True,
    )
    with context.begin_transaction():
        context.run_migrations(op=Operations(context.get_context()), schema=schema, prefix=prefix)


if context.is_offline_mode():
    raise SystemExit("the SQL is printed by `outbox db sql`")
if "connection" in context.config.attributes:
    run(context.config.attributes["connection"])
else:
    with create_engine(context.get_x_argument(as_dictionary=True)["database"]).begin() as connection:
        run(connection)
