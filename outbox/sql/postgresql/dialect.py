"""The dialect of PostgreSQL."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from types import MappingProxyType
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Select,
    Table,
    func,
    literal,
    select,
    text,
)
from sqlalchemy import Dialect as DriverDialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import ClauseElement, Executable
from sqlalchemy.sql.compiler import SQLCompiler

from outbox.sql import key_locks, migration_locks
from outbox.sql.connections.requirements import require_encodings
from outbox.sql.connections.transactions import is_in_autocommit
from outbox.sql.dialect import Lock, Writes
from outbox.sql.postgresql import statistics
from outbox.sql.postgresql.compatible import Compatible
from outbox.sql.schema.functions import suspended_sql
from outbox.sql.schema.identifiers import quoted, quoted_table
from outbox.sql.schema.tables import Tables
from outbox.sql.server_reports import Holder, ServerIdentity, TableHealth


class PostgreSQL(Compatible):
    """One statement for a batch, functions, advisory locks, and NOTIFY."""

    name = "postgresql"

    later = "{0} + make_interval(secs => {1})"
    stored_body = "CASE WHEN {1} IS NULL THEN {0} ELSE {2} END"
    writes = Writes.ARRAYS
    has_functions = True
    has_catalog = True
    has_lateral = True
    has_notify = True
    snapshot = MappingProxyType({"isolation_level": "REPEATABLE READ", "postgresql_readonly": True})
    has_limits = True
    sessions_right = "GRANT pg_read_all_stats TO it"

    def transaction_start(self) -> ColumnElement[Any]:
        """An index condition needs a stable clock."""
        return func.now()

    def among(self, column: Column[Any], ids: Collection[Any]) -> ColumnElement[bool]:
        """An array: 500 parameters doubled the CPU time of a batch. SQLAlchemy's `any_` would make a circle of references around
        the list, so that only the garbage collector frees it.
        """
        return column == func.any(literal(list(ids), ARRAY(column.type)))

    def read_by_index(self, connection: Connection) -> None:
        connection.execute(_BY_INDEX)

    def planned_rows(self, connection: Connection, rows: Select[Any]) -> int:
        (plan,) = connection.execute(_Explain(rows)).scalar_one()
        return int(plan["Plan"]["Plan Rows"])

    def lock_key(self, connection: Connection, tables: Tables, id: UUID) -> Lock:
        return key_locks.try_advisory(connection, id)

    def wait_for_key(self, connection: Connection, tables: Tables, id: UUID, budget: timedelta) -> bool:
        """Wait at most for `budget` or statement_timeout, or until a deadlock. The caller's own lock_timeout stays."""
        return key_locks.wait_for_advisory(connection, id, budget)

    def require_usable(self, connection: Connection) -> None:
        require_encodings(connection)

    def at_own_level(self, engine: Engine) -> Engine:
        return engine.execution_options(isolation_level=self.isolation)

    def set_usable_level(self, connection: Connection) -> None:
        if is_in_autocommit(connection):
            connection.execution_options(isolation_level="READ COMMITTED")

    def server_identity(self, connection: Connection, meta: Table, *, reads_server: bool) -> ServerIdentity:
        return statistics.read_identity(connection, meta, reads_server=reads_server)

    def suspension(self, meta: Table) -> str | None:
        return suspended_sql(quoted(meta.name, meta.schema))

    def unreadable(self, connection: Connection, columns: Sequence[Column[Any]]) -> frozenset[Column[Any]]:
        may_read = (func.has_column_privilege(quoted_table(column.table), column.name, "SELECT") for column in columns)
        readable = connection.execute(select(*may_read)).one()
        return frozenset(column for column, may in zip(columns, readable, strict=True) if not may)

    def read_holders(self, connection: Connection) -> list[Holder] | None:
        return statistics.read_holders(connection)

    def read_tables(self, connection: Connection, tables: Sequence[Table]) -> list[TableHealth]:
        return statistics.read_tables(connection, tables)

    def read_size(self, connection: Connection, table: Table) -> tuple[int | None, int | None] | None:
        return statistics.read_size(connection, table)

    def serving_pid(self, connection: Connection) -> int | None:
        pid: int = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        return pid

    def migrating(self, connection: Connection, *, is_callers: bool) -> AbstractContextManager[None]:
        return migration_locks.alone_in_transaction(connection, has_advisory_locks=True)

    def script_frame(self, driver: DriverDialect, schema: str | None) -> tuple[list[str], list[str]]:
        return migration_locks.opening_on_postgresql(driver, schema), ["COMMIT"]


DIALECT = PostgreSQL()

_BY_INDEX = text("SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true)")


class _Explain(Executable, ClauseElement):
    inherit_cache = False

    def __init__(self, rows: Select[Any]) -> None:
        self.rows = rows


@compiles(_Explain)
def _explained(explain: _Explain, compiler: SQLCompiler, **kw: Any) -> str:
    return f"EXPLAIN (FORMAT JSON) {compiler.process(explain.rows, **kw)}"
