"""Inspects the outbox's tables in a database: their revision, and what is missing."""

from collections.abc import Collection

from sqlalchemy import Column, Connection, MetaData, String, Table, func, inspect, select, text
from sqlalchemy.exc import DBAPIError

from outbox.errors import SchemaError
from outbox.migrations.scripts import head
from outbox.migrations.targets import Target, connected
from outbox.sql.connections.places import place_of
from outbox.sql.dialect import dialect_of
from outbox.sql.errors.driver import INSUFFICIENT_PRIVILEGE, sqlstate
from outbox.sql.schema.functions import database_functions
from outbox.sql.schema.tables import key_lock, tables_of


def check(target: Target, *, schema: str | None = None, prefix: str = "outbox_") -> None:
    """Raise unless the database has every table, column, sequence and function that this release uses.

    Tables that the app's own metadata made will do, without a version table. So will those of a newer release: the database
    is upgraded before the processes are.

    Raises: SchemaError, naming what is missing and what makes it: our migrations, or the app's own, if those made the tables.
    """
    with connected(target) as connection:
        dialect_of(connection).require_prefix(connection, prefix)
        # the revision first: an upgrade that commits between the two must not confuse
        revision = revision_of(connection, schema, prefix)
        missing = _missing(connection, schema, prefix)
        place = place_of(connection.engine)
        hidden = _hidden(connection, schema, missing)
        theirs = revision is None and bool(_existing_tables(connection, schema, prefix))
    outdated = revision is not None and revision < head()
    if not missing and not outdated:
        return
    where = f"prefix {prefix!r}" if schema is None else f"schema {schema!r}, prefix {prefix!r}"
    if hidden:
        raise SchemaError(
            f"in the outbox's database {place} ({where}) this user may not read {', '.join(hidden)}: if they exist, give the user"
            " the rights of `outbox db roles --dialect mariadb`; if not, create them as another user, with `outbox db upgrade` or"
            " with the app's own Alembic"
        )
    found = [f"is at revision {revision}, but this release needs {head()}"] if outdated else []
    found += [f"lacks {', '.join(missing)}"] if missing else []
    cure = _cure_of_theirs(prefix) if theirs else _cure(revision)
    raise SchemaError(f"the outbox's database {place} ({where}) {' and '.join(found)}: {cure}")


def _cure(revision: str | None) -> str:
    """What brings tables up to date that our migrations have made, or that nothing has made yet."""
    if revision is None:
        return (
            "run `outbox db upgrade`; or the app's own Alembic, `alembic upgrade head`, if it makes the outbox's tables"
        )
    if revision < head():
        return "run `outbox db upgrade`"
    if revision == head():
        return (
            f"revision {revision} created it, so it was removed later, and `outbox db upgrade` does not create it again;"
            " `outbox db sql` prints the statement that creates it"
        )
    return f"revision {revision} belongs to a newer release that does not need it: install that release"


def _cure_of_theirs(prefix: str) -> str:
    """What brings tables up to date that the app itself has made: our migrations would refuse them."""
    return (
        f"the app created these tables (the table {prefix}version is missing), so the app must upgrade them. With its own"
        " Alembic, run `alembic revision --autogenerate` and `alembic upgrade head`; do not run `outbox db upgrade`"
    )


def current(target: Target, *, schema: str | None = None, prefix: str = "outbox_") -> str | None:
    """The revision that the database is at; None where no migration ran."""
    with connected(target) as connection:
        return revision_of(connection, schema, prefix)


def revision_of(connection: Connection, schema: str | None, prefix: str) -> str | None:
    """The revision that is stored there; None without a version table."""
    if not dialect_of(connection).has_table(connection, f"{prefix}version", schema):
        return None
    return connection.scalar(select(version_table(schema, prefix).c.version_num))


def version_table(schema: str | None, prefix: str) -> Table:
    """Alembic's own, under the outbox's name."""
    return Table(f"{prefix}version", MetaData(), Column("version_num", String), schema=schema)


def _missing(connection: Connection, schema: str | None, prefix: str) -> list[str]:
    inspector = inspect(connection)
    if schema is not None and not inspector.has_schema(schema):
        return [f"schema {schema!r} itself"]
    defined = tables_of(schema, prefix)
    tables = [*defined.metadata.tables.values()]
    if dialect_of(connection).has_key_locks:
        tables.append(key_lock(defined))
    existing = dialect_of(connection).columns_of(connection, schema, [table.name for table in tables])
    missing = []
    for table in tables:
        names = existing.get(table.name)
        if names is None:
            missing.append(f"table {table.name}")
        else:
            missing += [f"column {table.name}.{column.name}" for column in table.columns if column.name not in names]
    if dialect_of(connection).has_functions:
        if not inspector.has_sequence(f"{prefix}position", schema=schema):
            missing.append(f"sequence {prefix}position")
        for name, function in database_functions(schema, prefix).items():
            if connection.scalar(select(func.to_regprocedure(function.signature))) is None:
                missing.append(f"function {prefix}{name}")
    return missing


def _hidden(connection: Connection, schema: str | None, missing: Collection[str]) -> list[str]:
    """Which of the missing tables MariaDB may only hide: it gives a user without rights the same error for each name, unless the
    user has a right on the whole database.
    """
    if not dialect_of(connection).hides_tables:
        return []
    return [name for name in missing if name.startswith("table ") and _is_refused(connection, schema, name[6:])]


def _is_refused(connection: Connection, schema: str | None, name: str) -> bool:
    try:
        connection.execute(select(text("1")).select_from(Table(name, MetaData(), schema=schema)).limit(0))
    except DBAPIError as error:
        return sqlstate(error.orig) == INSUFFICIENT_PRIVILEGE
    except SchemaError:
        pass  # it does not exist
    return False


def refuse_tables_of_others(connection: Connection, schema: str | None, prefix: str) -> None:
    """Raise SchemaError where tables of these names exist: called where no version table says that we made them."""
    names = _existing_tables(connection, schema, prefix)
    if names:
        raise SchemaError(
            f"{', '.join(sorted(names))} already exist in the database {place_of(connection.engine)}, and no migration"
            f" of the outbox made them ({prefix}version is missing); nothing was changed. If the app's own Alembic"
            " makes the outbox's tables, it brings them up to date too: `alembic revision --autogenerate` and `alembic upgrade"
            " head`. If these are not the outbox's tables, give the outbox another prefix or schema"
        )


def _existing_tables(connection: Connection, schema: str | None, prefix: str) -> set[str]:
    inspector = inspect(connection)
    if schema is not None and not inspector.has_schema(schema):
        return set()
    tables = tables_of(schema, prefix).metadata.tables.values()
    return {table.name for table in tables}.intersection(inspector.get_table_names(schema=schema))
