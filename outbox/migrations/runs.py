"""Run the migrations, or print them."""

import io
import random
import time
from collections.abc import Callable

from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateSchema, DropSchema

from outbox.errors import SchemaError
from outbox.migrations.inspection import refuse_tables_of_others, revision_of, version_table
from outbox.migrations.scripts import configured, downgrading, head, open_scripts, run, upgrading
from outbox.migrations.targets import Target, connected, dialect_to_migrate
from outbox.sql.connections.places import place_of
from outbox.sql.dialect import dialect_of
from outbox.sql.errors.driver import sqlstate
from outbox.sql.migration_locks import met_another_run

PORTABLE_TRIES = 10
PAUSE_SECONDS = 0.02  # the longest first pause between two tries; each next one is twice as long at most

SCHEMA_COMMENT = "Created by sqlalchemy-outbox, which drops it with its last table."


def upgrade(target: Target, *, schema: str | None = None, prefix: str = "outbox_") -> None:
    """Bring the tables to this release's shape; does nothing where they have it already.

    A PostgreSQL schema that does not exist is created. On SQLite a schema is an attached database, and must be attached; on
    MariaDB it is another database, and must exist. MariaDB and CockroachDB commit each statement by itself: run it again if it
    was interrupted.

    Raises: SchemaError when a lock is unavailable (nothing is changed then), when the database belongs to a newer release,
    or when tables of these names exist that no migration made.
    """
    scripts = open_scripts()

    def work(connection: Connection) -> None:
        dialect_of(connection).require_prefix(connection, prefix)
        _create_missing_schema(connection, schema)
        revision = revision_of(connection, schema, prefix)
        if revision is None and not _was_interrupted(connection, schema, prefix):
            refuse_tables_of_others(connection, schema, prefix)
        elif revision is not None and revision > head():
            raise SchemaError(
                f"the outbox's tables in the database {place_of(connection.engine)} are at revision {revision}, made by a newer"
                f" release than this one, which knows {head()}: upgrade with the newer sqlalchemy-outbox"
            )
        context = configured(schema, prefix, connection=connection, fn=lambda at, _: upgrading(scripts, at))
        run(context, schema, prefix)

    _migrate(target, work)


def downgrade(target: Target, revision: str = "base", *, schema: str | None = None, prefix: str = "outbox_") -> None:
    """Go back to `revision`. Going back to "base" drops every table of the outbox WITH ALL THAT IS IN THEM.

    The version table goes too, and the PostgreSQL schema if `upgrade` created it and nothing else is in it by now.

    Raises: SchemaError when a lock is unavailable; nothing is changed then.
    """
    scripts = open_scripts()

    def work(connection: Connection) -> None:
        if not inspect(connection).has_table(f"{prefix}version", schema=schema):
            return
        context = configured(schema, prefix, connection=connection, fn=lambda at, _: downgrading(scripts, at, revision))
        run(context, schema, prefix)
        if revision_of(connection, schema, prefix) is None:
            version_table(schema, prefix).drop(connection)
            _drop_own_schema(connection, schema)

    _migrate(target, work)


def _migrate(target: Target, work: Callable[[Connection], None]) -> None:
    """Do the work in a transaction, alone among migrations. The portable mode has no lock for this: what meets another run there
    is repeated, and finds what that one has done.
    """
    is_callers = isinstance(target, Connection)
    for attempt in range(PORTABLE_TRIES):
        is_repeated = False
        try:
            with connected(target) as connection, dialect_of(connection).migrating(connection, is_callers=is_callers):
                is_repeated = dialect_of(connection).repeats_conflicts
                work(connection)
            return
        except DBAPIError as error:
            if not (is_repeated and met_another_run(error)) or attempt == PORTABLE_TRIES - 1:
                raise
            if is_callers:
                raise SchemaError(
                    "another run seems to have changed the outbox's tables at the same time"
                    f" ({sqlstate(error.orig)}): roll this transaction back, and run it again in a new one"
                ) from error
        time.sleep(random.uniform(0, PAUSE_SECONDS * 2**attempt))


def sql(
    dialect: str = "postgresql", *, since: str | None = None, schema: str | None = None, prefix: str = "outbox_"
) -> str:
    """The SQL that makes the tables, as one transaction where the database can undo it, for someone to read and run by hand.

    since: the revision that the database is at (see `current`); left out, the database is empty. At the newest one there is
        nothing to run, and the SQL is a comment.
    Raises: SchemaError for a revision that this release does not know.
    """
    of = dialect_to_migrate(dialect)
    scripts = open_scripts()
    known = sorted(script.revision for script in scripts.walk_revisions())
    if since is not None and since not in known:
        raise SchemaError(f"revision {since!r} does not exist: this release knows {', '.join(known)}")
    printed = io.StringIO()
    context = configured(
        schema,
        prefix,
        dialect_name=dialect,
        dialect_opts={"paramstyle": "named"},  # with the driver's own, every % would be printed twice
        as_sql=True,
        literal_binds=True,
        transactional_ddl=False,  # BEGIN and COMMIT are below, around the locks too
        output_buffer=printed,
        starting_rev=since,
        fn=lambda at, _: upgrading(scripts, at),
    )
    if since == head():
        return f"-- nothing to do: {since} is the newest revision that this release knows\n"
    run(context, schema, prefix)
    before, after = of.script_frame(context.dialect, schema)
    return "".join(f"{line};\n\n" for line in before) + printed.getvalue() + "".join(f"{line};\n" for line in after)


def _was_interrupted(connection: Connection, schema: str | None, prefix: str) -> bool:
    """Whether a run made its version table and did not come to its end, on a database where each statement commits by itself."""
    return dialect_of(connection).commits_ddl and inspect(connection).has_table(f"{prefix}version", schema=schema)


def _create_missing_schema(connection: Connection, schema: str | None) -> None:
    # not IF NOT EXISTS: that wants the right to create schemas even where there is nothing to create
    if schema is None or inspect(connection).has_schema(schema):
        return
    if (why := dialect_of(connection).why_no_schema(schema)) is not None:
        raise SchemaError(why)
    connection.execute(CreateSchema(schema))
    quoted = connection.dialect.identifier_preparer.quote_schema(schema)
    connection.exec_driver_sql(f"COMMENT ON SCHEMA {quoted} IS '{SCHEMA_COMMENT}'")


def _drop_own_schema(connection: Connection, schema: str | None) -> None:
    if schema is None or not dialect_of(connection).has_catalog:
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
