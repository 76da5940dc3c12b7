"""The state of the outbox's tables in PostgreSQL: their sizes, their dead rows, and what keeps autovacuum from removing those."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text

from outbox.sql.dialect import database_now
from outbox.sql.identifiers import quoted_table
from outbox.sql.schema import Tables


@dataclass(frozen=True, slots=True)
class Holder:
    """What keeps old row versions. held_seconds: for how long; None for a replication slot that nothing reads."""

    what: str
    held_seconds: float | None


@dataclass(frozen=True, slots=True)
class TableHealth:
    """A table, as PostgreSQL's statistics show it.

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

    holders: None for a role that may not see others' sessions. is_postgresql: whether there is anything to report at all.
    """

    at: datetime
    is_postgresql: bool
    tables: list[TableHealth]
    holders: list[Holder] | None


def read_database_health(connection: Connection, tables: Tables) -> DatabaseHealth:
    """Reads PostgreSQL's statistics only, and no row of a table."""
    is_postgresql = connection.dialect.name == "postgresql"
    return DatabaseHealth(
        at=database_now(connection),
        is_postgresql=is_postgresql,
        tables=read_tables(connection, tables) if is_postgresql else [],
        holders=read_holders(connection) if is_postgresql and sees_sessions(connection) else None,
    )


def sees_sessions(connection: Connection) -> bool:
    """Whether this role sees the sessions of others, and not only its own."""
    return bool(connection.execute(text("SELECT pg_has_role('pg_read_all_stats', 'USAGE')")).scalar_one())


def read_holders(connection: Connection) -> list[Holder]:
    return [Holder(row.what, row.held and row.held.total_seconds()) for row in connection.execute(_HOLDERS)]


def read_tables(connection: Connection, tables: Tables) -> list[TableHealth]:
    wanted = (tables.queue, tables.entry, tables.settlement, tables.event, tables.record, tables.tombstone)
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
