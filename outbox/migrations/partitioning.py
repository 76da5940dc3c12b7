"""Switch the layout at scale on and off: responses' bodies in a table partitioned by day. PostgreSQL only."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, text

from outbox.errors import SchemaError
from outbox.migrations.inspection import check
from outbox.migrations.targets import Target, connected
from outbox.sql.dialect import dialect_of
from outbox.sql.schema.body_partitions import DAYS_AHEAD, prefix_of, read_layout
from outbox.sql.schema.identifiers import literal, quoted
from outbox.sql.schema.tables import Tables, tables_of

ADDING_LOCK = int.from_bytes(b"body")
"""The advisory lock, of a transaction, under which partitions are made: concurrent dispatchers make each of them once."""


def partition(target: Target, *, schema: str | None = None, prefix: str = "outbox_") -> None:
    """Keep the bodies of answers from now on in a table partitioned by day. Does nothing where it is so already.

    No row is moved or rewritten: a body that is in its record stays there, is replayed from there, and goes with it. To be
    run by the tables' owner, once every process that replays is of a release that knows the layout.

    Raises: SchemaError on SQLite, where the tables are not those of this release, or when a lock is unavailable; nothing is
    changed then.
    """
    with _postgresql(target, schema, prefix) as (connection, tables):
        check(connection, schema=schema, prefix=prefix)
        for statement in _making(connection, tables):
            connection.exec_driver_sql(statement)


def unpartition(target: Target, *, schema: str | None = None, prefix: str = "outbox_") -> None:
    """Keep the bodies of answers from now on in their records again. Does nothing where it is so already.

    Those that are in partitions stay there, are replayed from there, and go with their day.

    Raises: SchemaError on SQLite, or when a lock is unavailable; nothing is changed then.
    """
    with _postgresql(target, schema, prefix) as (connection, tables):
        trigger, record = quoted(f"{prefix}move_body"), quoted(tables.record.name, schema)
        connection.exec_driver_sql(f"DROP TRIGGER IF EXISTS {trigger} ON {record}")


def check_partitions(target: Target, *, schema: str | None = None, prefix: str = "outbox_") -> None:
    """Raise SchemaError if the bodies' partition of today or tomorrow is missing. No request fails then, so no start should."""
    tables = tables_of(schema, prefix)
    with connected(target) as connection:
        layout = read_layout(connection, tables)
    if layout is not None and layout.alarm:
        raise SchemaError(layout.alarm)


@contextmanager
def _postgresql(target: Target, schema: str | None, prefix: str) -> Iterator[tuple[Connection, Tables]]:
    is_callers = isinstance(target, Connection)
    with connected(target) as connection:
        if not dialect_of(connection).has_catalog:
            raise SchemaError(
                "bodies in a table partitioned by day need PostgreSQL, and not its portable mode: elsewhere they stay in the"
                " records, which retention deletes row by row"
            )
        with dialect_of(connection).migrating(connection, is_callers=is_callers):
            yield connection, tables_of(schema, prefix)


def _making(connection: Connection, tables: Tables) -> Iterator[str]:
    """The statements, in turn. Each may be there already: that of another release is replaced."""
    schema, prefix = _home(connection, tables)
    body, record, move, add = (
        quoted(f"{prefix}{name}", schema) for name in ("body", "record", "move_body", "add_body_days")
    )
    trigger = quoted(f"{prefix}move_body")
    yield f"""
CREATE TABLE IF NOT EXISTS {body} (
    id uuid NOT NULL, day date NOT NULL, body bytea NOT NULL, CONSTRAINT {quoted(f"{prefix}body_pkey")} PRIMARY KEY (id, day)
) PARTITION BY RANGE (day)"""
    yield f"CREATE OR REPLACE FUNCTION {add}() RETURNS integer {_add_days(schema, prefix)}"
    yield f"REVOKE ALL ON FUNCTION {add}() FROM PUBLIC"
    yield from _grants(connection, record, f"SELECT ON TABLE {body}", like="SELECT")
    tombstone = quoted(tables.tombstone.name, schema)
    yield from _grants(connection, tombstone, f"EXECUTE ON FUNCTION {add}()", like="INSERT")
    yield f"SELECT {add}()"
    yield f"CREATE OR REPLACE FUNCTION {move}() RETURNS trigger {_move_body(schema, prefix)}"
    yield f"DROP TRIGGER IF EXISTS {trigger} ON {record}"
    yield f"CREATE TRIGGER {trigger} BEFORE INSERT OR UPDATE OF body ON {record} FOR EACH ROW EXECUTE FUNCTION {move}()"


