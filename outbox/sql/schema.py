"""The tables: what is remembered of entries, of their sending, and of requests.

An entry is cold: written once in the app's transaction, never updated. What changes while it is sent is in the narrow
`queue`, one row per entry that has not ended; the outcome of it in `settlement`, one row, append-only.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields

from sqlalchemy import (
    DDL,
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

from outbox.sql import columns
from outbox.sql.functions import DatabaseFunction, creation, database_functions
from outbox.sql.identifiers import check_table_names
from outbox.sql.schema_errors import translate_for
from outbox.sql.statement_errors import hide_values_of

SCHEMA_VERSION = 1
"""Written on every entry: which releases can read it. A dispatcher leaves entries of a newer version to a newer one.

It goes up when a dispatcher that does not know the change would read an entry wrongly: what a payload, an option or a
header means, how a key is derived. A new table, index or column that older releases may ignore leaves it as it is: that is
what the migrations' revisions count.
"""

STATEMENTS_MAX = 256
"""How many statements of one kind are kept built. A process has one set of tables, or a few, and each has a few shapes."""


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
    dispatcher: Table
    event: Table
    meta: Table
    kid: Table
    record: Table
    tombstone: Table


def define_tables(metadata: MetaData, *, schema: str | None = None, prefix: str = "outbox_") -> Tables:
    """Add the outbox's tables to `metadata`, for `create_all`. With the app's own Alembic, use `outbox.migrations.metadata()`."""
    check_table_names(schema, prefix)
    tables = Tables(
        metadata=metadata,
        position=Sequence(f"{prefix}position", schema=schema, metadata=metadata),
        entry=Table(f"{prefix}entry", metadata, *columns.entry(prefix), schema=schema),
        queue=Table(f"{prefix}queue", metadata, *columns.queue(prefix), schema=schema),
        settlement=Table(f"{prefix}settlement", metadata, *columns.settlement(prefix), schema=schema),
        destination=Table(f"{prefix}destination", metadata, *columns.destination(prefix), schema=schema),
        blocked_group=Table(f"{prefix}blocked_group", metadata, *columns.blocked_group(), schema=schema),
        callback=Table(f"{prefix}callback", metadata, *columns.callback(), schema=schema),
        dispatcher=Table(f"{prefix}dispatcher", metadata, *columns.dispatcher(), schema=schema),
        event=Table(f"{prefix}event", metadata, *columns.event(prefix), schema=schema),
        meta=Table(f"{prefix}meta", metadata, *columns.meta(prefix), schema=schema),
        kid=Table(f"{prefix}kid", metadata, *columns.kid(), schema=schema),
        record=Table(f"{prefix}record", metadata, *columns.record(prefix), schema=schema),
        tombstone=Table(f"{prefix}tombstone", metadata, *columns.tombstone(prefix), schema=schema),
    )
    for table, parameters in storage_parameters(tables).items():
        options = ", ".join(f"{name} = {value}" for name, value in parameters.items())
        ddl = DDL(f"ALTER TABLE %(fullname)s SET ({options})")  # type: ignore[no-untyped-call]  # untyped in SQLAlchemy
        event.listen(table, "after_create", ddl.execute_if(dialect="postgresql"))
    functions = database_functions(schema, prefix)
    for function in functions.values():
        _listen_for(function, tables)
    own = [getattr(tables, each.name).name for each in fields(Tables) if each.name != "metadata"]
    callable_names = [f"{prefix}{name}" for name in functions]
    hide_values_of(schema, prefix, [*own, f"{prefix}body"], callable_names)
    translate_for([*own, *callable_names])
    return tables


def _listen_for(function: DatabaseFunction, tables: Tables) -> None:
    """Make it after the tables that it needs, and drop it before them."""
    needed = {getattr(tables, name) for name in function.needs}

    def listen(moment: str, *statements: str) -> None:
        def execute(target: MetaData, connection: Connection, tables: Collection[Table], **rest: object) -> None:
            # `create_all` and `drop_all` may be called for some of the tables, or find them present
            if connection.dialect.name == "postgresql" and needed <= set(tables):
                for statement in statements:
                    connection.execute(text(statement))

        event.listen(tables.metadata, moment, execute)

    listen("after_create", *creation(function))
    listen("before_drop", f"DROP FUNCTION IF EXISTS {function.signature}")


def storage_parameters(tables: Tables) -> dict[Table, dict[str, int]]:
    """PostgreSQL's storage parameters. The queue is vacuumed by count, as its size says nothing of its churn.

    Fillfactor 33: a leased row is up to twice a pending one, and only what finds room on its own page is a HOT update.
    Measured, batches of 500: at 50, 53 to 77 % of the leases were HOT; at 33 all.
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
    """Whether a record is in this one of the `columns.OPEN` states, as its index has it.

    Written out, not a parameter, as the index is of these rows only. All of them are named too: SQLite takes a partial index
    only for its own condition, verbatim (sqlite.org/partialindex.html).
    """
    return and_(
        record.c.state.bool_op("IN")(literal_column(columns.OPEN)), record.c.state == literal_column(f"'{state}'")
    )
