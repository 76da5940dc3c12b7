"""The tables of entries, of their sending, and of requests.

An entry is written once, in the app's transaction, and never updated. The values that change during sending are in the narrow
table `queue`, with one row for each unsettled entry. Its outcome is one row in `settlement`, which is never updated.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import lru_cache

from sqlalchemy import (
    DDL,
    Column,
    ColumnElement,
    Connection,
    FromClause,
    MetaData,
    Sequence,
    Table,
    and_,
    event,
    literal_column,
    text,
)

from outbox.sql.dialect import dialect_if_supported, dialect_of
from outbox.sql.errors.schema import translate_for
from outbox.sql.errors.statement import hide_values_of
from outbox.sql.schema import columns
from outbox.sql.schema.column_types import ID
from outbox.sql.schema.functions import DatabaseFunction, creation, database_functions
from outbox.sql.schema.identifiers import check_table_names

SCHEMA_VERSION = 1
"""The version of an entry's format, stored in every entry. A dispatcher does not send entries of a newer version.

It is increased if an older dispatcher would read an entry wrongly: after a change of the meaning of a payload, an option or a
header, or of the derivation of keys. It is not increased for a new table, index or column that older releases may ignore; the
migrations' revisions count these.
"""

ENCRYPTED_VERSION = 2
"""The version of an entry with an encrypted payload. It is otherwise as in version 1, so an older release or a process without
data keys leaves it to others.
"""

MAX_STATEMENTS = 256
"""How many built statements of one kind are cached. A process has one or a few sets of tables, each with a few statements."""


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The outbox's tables under one schema and prefix."""

    metadata: MetaData
    position: Sequence
    entry: Table
    queue: Table
    settlement: Table
    destination: Table
    blocked_group: Table
    callback: Table
    schedule: Table
    dispatcher: Table
    send_count: Table
    event: Table
    audit: Table
    proposal: Table
    meta: Table
    kid: Table
    record: Table
    mismatch: Table
    tombstone: Table


def define_tables(metadata: MetaData, *, schema: str | None = None, prefix: str = "outbox_") -> Tables:
    """Add the outbox's tables to `metadata`, for `create_all`. With the app's own Alembic, use `outbox.migrations.metadata()`."""
    check_table_names(schema, prefix)
    tables = Tables(
        metadata=metadata,
        position=Sequence(f"{prefix}position", schema=schema),
        entry=Table(f"{prefix}entry", metadata, *columns.entry(prefix), schema=schema),
        queue=Table(f"{prefix}queue", metadata, *columns.queue(prefix), schema=schema),
        settlement=Table(f"{prefix}settlement", metadata, *columns.settlement(prefix), schema=schema),
        destination=Table(f"{prefix}destination", metadata, *columns.destination(prefix), schema=schema),
        blocked_group=Table(f"{prefix}blocked_group", metadata, *columns.blocked_group(), schema=schema),
        callback=Table(f"{prefix}callback", metadata, *columns.callback(), schema=schema),
        schedule=Table(f"{prefix}schedule", metadata, *columns.schedule(prefix), schema=schema),
        dispatcher=Table(f"{prefix}dispatcher", metadata, *columns.dispatcher(), schema=schema),
        send_count=Table(f"{prefix}send_count", metadata, *columns.send_count(), schema=schema),
        event=Table(f"{prefix}event", metadata, *columns.event(prefix), schema=schema),
        audit=Table(f"{prefix}audit", metadata, *columns.audit(prefix), schema=schema),
        proposal=Table(f"{prefix}proposal", metadata, *columns.proposal(prefix), schema=schema),
        meta=Table(f"{prefix}meta", metadata, *columns.meta(prefix), schema=schema),
        kid=Table(f"{prefix}kid", metadata, *columns.kid(), schema=schema),
        record=Table(f"{prefix}record", metadata, *columns.record(prefix), schema=schema),
        mismatch=Table(f"{prefix}mismatch", metadata, *columns.mismatch(prefix, schema), schema=schema),
        tombstone=Table(f"{prefix}tombstone", metadata, *columns.tombstone(prefix), schema=schema),
    )
    for table, parameters in storage_parameters(tables).items():
        options = ", ".join(f"{name} = {value}" for name, value in parameters.items())
        ddl = DDL(f"ALTER TABLE %(fullname)s SET ({options})")  # type: ignore[no-untyped-call]  # untyped in SQLAlchemy
        event.listen(table, "after_create", ddl.execute_if(dialect="postgresql"))
    for table in metadata.tables.values():
        event.listen(table, "before_create", _set_collation)
    _listen_for_positions(tables)
    _listen_for_key_lock(tables)
    functions = database_functions(schema, prefix)
    for function in functions.values():
        _listen_for(function, tables)
    own = [getattr(tables, each.name).name for each in fields(Tables) if each.name != "metadata"]
    callable_names = [f"{prefix}{name}" for name in functions]
    hide_values_of(schema, prefix, [*own, f"{prefix}body", f"{prefix}key_lock"], callable_names)
    translate_for([*own, f"{prefix}key_lock", *callable_names])
    return tables


