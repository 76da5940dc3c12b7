"""The state of the outbox's tables: their sizes, and what keeps PostgreSQL and MariaDB from removing old versions of rows."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, bindparam, text
from sqlalchemy.exc import DBAPIError

from outbox.sql.clock import database_now
from outbox.sql.identifiers import quoted_table
from outbox.sql.mariadb_errors import PROCESS_MISSING, number_of
from outbox.sql.schema import Tables


@dataclass(frozen=True, slots=True)
class Holder:
    """What keeps old row versions. held_seconds: for how long; None for a replication slot that nothing reads."""

    what: str
    held_seconds: float | None


@dataclass(frozen=True, slots=True)
class TableHealth:
    """A table, as the server's statistics show it; on MariaDB its name, rows and sizes only.

    alive, dead: its rows, estimated. vacuums: whether autovacuum works on it. vacuum_after: autovacuum begins at so many dead
    rows. heap_bytes, index_bytes: on disk; the first without its TOAST table. vacuumed_at: its last vacuum, by hand or not.
    updates, hot_updates: since the statistics were reset; a HOT update wrote to no index.
    """

    name: str
    alive: int
    dead: int
    vacuums: bool
    vacuum_after: int = 0
    heap_bytes: int = 0
    index_bytes: int = 0
    vacuumed_at: datetime | None = None
    analyzed_at: datetime | None = None
    updates: int = 0
    hot_updates: int = 0


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
    dialect = connection.dialect.name
    has_statistics = dialect in SESSIONS_RIGHT
    return DatabaseHealth(
        at=database_now(connection),
        history=read_history(connection) if dialect == "mariadb" else None,
        tables=read_tables(connection, tables) if has_statistics else [],
        holders=read_holders(connection) if has_statistics else None,
    )


SESSIONS_RIGHT = {"postgresql": "GRANT pg_read_all_stats TO it", "mariadb": "GRANT PROCESS ON *.* TO it"}
"""By dialect: what lets a role see the sessions of others, and not only its own."""


def read_holders(connection: Connection) -> list[Holder] | None:
    """What holds back the removal of dead rows, the longest first; None for a role that may not see it."""
    if connection.dialect.name == "mariadb":
        return _read_holders_on_mariadb(connection)
    if not connection.execute(text("SELECT pg_has_role('pg_read_all_stats', 'USAGE')")).scalar_one():
        return None
    return [Holder(row.what, row.held and row.held.total_seconds()) for row in connection.execute(_HOLDERS)]


def _read_holders_on_mariadb(connection: Connection) -> list[Holder] | None:
    try:
        return [Holder(row.what, float(row.held)) for row in connection.execute(_MARIADB_HOLDERS)]
    except DBAPIError as error:
        if number_of(error.orig) != PROCESS_MISSING:
            raise
        return None


def read_history(connection: Connection) -> int:
    """How many transactions MariaDB has not purged yet: a claim reads what they have deleted. Any user may read it."""
    return int(connection.execute(_HISTORY).scalar_one())


def read_tables(connection: Connection, tables: Tables) -> list[TableHealth]:
    wanted = (tables.queue, tables.entry, tables.settlement, tables.event, tables.record, tables.tombstone)
    if connection.dialect.name == "mariadb":
        names = {"schema": tables.queue.schema, "tables": [table.name for table in wanted]}
        found = connection.execute(_MARIADB_TABLES, names)
        return [
            TableHealth(row.name, row.alive, 0, vacuums=True, heap_bytes=row.heap, index_bytes=row.indexes)
            for row in found
        ]
    rows = connection.execute(_HEALTH, {"tables": [quoted_table(table) for table in wanted]})
    return [TableHealth(*row) for row in rows]


_HOLDERS = text("""
SELECT format('the %s session %s of %s', state, pid, usename) AS what, clock_timestamp() - xact_start AS held
FROM pg_stat_activity
WHERE backend_xmin IS NOT NULL AND xact_start IS NOT NULL AND pid <> pg_backend_pid() AND datname = current_database()
UNION ALL
SELECT format('the prepared transaction %s of %s', quote_literal(gid), owner), clock_timestamp() - prepared
FROM pg_prepared_xacts WHERE database = current_database()
UNION ALL
SELECT format('the replication slot %s, which nothing reads,', slot_name), NULL
FROM pg_replication_slots WHERE NOT active AND (xmin IS NOT NULL OR catalog_xmin IS NOT NULL)
ORDER BY held DESC NULLS FIRST
""")

_HISTORY = text(
    "SELECT variable_value FROM information_schema.global_status WHERE variable_name = 'INNODB_HISTORY_LIST_LENGTH'"
)
_MARIADB_TABLES = text(
    "SELECT table_name AS name, table_rows AS alive, data_length AS heap, index_length AS indexes FROM information_schema.tables"
    " WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name IN :tables ORDER BY table_name"
).bindparams(bindparam("tables", expanding=True))
# One at READ COMMITTED keeps old versions only while a statement of it runs.
_MARIADB_HOLDERS = text(
    "SELECT CONCAT('the session ', p.id, ' of ', p.user, ' at ', t.trx_isolation_level) AS what,"
    " TIMESTAMPDIFF(SECOND, CONVERT_TZ(t.trx_started, 'SYSTEM', '+00:00'), UTC_TIMESTAMP()) AS held"
    " FROM information_schema.innodb_trx AS t JOIN information_schema.processlist AS p ON p.id = t.trx_mysql_thread_id"
    " WHERE p.id <> CONNECTION_ID()"
    " AND (t.trx_isolation_level IN ('REPEATABLE READ', 'SERIALIZABLE') OR t.trx_query IS NOT NULL)"
    " ORDER BY held DESC"
)

_HEALTH = text("""
SELECT c.relname AS name, s.n_live_tup AS alive, s.n_dead_tup AS dead,
    current_setting('autovacuum') = 'on' AND current_setting('track_counts') = 'on'
        AND NOT COALESCE('autovacuum_enabled=false' = ANY (c.reloptions), false) AS vacuums,
    CAST(COALESCE(o.threshold, current_setting('autovacuum_vacuum_threshold')::float)
        + COALESCE(o.factor, current_setting('autovacuum_vacuum_scale_factor')::float) * GREATEST(c.reltuples, 0) AS bigint),
    pg_relation_size(c.oid), pg_indexes_size(c.oid),
    GREATEST(s.last_vacuum, s.last_autovacuum), GREATEST(s.last_analyze, s.last_autoanalyze), s.n_tup_upd, s.n_tup_hot_upd
FROM pg_class AS c JOIN pg_stat_all_tables AS s ON s.relid = c.oid, LATERAL (
    SELECT max(split_part(each, '=', 2)) FILTER (WHERE each LIKE 'autovacuum\\_vacuum\\_threshold=%')::float AS threshold,
        max(split_part(each, '=', 2)) FILTER (WHERE each LIKE 'autovacuum\\_vacuum\\_scale\\_factor=%')::float AS factor
    FROM unnest(c.reloptions) AS each
) AS o
WHERE c.oid = ANY (CAST(CAST(:tables AS text[]) AS regclass[]))
ORDER BY c.relname
""")
