"""Statistics of a PostgreSQL server: of itself, its sessions and the outbox's tables."""

from collections.abc import Sequence

from sqlalchemy import Connection, Table, text

from outbox.sql.schema.identifiers import quoted_table
from outbox.sql.server_reports import Holder, ServerIdentity, TableHealth


def read_identity(connection: Connection, meta: Table, *, reads_server: bool) -> ServerIdentity:
    row = connection.execute(_SERVER if reads_server else _NO_SERVER, {"meta": quoted_table(meta)}).one()
    return ServerIdentity(**row._mapping)


def read_holders(connection: Connection) -> list[Holder] | None:
    if not connection.execute(text("SELECT pg_has_role('pg_read_all_stats', 'USAGE')")).scalar_one():
        return None
    return [Holder(row.what, row.held and row.held.total_seconds()) for row in connection.execute(_HOLDERS)]


def read_tables(connection: Connection, tables: Sequence[Table]) -> list[TableHealth]:
    rows = connection.execute(_HEALTH, {"tables": [quoted_table(table) for table in tables]})
    return [TableHealth(*row) for row in rows]


def read_size(connection: Connection, table: Table) -> tuple[int | None, int]:
    rows, size_bytes = connection.execute(_SIZE, {"table": quoted_table(table)}).one()
    return rows, size_bytes


_PLACE = """clock_timestamp() AS checked_at,
    (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
        || '/' || CAST(CAST(CAST(:meta AS text) AS regclass) AS oid) AS place"""
_NO_SERVER = text(f"SELECT NULL AS system_identifier, NULL AS timeline, NULL AS lsn, {_PLACE}")
_SERVER = text(
    "SELECT CAST(c.system_identifier AS text) AS system_identifier,"
    " substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) AS timeline, CAST(pg_current_wal_lsn() AS text) AS lsn,"
    f" {_PLACE} FROM pg_control_system() AS c"
)

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

# reltuples is -1 while it is unknown: PostgreSQL, "pg_class"
_SIZE = text(
    "SELECT NULLIF(reltuples, -1)::bigint, pg_total_relation_size(oid) FROM pg_class"
    " WHERE oid = CAST(CAST(:table AS text) AS regclass)"
)
