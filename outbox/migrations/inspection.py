"""What a database has of the outbox: its revision, and what it lacks."""

from collections.abc import Collection

from sqlalchemy import Column, Connection, MetaData, String, Table, bindparam, func, inspect, select, text
from sqlalchemy.exc import DBAPIError

from outbox.errors import ConfigurationError, SchemaError
from outbox.migrations.scripts import head
from outbox.migrations.targets import Target, connected
from outbox.sql.driver_errors import INSUFFICIENT_PRIVILEGE, sqlstate
from outbox.sql.functions import database_functions
from outbox.sql.places import place_of
from outbox.sql.schema import key_lock, tables_of


def check(target: Target, *, schema: str | None = None, prefix: str = "outbox_") -> None:
    """Raise unless the database has every table, column, sequence and function that this release uses.

    Tables that the app's own metadata made will do, without a version table. So will those of a newer release: the database
    is upgraded before the processes are.

    Raises: SchemaError, naming what is missing and what makes it: our migrations, or the app's own, if those made the tables.
    """
    with connected(target) as connection:
        require_prefix(connection, prefix)
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
    if not _has_table(connection, f"{prefix}version", schema):
        return None
    return connection.scalar(select(version_table(schema, prefix).c.version_num))


def _has_table(connection: Connection, name: str, schema: str | None) -> bool:
    if connection.dialect.name == "mariadb":  # a role gets an error when it asks for a table that does not exist
        return name in inspect(connection).get_table_names(schema=schema)
    return inspect(connection).has_table(name, schema=schema)


def version_table(schema: str | None, prefix: str) -> Table:
    """Alembic's own, under the outbox's name."""
    return Table(f"{prefix}version", MetaData(), Column("version_num", String), schema=schema)


def require_prefix(connection: Connection, prefix: str) -> None:
    """Raise ConfigurationError if the server would store the tables under other names, by which they would not be found."""
    if connection.dialect.name != "mariadb" or prefix == prefix.lower():
        return
    if connection.scalar(text("SELECT @@lower_case_table_names")) == 1:
        raise ConfigurationError(
            f"the prefix {prefix!r} has capital letters, and this server stores the names of tables in lower case"
            f" (lower_case_table_names is 1): use the prefix {prefix.lower()!r}"
        )


def _missing(connection: Connection, schema: str | None, prefix: str) -> list[str]:
    inspector = inspect(connection)
    if schema is not None and not inspector.has_schema(schema):
        return [f"schema {schema!r} itself"]
    defined = tables_of(schema, prefix)
    tables = [*defined.metadata.tables.values()]
    if connection.dialect.name in ("mariadb", "portable"):
        tables.append(key_lock(defined))
    existing = _columns_of(connection, schema, [table.name for table in tables])
    missing = []
    for table in tables:
        names = existing.get(table.name)
        if names is None:
            missing.append(f"table {table.name}")
        else:
            missing += [f"column {table.name}.{column.name}" for column in table.columns if column.name not in names]
    if connection.dialect.name == "postgresql":
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
    if connection.dialect.name != "mariadb":
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


def _columns_of(connection: Connection, schema: str | None, names: Collection[str]) -> dict[str, set[str]]:
    """The names of the columns of each of these tables that exists."""
    if connection.dialect.name != "portable":
        reflected = inspect(connection).get_multi_columns(schema=schema, filter_names=[*names])
        return {name: {column["name"] for column in columns} for (_, name), columns in reflected.items()}
    # SQLAlchemy also asks for types, defaults and sequences, in catalogs where CockroachDB differs.
    schemas = "ANY (current_schemas(false))" if schema is None else ":schema"
    asked = text(
        "SELECT table_name, column_name FROM information_schema.columns"
        f" WHERE table_schema = {schemas} AND table_name IN :names"
    ).bindparams(bindparam("names", expanding=True))
    found: dict[str, set[str]] = {}
    for table_name, column_name in connection.execute(asked, {"schema": schema, "names": [*names]}):
        found.setdefault(table_name, set()).add(column_name)
    return found


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
