"""The state of the outbox's tables: their sizes, and what keeps PostgreSQL and MariaDB from removing old versions of rows."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from outbox.sql.clock import database_now
from outbox.sql.dialect import dialect_of
from outbox.sql.schema.tables import Tables
from outbox.sql.server_reports import Holder, TableHealth


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseHealth:
    """The tables and what holds back the removal of dead rows, the longest first.

    holders: None for a role that may not see others' sessions. history: how many transactions MariaDB has not purged yet. A
    database without statistics, such as SQLite, has no tables here.
    """

    at: datetime
    history: int | None
    tables: list[TableHealth]
    holders: list[Holder] | None


def read_database_health(connection: Connection, tables: Tables) -> DatabaseHealth:
    """Reads the server's statistics only, and no row of a table."""
    dialect = dialect_of(connection)
    has_statistics = dialect.sessions_right is not None
    return DatabaseHealth(
        at=database_now(connection),
        history=dialect.read_history(connection),
        tables=read_tables(connection, tables) if has_statistics else [],
        holders=dialect.read_holders(connection) if has_statistics else None,
    )


def read_tables(connection: Connection, tables: Tables) -> list[TableHealth]:
    wanted = (tables.queue, tables.entry, tables.settlement, tables.event, tables.record, tables.tombstone)
    return dialect_of(connection).read_tables(connection, wanted)
