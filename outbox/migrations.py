"""Bring a database to the shape that this release needs: upgrade, check, print the SQL.

    outbox.migrations.upgrade("postgresql+psycopg://app@db/shop")     # `outbox db upgrade`
    outbox.migrations.check(engine)                                   # `outbox db check`, and at a process's start

Every run is one transaction: whole or not at all. Runs at the same time wait for one another, and the later ones find
nothing to do. `schema` and `prefix` are the `Outbox`'s; each pair is a set of tables of its own with its own version table.

A `target` is a URL, a sync Engine, or an AsyncEngine, whose URL is opened anew with a sync driver: its connect_args do not
follow. Or it is a Connection, and then the transaction is the caller's, to commit or to roll back: inside the app's own
Alembic migration (`upgrade(op.get_bind())`), or from asyncio (`await connection.run_sync(upgrade)`).

`upgrade`, `downgrade` and `sql` need the extra `sqlalchemy-outbox[migrations]`; the others need SQLAlchemy alone.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    MetaData,
    String,
    Table,
    create_engine,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.engine import URL, Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateSchema, DropSchema

from outbox.databases import LOCK_NOT_AVAILABLE, SUPPORTED, sqlstate
from outbox.errors import ConfigurationError, NoTransaction, SchemaError
from outbox.schema import define_tables

if TYPE_CHECKING:  # imported at run time, each would ask for a package that only an extra brings: alembic and greenlet
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from sqlalchemy.ext.asyncio import AsyncEngine

Target: TypeAlias = "str | URL | Engine | AsyncEngine | Connection"

MIGRATION_LOCK = int.from_bytes(b"outbox")
"""The advisory lock of PostgreSQL under which a database is migrated; of a transaction, so PgBouncer may stand between."""

MIGRATION_WAIT_SECONDS = 60
"""How long a run waits for another one: longer than any migration that holds a table's lock may take."""

TABLE_LOCK_WAIT_SECONDS = 5
"""How long a migration waits for a table. Everyone who comes after it queues behind it, so it gives up early."""

SCHEMA_COMMENT = "Created by sqlalchemy-outbox, which drops it with its last table."

SYNC_DRIVERS = {"sqlite+aiosqlite": "sqlite", "postgresql+psycopg_async": "postgresql+psycopg"}


def upgrade(target: Target, *, schema: str | None = None, prefix: str = "outbox_") -> None:
    """Bring the tables to this release's shape; does nothing where they have it already.

    A PostgreSQL schema that does not exist is created. On SQLite a schema is an attached database, and must be attached.

    Raises: SchemaError when a lock is not to be had (nothing is changed then), when the database belongs to a newer release,
    or when tables of these names exist that no migration made.
    """
    scripts = _scripts()
    is_callers = isinstance(target, Connection)
    with _connected(target) as connection, _exclusively(connection, is_callers=is_callers):
        _create_missing_schema(connection, schema)
        revision = _revision(connection, schema, prefix)
        if revision is None:
            _refuse_tables_of_others(connection, schema, prefix)
        elif revision > head():
            raise SchemaError(
                f"the outbox's tables are at revision {revision}, made by a newer release than this one, which knows"
                f" {head()}: upgrade with the newer sqlalchemy-outbox"
            )
        context = _context(schema, prefix, connection=connection, fn=lambda at, _: scripts._upgrade_revs("head", at))
        _run(context, schema, prefix)


def downgrade(target: Target, revision: str = "base", *, schema: str | None = None, prefix: str = "outbox_") -> None:
    """Go back to `revision`. Going back to "base" drops every table of the outbox WITH ALL THAT IS IN THEM.

    The version table goes too, and the PostgreSQL schema if `upgrade` created it and nothing else is in it by now.

    Raises: SchemaError when a lock is not to be had; nothing is changed then.
    """
    scripts = _scripts()
    is_callers = isinstance(target, Connection)
    with _connected(target) as connection, _exclusively(connection, is_callers=is_callers):
        if not inspect(connection).has_table(f"{prefix}version", schema=schema):
            return
        context = _context(
            schema, prefix, connection=connection, fn=lambda at, _: scripts._downgrade_revs(revision, at)
        )
        _run(context, schema, prefix)
        if _revision(connection, schema, prefix) is None:
            _version_table(schema, prefix).drop(connection)
            _drop_own_schema(connection, schema)


def check(target: Target, *, schema: str | None = None, prefix: str = "outbox_") -> None:
    """Raise unless the database has every table, column and sequence that this release uses.

    Tables that the app's own metadata made will do, without a version table. So will those of a newer release: the database
    is upgraded before the processes are.

    Raises: SchemaError, naming what is missing and the command that makes it.
    """
    with _connected(target) as connection:
        revision = _revision(
            connection, schema, prefix
        )  # first: an upgrade that commits between the two must not confuse
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
    with _connected(target) as connection:
        return _revision(connection, schema, prefix)


