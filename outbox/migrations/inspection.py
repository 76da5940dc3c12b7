"""What a database has of the outbox: its revision, and what it lacks."""

from sqlalchemy import Column, Connection, MetaData, String, Table, func, inspect, select

from outbox.errors import SchemaError
from outbox.functions import database_functions
from outbox.migrations.scripts import head
from outbox.migrations.targets import Target, connected
from outbox.schema import define_tables


def check(target: Target, *, schema: str | None = None, prefix: str = "outbox_") -> None:
    """Raise unless the database has every table, column, sequence and function that this release uses.

    Tables that the app's own metadata made will do, without a version table. So will those of a newer release: the database
    is upgraded before the processes are.

    Raises: SchemaError, naming what is missing and the command that makes it.
    """
    with connected(target) as connection:
        # the revision first: an upgrade that commits between the two must not confuse
        revision = revision_of(connection, schema, prefix)
        missing = _missing(connection, schema, prefix)
    outdated = revision is not None and revision < head()
    if not missing and not outdated:
        return
    found = [f"is at revision {revision}, this release needs {head()}"] if outdated else []
    found += [f"lacks {', '.join(missing)}"] if missing else []
    if revision is None or outdated:
        cure = "run `outbox db upgrade`"
    elif revision == head():
        cure = (
            f"revision {revision} made it, so it was removed since, and `outbox db upgrade` would not bring it back;"
            " `outbox db sql` prints how it was made"
        )
    else:
        cure = f"revision {revision} is of a newer release that needs it no more: install that one"
    where = f"prefix {prefix!r}" if schema is None else f"schema {schema!r}, prefix {prefix!r}"
    raise SchemaError(f"the outbox's database ({where}) {' and '.join(found)}: {cure}")


def current(target: Target, *, schema: str | None = None, prefix: str = "outbox_") -> str | None:
    """The revision that the database is at; None where no migration ran."""
    with connected(target) as connection:
        return revision_of(connection, schema, prefix)


def revision_of(connection: Connection, schema: str | None, prefix: str) -> str | None:
    """The revision that is written down there; None without a version table."""
    if not inspect(connection).has_table(f"{prefix}version", schema=schema):
        return None
    return connection.scalar(select(version_table(schema, prefix).c.version_num))


def version_table(schema: str | None, prefix: str) -> Table:
    """Alembic's own, under the outbox's name."""
    return Table(f"{prefix}version", MetaData(), Column("version_num", String), schema=schema)


def _missing(connection: Connection, schema: str | None, prefix: str) -> list[str]:
    inspector = inspect(connection)
    if schema is not None and not inspector.has_schema(schema):
        return [f"schema {schema!r} itself"]
    tables = define_tables(MetaData(), schema=schema, prefix=prefix).metadata.tables.values()
    existing = inspector.get_multi_columns(schema=schema, filter_names=[table.name for table in tables])
    missing = []
    for table in tables:
        columns = existing.get((schema, table.name))
        if columns is None:
            missing.append(f"table {table.name}")
        else:
            names = {column["name"] for column in columns}
            missing += [f"column {table.name}.{column.name}" for column in table.columns if column.name not in names]
    sequence = f"{prefix}position"
    if connection.dialect.supports_sequences and not inspector.has_sequence(sequence, schema=schema):
        missing.append(f"sequence {sequence}")
    if connection.dialect.name == "postgresql":
        for name, function in database_functions(schema, prefix).items():
            if connection.scalar(select(func.to_regprocedure(function.signature))) is None:
                missing.append(f"function {prefix}{name}")
    return missing


def refuse_tables_of_others(connection: Connection, schema: str | None, prefix: str) -> None:
    """Raise SchemaError where tables of these names exist: called where no version table says that we made them."""
    tables = define_tables(MetaData(), schema=schema, prefix=prefix).metadata.tables.values()
    names = {table.name for table in tables}.intersection(inspect(connection).get_table_names(schema=schema))
    if names:
        raise SchemaError(
            f"{', '.join(sorted(names))} exist already and no migration of the outbox made them ({prefix}version is missing)."
            " If the app's own metadata or migrations make the outbox's tables, let those go on; else drop them first"
        )
