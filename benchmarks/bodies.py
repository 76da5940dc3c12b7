"""Dropping a day of responses' bodies, over deleting it row by row: `python3 -m benchmarks.bodies`.

The same records, answered a month and two days ago, in the ordinary layout and in the one by day; both are cleaned by what a
dispatcher's maintenance does: the records, then the day (nothing, in the ordinary layout). The VACUUM is what autovacuum does
after it.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Engine, MetaData, create_engine, text

from dispatchers.maintenance.body_partitions import drop_days
from dispatchers.maintenance.jobs import Maintenance
from dispatchers.maintenance.retention import Retention
from dispatchers.settings import RETENTION
from dispatchers.testing import temporary_postgres
from outbox import migrations
from outbox.sql.schema.tables import define_tables

RECORDS = 50_000
BODY_BYTES = 2000  # of bytes that do not compress
DAYS = 32  # past the record's retention, and past the days that a partition is kept at least

FILL = f"""
INSERT INTO outbox_record (id, env, scope, source, parent, kid, state, fingerprint, fingerprint_version, status, body, headers,
    created_at, answered_at, replay_until, keep_until)
SELECT md5('r' || n)::uuid, 'bench', '', 'http', 'order:' || n, 'k1', 'succeeded', sha256('r'), 1, 201,
    (SELECT string_agg(sha256((n || '-' || i)::bytea), '') FROM generate_series(1, {BODY_BYTES // 32}) AS i), '{{}}',
    now() - interval '32 days', now() - interval '32 days', now() - interval '31 days', now() - interval '2 days'
FROM generate_series(1, :records) AS n
"""


def fill(engine: Engine, *, by_day: bool) -> None:
    migrations.upgrade(engine)
    if by_day:
        migrations.partition(engine)
    with engine.begin() as connection:
        connection.execute(text(FILL), {"records": RECORDS})
        if by_day:  # as if it had been answered then: its partition is today's under another day
            today = connection.scalar(text("SELECT CAST(now() AT TIME ZONE 'UTC' AS date)"))
            then = today - timedelta(days=DAYS)
            old = f"outbox_body_{then:%Y%m%d}"
            values = f"FROM ('{then}') TO ('{then}'::date + 1)"
            connection.exec_driver_sql(f"CREATE TABLE {old} PARTITION OF outbox_body FOR VALUES {values}")
            connection.execute(text(f"INSERT INTO {old} SELECT id, :day, body FROM outbox_body"), {"day": then})
            connection.exec_driver_sql(f"TRUNCATE outbox_body_{today:%Y%m%d}")
            connection.execute(text("UPDATE outbox_record SET body_day = :day"), {"day": then})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM (ANALYZE)")
        connection.exec_driver_sql("CHECKPOINT")


def measured(engine: Engine, work: Callable[[Engine], None]) -> tuple[float, float]:
    """Seconds, and megabytes of WAL."""
    since = text("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), CAST(:before AS pg_lsn))")
    with engine.connect() as connection:
        before = connection.scalar(text("SELECT pg_current_wal_insert_lsn()"))
        began = time.perf_counter()
        work(engine)
        took = time.perf_counter() - began
        return took, float(connection.scalar(since, {"before": before}) or 0) / 1e6


def delete_records(engine: Engine) -> None:
    tables = define_tables(MetaData())

    async def run(work: Callable[[Connection], Any]) -> Any:
        with engine.begin() as connection:
            return work(connection)

    async def all_of_it() -> None:
        async for _ in Maintenance(run, tables, Retention.of(RETENTION, [timedelta(days=1)]), pause_ratio=0).sweep():
            pass

    asyncio.run(all_of_it())


def drop(engine: Engine) -> None:
    with engine.begin() as connection:
        drop_days(connection, define_tables(MetaData()))


def vacuum(engine: Engine) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM outbox_record")


def megabytes(engine: Engine) -> float:
    """Megabytes that the tables of records and bodies hold."""
    sizes = "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relname ~ '^outbox_(record|body)' AND relkind = 'r'"
    with engine.connect() as connection:
        return float(connection.scalar(text(sizes)) or 0) / 1e6


def main() -> int:
    print(f"{RECORDS:,} records with bodies of {BODY_BYTES} bytes, all past their time")
    print(f"{'layout':>10}{'':>12}{'seconds':>10}{'WAL, MB':>10}{'size after, MB':>16}")
    for layout in ("ordinary", "by day"):
        with temporary_postgres() as server:
            engine = create_engine(server.url)
            fill(engine, by_day=layout == "by day")
            print(f"{layout:>10}{'before':>12}{'':>20}{megabytes(engine):>16.0f}")
            for name, work in (("records", delete_records), ("day", drop), ("vacuum", vacuum)):
                seconds, wal = measured(engine, work)
                print(f"{layout:>10}{name:>12}{seconds:>10.2f}{wal:>10.1f}{megabytes(engine):>16.0f}")
            engine.dispose()
    return 0


if __name__ == "__main__":
    sys.exit(main())