def head() -> str:
    """The revision that this release needs: the last of the migrations, which are numbered."""
    return max(path.name.partition("_")[0] for path in (_home() / "versions").glob("[0-9]*.py"))


def sql(dialect: str = "postgresql", *, schema: str | None = None, prefix: str = "outbox_") -> str:
    """The SQL that makes the tables in an empty database, as one transaction, for someone to read and run by hand."""
    _refuse_unknown_dialect(dialect)
    scripts = _scripts()
    printed = io.StringIO()
    context = _context(
        schema,
        prefix,
        dialect_name=dialect,
        dialect_opts={"paramstyle": "named"},  # with the driver's own, every % would be printed twice
        as_sql=True,
        literal_binds=True,
        transactional_ddl=False,  # BEGIN and COMMIT stand below, around the locks too
        output_buffer=printed,
        fn=lambda at, _: scripts._upgrade_revs("head", at),
    )
    _run(context, schema, prefix)
    opening = {"postgresql": _opening_on_postgresql(context.dialect, schema), "sqlite": ["BEGIN IMMEDIATE"]}[dialect]
    return "".join(f"{line};\n\n" for line in opening) + printed.getvalue() + "COMMIT;\n"


def _opening_on_postgresql(dialect: Dialect, schema: str | None) -> list[str]:
    lines = [
        "BEGIN",
        f"SET LOCAL lock_timeout = '{MIGRATION_WAIT_SECONDS}s'",
        f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})",
        f"SET LOCAL lock_timeout = '{TABLE_LOCK_WAIT_SECONDS}s'",
    ]
    return lines if schema is None else [*lines, str(CreateSchema(schema, if_not_exists=True).compile(dialect=dialect))]


# Alembic, held so that its module-wide proxies are never touched


def _context(
    schema: str | None,
    prefix: str,
    *,
    connection: Connection | None = None,
    dialect_name: str | None = None,
    dialect_opts: dict[str, str] | None = None,
    **options: Any,
) -> "MigrationContext":
    from alembic.runtime.migration import MigrationContext

    options |= {"version_table": f"{prefix}version", "version_table_schema": schema}
    return MigrationContext.configure(connection, dialect_name=dialect_name, dialect_opts=dialect_opts, opts=options)


def _run(context: "MigrationContext", schema: str | None, prefix: str) -> None:
    from alembic.operations import Operations

    context.run_migrations(op=Operations(context), schema=schema, prefix=prefix)


def _scripts() -> "ScriptDirectory":
    try:
        from alembic.script import ScriptDirectory
    except ModuleNotFoundError as error:
        raise SchemaError("migrations need Alembic: pip install 'sqlalchemy-outbox[migrations]'") from error
    return ScriptDirectory(str(_home()))


def _home() -> Path:
    """Where the migrations lie: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    for home in (package / "_migrations", package.parent / "alembic"):
        if (home / "versions").is_dir():  # in site-packages `../alembic` is Alembic itself, which has none
            return home
    raise SchemaError(f"the migrations are not beside {package}: install sqlalchemy-outbox anew")


# The target


@contextmanager
def _connected(target: Target) -> Iterator[Connection]:
    if isinstance(target, Connection):
        _refuse_unknown_dialect(target.dialect.name)
        yield target
        return
    engine = _engine(target)
    _refuse_unknown_dialect(engine.dialect.name)
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            # whatever the engine's own: in autocommit nothing would be whole, and an older snapshot than the lock's would miss
            # what another run has just made
            connection.execution_options(isolation_level="READ COMMITTED")
        with connection.begin():
            yield connection


def _engine(target: Any) -> Engine:
    if isinstance(target, str | URL):
        return _open(make_url(target))
    engine = getattr(target, "sync_engine", target)
    if not isinstance(engine, Engine) or hasattr(target, "sync_connection"):
        raise ConfigurationError(
            f"{type(target).__name__} is no target: give a URL, an engine or a sync Connection"
            " (with an AsyncConnection: `await connection.run_sync(upgrade)`)"
        )
    return _open(engine.url) if engine.dialect.is_async else engine


def _open(url: URL) -> Engine:
    if url.get_dialect().is_async:
        if url.drivername not in SYNC_DRIVERS:
            raise ConfigurationError(
                f"migrations are synchronous, {url.drivername} is not: give a URL with a synchronous driver"
                " (postgresql+psycopg://...), or a connection: `await connection.run_sync(upgrade)`"
            )
        url = url.set(drivername=SYNC_DRIVERS[url.drivername])
    in_memory = url.database in (None, "", ":memory:") or url.query.get("mode") == "memory"
    if url.get_backend_name() == "sqlite" and in_memory:
        raise ConfigurationError(
            f"{url!r} would be another, empty database in memory: give the Engine or Connection itself"
        )
    return create_engine(url, poolclass=NullPool)


def _refuse_unknown_dialect(name: str) -> None:
    if name not in SUPPORTED:
        raise SchemaError(f"there are no migrations for {name!r}, only for {' and '.join(SUPPORTED)}")


# Locks


@contextmanager
def _exclusively(connection: Connection, *, is_callers: bool) -> Iterator[None]:
    """In a transaction, alone among migrations, and never long in anyone's way."""
    if connection.dialect.name == "sqlite":
        with _lock_named("another connection is writing to this SQLite database"):
            _begin_immediate(connection, is_callers=is_callers)
            yield
        return
    dbapi_connection = connection.connection.dbapi_connection
    if dbapi_connection is not None and connection.dialect.detect_autocommit_setting(dbapi_connection):
        raise NoTransaction(
            "the connection is in autocommit mode: a migration that fails would leave half of its tables"
        )
    waits_before = connection.scalar(text("SELECT current_setting('lock_timeout')"))
    _set_lock_timeout(connection, f"{MIGRATION_WAIT_SECONDS}s")
    with _lock_named(f"another migration has held this database for {MIGRATION_WAIT_SECONDS} s"):
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
    _set_lock_timeout(connection, f"{TABLE_LOCK_WAIT_SECONDS}s")
    with _lock_named(
        f"another session, perhaps a long transaction, has held one of the tables for {TABLE_LOCK_WAIT_SECONDS} s"
    ):
        yield
    _set_lock_timeout(connection, waits_before)  # a caller's transaction goes on as it was


