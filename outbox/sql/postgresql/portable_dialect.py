"""The portable mode: PostgreSQL's dialect for databases that are compatible with it, such as CockroachDB and YugabyteDB.

It takes plain statements at SERIALIZABLE, and repeats transactions that the server ended in favour of another one.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from datetime import timedelta
from uuid import UUID

from sqlalchemy import Connection, Table, bindparam, text
from sqlalchemy import Dialect as DriverDialect

from outbox.sql import key_locks, migration_locks
from outbox.sql.clock import database_now
from outbox.sql.connections.requirements import require_portable
from outbox.sql.dialect import Lock
from outbox.sql.postgresql.compatible import Compatible
from outbox.sql.postgresql.portable import LEVEL, NAME
from outbox.sql.schema.tables import Tables
from outbox.sql.server_reports import ServerIdentity


class Portable(Compatible):
    """Plain SQL at SERIALIZABLE, with locks that are rows."""

    name = NAME

    later = "{0} + CAST({1} AS double precision) * INTERVAL '1 second'"

    has_key_locks = True
    isolation = LEVEL
    requires_isolation = True
    repeats_conflicts = True
    takes_compatible_servers = True
    commits_ddl = True

    def lock_key(self, connection: Connection, tables: Tables, id: UUID) -> Lock:
        return Lock(key_locks.lock_by_row(connection, tables, id, 1), keeps_snapshot=True)

    def wait_for_key(self, connection: Connection, tables: Tables, id: UUID, budget: timedelta) -> bool:
        return key_locks.lock_by_row(connection, tables, id, key_locks.milliseconds_of(budget))

    def without_waiting(self, connection: Connection, write: Callable[[], bool]) -> bool:
        return key_locks.impatiently(connection, write)

    def require_usable(self, connection: Connection) -> None:
        require_portable(connection)

    def server_identity(self, connection: Connection, meta: Table, *, reads_server: bool) -> ServerIdentity:
        return ServerIdentity(database_now(connection))

    def migrating(self, connection: Connection, *, is_callers: bool) -> AbstractContextManager[None]:
        return migration_locks.alone_in_transaction(connection, has_advisory_locks=False)

    def script_frame(self, driver: DriverDialect, schema: str | None) -> tuple[list[str], list[str]]:
        return ["BEGIN"], ["COMMIT"]

    def columns_of(self, connection: Connection, schema: str | None, names: Collection[str]) -> dict[str, set[str]]:
        """SQLAlchemy also asks for types, defaults and sequences, in catalogs where CockroachDB differs."""
        schemas = "ANY (current_schemas(false))" if schema is None else ":schema"
        asked = text(
            "SELECT table_name, column_name FROM information_schema.columns"
            f" WHERE table_schema = {schemas} AND table_name IN :names"
        ).bindparams(bindparam("names", expanding=True))
        found: dict[str, set[str]] = {}
        for table_name, column_name in connection.execute(asked, {"schema": schema, "names": [*names]}):
            found.setdefault(table_name, set()).add(column_name)
        return found


DIALECT = Portable()