def _set_collation(table: Table, connection: Connection, **rest: object) -> None:
    """Set the table's options late: in its definition they would load SQLAlchemy's dialect for MariaDB in every process."""
    if (dialect := dialect_if_supported(connection)) is not None:
        table.kwargs.update(dialect.table_options)


def _listen_for_positions(tables: Tables) -> None:
    """PostgreSQL only: a sequence of MariaDB cannot give positions in commit order on every node of a Galera cluster."""

    def create(target: Table, connection: Connection, **rest: object) -> None:
        if dialect_of(connection).has_functions:
            tables.position.create(connection, checkfirst=True)

    def drop(target: Table, connection: Connection, **rest: object) -> None:
        if dialect_of(connection).has_functions:
            tables.position.drop(connection, checkfirst=True)

    event.listen(tables.queue, "before_create", create)
    event.listen(tables.queue, "after_drop", drop)


@lru_cache(MAX_STATEMENTS)
def tables_of(schema: str | None, prefix: str) -> Tables:
    """Tables that all callers share, and only read. To define them takes 6 ms, and statements are kept for each set of tables."""
    return define_tables(MetaData(), schema=schema, prefix=prefix)


def key_lock(tables: Tables) -> Table:
    """The table of `outbox.sql.key_locks`, which MariaDB and the portable mode have, and which is always empty."""
    return _define_key_lock(tables.record.schema, tables.record.name.removesuffix("record"))


@lru_cache(MAX_STATEMENTS)
def _define_key_lock(schema: str | None, prefix: str) -> Table:
    """Never defined again, because other threads use it meanwhile."""
    return Table(f"{prefix}key_lock", MetaData(), Column("id", ID, primary_key=True), schema=schema)


def _listen_for_key_lock(tables: Tables) -> None:
    def create(target: Table, connection: Connection, **rest: object) -> None:
        if dialect_of(connection).has_key_locks:
            _set_collation(key_lock(tables), connection)
            key_lock(tables).create(connection, checkfirst=True)

    def drop(target: Table, connection: Connection, **rest: object) -> None:
        if dialect_of(connection).has_key_locks:
            key_lock(tables).drop(connection, checkfirst=True)

    event.listen(tables.record, "after_create", create)
    event.listen(tables.record, "before_drop", drop)


def _listen_for(function: DatabaseFunction, tables: Tables) -> None:
    """Create the function after the tables that it needs, and drop it before them."""
    needed = {getattr(tables, name) for name in function.needs}

    def listen(moment: str, *statements: str) -> None:
        def execute(target: MetaData, connection: Connection, tables: Collection[Table], **rest: object) -> None:
            # `create_all` and `drop_all` may get only some of the tables, or find that they exist
            if dialect_of(connection).has_functions and needed <= set(tables):
                for statement in statements:
                    connection.execute(text(statement))

        event.listen(tables.metadata, moment, execute)

    listen("after_create", *creation(function))
    listen("before_drop", f"DROP FUNCTION IF EXISTS {function.signature}")


def storage_parameters(tables: Tables) -> dict[Table, dict[str, int]]:
    """PostgreSQL's storage parameters. The queue is vacuumed after a number of changes, because its size does not show them.

    Fillfactor 33: a leased row is up to twice as large as a pending one, and an update is HOT only if the new row fits on the
    same page. Measured with batches of 500: with 50, 53 to 77 % of the leases were HOT; with 33, all.
    """
    return {
        tables.queue: {
            "fillfactor": 33,
            "autovacuum_vacuum_scale_factor": 0,
            "autovacuum_vacuum_threshold": 2000,
            "autovacuum_vacuum_cost_delay": 0,
        },
        tables.record: {"fillfactor": 90},
    }


def is_open(record: FromClause, state: str) -> ColumnElement[bool]:
    """Whether a record is in this state, which must be one of `columns.OPEN`; as a condition that can use the partial index.

    It has literals instead of parameters, and the index's own condition: SQLite uses a partial index only for this exact
    condition (sqlite.org/partialindex.html).
    """
    return and_(
        record.c.state.bool_op("IN")(literal_column(columns.OPEN)), record.c.state == literal_column(f"'{state}'")
    )