def _set_lock_timeout(connection: Connection, value: str) -> None:
    connection.execute(text("SELECT set_config('lock_timeout', :value, true)"), {"value": value})


def _begin_immediate(connection: Connection, *, is_callers: bool) -> None:
    """Open a transaction that may write: by itself, Python's sqlite3 opens none for DDL, or one that is refused later."""
    connection.exec_driver_sql("SELECT 1")
    opened = connection.connection.driver_connection
    if opened is not None and opened.in_transaction:
        if is_callers:
            return
        connection.exec_driver_sql("ROLLBACK")
    connection.exec_driver_sql("BEGIN IMMEDIATE")


@contextmanager
def _lock_named(holder: str) -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        if not _is_lock_denied(error.orig):
            raise
        raise SchemaError(f"no lock: {holder}. Nothing was changed; try again when it has ended") from error


def _is_lock_denied(error: BaseException | None) -> bool:
    # 5, 6: SQLITE_BUSY, SQLITE_LOCKED, below extended codes' high bits
    # (sqlite.org/rescode.html)
    return sqlstate(error) == LOCK_NOT_AVAILABLE or getattr(error, "sqlite_errorcode", 0) & 0xFF in (5, 6)


# What is there


def _revision(connection: Connection, schema: str | None, prefix: str) -> str | None:
    if not inspect(connection).has_table(f"{prefix}version", schema=schema):
        return None
    return connection.scalar(select(_version_table(schema, prefix).c.version_num))


def _version_table(schema: str | None, prefix: str) -> Table:
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
    return missing


def _refuse_tables_of_others(connection: Connection, schema: str | None, prefix: str) -> None:
    tables = define_tables(MetaData(), schema=schema, prefix=prefix).metadata.tables.values()
    names = {table.name for table in tables}.intersection(inspect(connection).get_table_names(schema=schema))
    if names:
        raise SchemaError(
            f"{', '.join(sorted(names))} exist already and no migration of the outbox made them ({prefix}version is missing)."
            " If the app's own metadata or migrations make the outbox's tables, let those go on; else drop them first"
        )


# A PostgreSQL schema


def _create_missing_schema(connection: Connection, schema: str | None) -> None:
    # not IF NOT EXISTS: that wants the right to create schemas even where there is nothing to create
    if schema is None or inspect(connection).has_schema(schema):
        return
    if connection.dialect.name == "sqlite":
        raise SchemaError(f"no database is attached as {schema!r}; on SQLite, leave the schema out or ATTACH one first")
    connection.execute(CreateSchema(schema))
    quoted = connection.dialect.identifier_preparer.quote_schema(schema)
    connection.exec_driver_sql(f"COMMENT ON SCHEMA {quoted} IS '{SCHEMA_COMMENT}'")


def _drop_own_schema(connection: Connection, schema: str | None) -> None:
    if schema is None or connection.dialect.name != "postgresql":
        return
    comment = connection.scalar(
        text("SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = :schema"),
        {"schema": schema},
    )
    if comment != SCHEMA_COMMENT:
        return
    try:
        with connection.begin_nested():
            connection.execute(DropSchema(schema))
    except DBAPIError as error:
        # 2BP01: dependent_objects_still_exist. Something else lives in it by now, so it stays
        if sqlstate(error.orig) != "2BP01":
            raise
