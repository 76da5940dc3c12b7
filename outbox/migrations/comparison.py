"""The comparisons that autogenerate lacks: the PostgreSQL schema, the sequence, storage parameters, the functions.

Importing this module registers the comparison with Alembic; it checks the metadata that `environment.metadata` made.
"""

from collections.abc import Collection, Iterator
from typing import Any

from alembic.autogenerate import comparators
from alembic.autogenerate.api import AutogenContext
from alembic.operations.ops import DropTableOp, ExecuteSQLOp, MigrateOperation, ModifyTableOps, UpgradeOps
from sqlalchemy import Connection, MetaData, Sequence, func, inspect, select, text
from sqlalchemy.schema import CreateSchema, CreateSequence, DropSchema, DropSequence, ExecutableDDLElement

from outbox.sql.dialect import dialect_of
from outbox.sql.schema.body_partitions import body_tables
from outbox.sql.schema.functions import closing, database_functions
from outbox.sql.schema.identifiers import postgresql, quoted
from outbox.sql.schema.tables import storage_parameters, tables_of

NAMES = "sqlalchemy-outbox"
"""The key of `MetaData.info` under which an outbox's schema and prefix stand."""

LAST: dict[str, Any] = {}
try:  # what is compared last is last in the script: storage parameters after their tables
    from alembic.util import DispatchPriority
except ImportError:
    pass  # before Alembic 1.18, what is registered last is compared last
else:
    LAST["priority"] = DispatchPriority.LAST


class ReversibleSQL(ExecuteSQLOp):
    """A statement of an upgrade, and the one that takes it back. Alembic renders it as `op.execute(...)`."""

    def __init__(self, statement: str, undo: str) -> None:
        super().__init__(statement)
        self._undo = undo

    def reverse(self) -> "ReversibleSQL":
        return ReversibleSQL(self._undo, str(self.sqltext))


@comparators.dispatch_for("schema", **LAST)
def compare(context: AutogenContext, upgrade: UpgradeOps, schemas: Collection[str | None]) -> None:
    """Add to `upgrade` what the database lacks of the outboxes among the target metadata."""
    connection, target = context.connection, context.metadata
    if connection is None or target is None or not dialect_of(connection).has_catalog:
        return
    for metadata in [target] if isinstance(target, MetaData) else target:
        if NAMES in metadata.info:
            schema, prefix = metadata.info[NAMES]
            upgrade.ops[:] = _without_bodies(upgrade.ops, schema, prefix)
            upgrade.ops[:0] = _schema(connection, schema)
            upgrade.ops += [
                *_sequence(connection, schema, prefix),
                *_storage(connection, schema, prefix),
                *_functions(connection, schema, prefix),
            ]


def _schema(connection: Connection, schema: str | None) -> Iterator[ReversibleSQL]:
    if schema is not None and not inspect(connection).has_schema(schema):
        # IF [NOT] EXISTS: two outboxes in one schema are compared one after the other
        yield ReversibleSQL(_sql(CreateSchema(schema, if_not_exists=True)), _sql(DropSchema(schema, if_exists=True)))


def _sequence(connection: Connection, schema: str | None, prefix: str) -> Iterator[ReversibleSQL]:
    if not inspect(connection).has_sequence(f"{prefix}position", schema=schema):
        sequence = Sequence(f"{prefix}position", schema=schema)
        yield ReversibleSQL(_sql(CreateSequence(sequence)), _sql(DropSequence(sequence)))


def _storage(connection: Connection, schema: str | None, prefix: str) -> Iterator[ReversibleSQL]:
    tables = tables_of(schema, prefix)
    for table, wanted in storage_parameters(tables).items():
        name = quoted(table.name, schema)
        stored = connection.scalar(
            text("SELECT reloptions FROM pg_class WHERE oid = to_regclass(:name)"), {"name": name}
        )
        found = dict(option.split("=", 1) for option in stored or ())
        differing = {option: value for option, value in wanted.items() if found.get(option) != str(value)}
        if differing:
            settings = ", ".join(f"{option} = {value}" for option, value in differing.items())
            yield ReversibleSQL(
                f"ALTER TABLE {name} SET ({settings})", f"ALTER TABLE {name} RESET ({', '.join(differing)})"
            )


def _functions(connection: Connection, schema: str | None, prefix: str) -> Iterator[ReversibleSQL]:
    for function in database_functions(schema, prefix).values():
        signature = function.signature
        if connection.scalar(select(func.to_regprocedure(signature))) is None:
            yield ReversibleSQL(function.create, f"DROP FUNCTION IF EXISTS {signature}")
            if function.closed:
                yield ReversibleSQL(closing(function), f"GRANT EXECUTE ON FUNCTION {signature} TO PUBLIC")


def _without_bodies(operations: list[MigrateOperation], schema: str | None, prefix: str) -> list[MigrateOperation]:
    """The operations without those that drop what `outbox db partition` made, which no metadata contains."""
    bodies = body_tables(prefix)

    def drops_bodies(operation: MigrateOperation) -> bool:
        if not isinstance(operation, DropTableOp | ModifyTableOps) or operation.schema != schema:
            return False
        return bodies.fullmatch(operation.table_name) is not None

    return [operation for operation in operations if not drops_bodies(operation)]


def _sql(statement: ExecutableDDLElement) -> str:
    return str(statement.compile(dialect=postgresql()))