# With the owner's rights, so that an app needs none to write bodies, and no dispatcher that of creating tables. Every name is
# written out and the search path fixed: a caller's leads nowhere else.
_AS_OWNER = "LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp"


def _move_body(schema: str, prefix: str) -> str:
    """Move the body into today's partition, if there is one: looked up beforehand, as a failed insert would end the request.

    An answer of the same day under a key that was freed meanwhile takes the place of the one before.
    """
    return f"""{_AS_OWNER} AS $move$
DECLARE
    today date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
BEGIN
    NEW.body_day := NULL;
    IF octet_length(NEW.body) > 0 AND EXISTS (
        SELECT FROM pg_inherits
        WHERE inhrelid = to_regclass({_partition_of("today", schema, prefix)})
            AND inhparent = {literal(quoted(f"{prefix}body", schema))}::regclass AND NOT inhdetachpending
    ) THEN
        INSERT INTO {quoted(f"{prefix}body", schema)} (id, day, body) VALUES (NEW.id, today, NEW.body)
        ON CONFLICT (id, day) DO UPDATE SET body = excluded.body;
        NEW.body := '';
        NEW.body_day := today;
    END IF;
    RETURN NEW;
END
$move$"""


def _add_days(schema: str, prefix: str) -> str:
    """Make the partitions of today and the days to come; returns how many were missing.

    Made apart and then attached: that waits for no reader or writer of bodies, as CREATE TABLE ... PARTITION OF would.
    Source: PostgreSQL, "CREATE TABLE", "PARTITION OF".
    """
    body = quoted(f"{prefix}body", schema)
    return f"""{_AS_OWNER} AS $add$
DECLARE
    today date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
    added integer := 0;
    on_day date;
    partition text;
BEGIN
    PERFORM pg_advisory_xact_lock({ADDING_LOCK});
    FOR n IN 0..{DAYS_AHEAD} LOOP
        on_day := today + n;
        partition := {_partition_of("on_day", schema, prefix)};
        IF to_regclass(partition) IS NULL THEN
            EXECUTE 'CREATE TABLE ' || partition || ' (LIKE ' || {literal(body)} || ' INCLUDING ALL)';
            EXECUTE 'ALTER TABLE ' || {literal(body)} || ' ATTACH PARTITION ' || partition
                || ' FOR VALUES FROM (' || quote_literal(on_day) || ') TO (' || quote_literal(on_day + 1) || ')';
            added := added + 1;
        END IF;
    END LOOP;
    RETURN added;
END
$add$"""


def _partition_of(day: str, schema: str, prefix: str) -> str:
    return f"quote_ident({literal(schema)}) || '.' || quote_ident({literal(f'{prefix}body_')} || to_char({day}, 'YYYYMMDD'))"


def _grants(connection: Connection, table: str, right: str, *, like: str) -> Iterator[str]:
    """Grant `right` to each role that has the right `like` on `table`, so that `outbox db roles` need not be run again."""
    grantees = connection.scalars(
        text(
            "SELECT DISTINCT CASE acl.grantee WHEN 0 THEN 'PUBLIC' ELSE CAST(CAST(acl.grantee AS regrole) AS text) END"
            " FROM pg_class, aclexplode(relacl) AS acl WHERE oid = to_regclass(:table) AND acl.privilege_type = :like"
        ),
        {"table": table, "like": like},
    )
    for grantee in grantees.all():
        yield f"GRANT {right} TO {grantee}"


def _home(connection: Connection, tables: Tables) -> tuple[str, str]:
    schema = connection.scalar(
        text(
            "SELECT nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace WHERE c.oid = to_regclass(:name)"
        ),
        {"name": quoted(tables.record.name, tables.record.schema)},
    )
    return str(schema), prefix_of(tables)
