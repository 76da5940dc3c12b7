"""The dashboard's overview: counted up to a limit, estimated above it."""

import time
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.cli_runner import put_uncertain
from support.database import TABLES, Database
from support.entries import age, put

import outbox
from dispatchers.admin.decide.decisions import pause
from dispatchers.admin.read import destinations, summary
from dispatchers.admin.read.counts import Count, count_rows
from dispatchers.admin.read.destinations import read_destinations
from dispatchers.admin.read.summary import count_uncertain, read_summary
from dispatchers.admin.read.table_health import read_database_health
from outbox.sql.dialect import dialect_of


def test_the_summary_counts_what_waits(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)
    put_uncertain(database, ob)
    age(database, timedelta(hours=2))
    with database.engine.begin() as connection:
        pause(connection, TABLES, "crm", actor="ada", reason="their release")

    with database.engine.begin() as connection:
        found = read_summary(connection, TABLES)

    crm, mail = found.destinations
    assert found.waiting == Count(value=4, is_exact=True)
    assert found.uncertain == Count(value=1, is_exact=True)
    assert (crm.due, crm.due_is_exact, crm.paused, crm.decided_by, crm.paused_reason) == (
        3,
        True,
        True,
        "ada",
        "their release",
    )
    assert (mail.due, found.states["mail"].states) == (0, {"uncertain": 1})
    assert found.oldest_due_seconds is not None
    assert 7200 <= found.oldest_due_seconds < 7300


@pytest.mark.parametrize("kind", ["rows", "uncertain", "due"])
def test_above_a_limit_the_planner_estimates(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(destinations, "MAX_COUNTED", 100)
    monkeypatch.setattr(summary, "MAX_DOUBTFUL", 100)
    put(postgresql, ob, count=500)
    if kind == "uncertain":
        postgresql.execute(sa.update(TABLES.queue).values(state="uncertain", maybe_sent=True))
    with postgresql.owner() as connection:
        connection.exec_driver_sql("ANALYZE outbox_queue")

    with postgresql.engine.begin() as connection:
        found = estimated(connection, kind)

    assert not found.is_exact
    assert 300 <= found.value <= 700


def estimated(connection: sa.Connection, kind: str) -> Count:
    if kind == "rows":
        return count_rows(connection, sa.select(TABLES.queue.c.id), max_counted=100)
    if kind == "uncertain":
        return count_uncertain(connection, TABLES)
    (crm,) = read_destinations(connection, TABLES).destinations
    return Count(value=crm.due, is_exact=crm.due_is_exact)


def test_an_estimate_is_at_least_what_was_counted(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=20)  # unknown to the planner's statistics

    with database.engine.begin() as connection:
        exact = count_rows(connection, sa.select(TABLES.queue.c.id), max_counted=20)
        estimate = count_rows(connection, sa.select(TABLES.queue.c.id), max_counted=19)

    assert exact == Count(value=20, is_exact=True)
    assert not estimate.is_exact
    assert estimate.value >= 19


def test_the_health_of_the_tables_shows_sizes_and_dead_rows(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)

    with database.engine.begin() as connection:
        health = read_database_health(connection, TABLES)

    if database.name not in ("postgresql", "mariadb"):
        assert (health.tables, health.holders, health.history) == ([], None, None)
        return
    assert (health.history is None) == (database.name == "postgresql")
    queue: Any = {table.name: table for table in health.tables}["outbox_queue"]
    assert queue.heap_bytes > 0
    assert queue.index_bytes > 0
    assert queue.vacuum_after == (2000 if database.name == "postgresql" else 0)
    assert {table.name for table in health.tables} >= {"outbox_entry", "outbox_settlement", "outbox_record"}


def test_a_session_that_holds_back_the_purge_of_mariadb_is_shown(mariadb: Database) -> None:
    """One at READ COMMITTED holds nothing back between its statements."""
    engine = mariadb.new_engine()
    with engine.connect() as holding, engine.connect() as harmless, engine.connect() as connection:
        holding.execution_options(isolation_level="REPEATABLE READ")
        ids = [str(each.exec_driver_sql("SELECT CONNECTION_ID()").scalar_one()) for each in (holding, harmless)]
        for each in (holding, harmless):
            each.execute(sa.select(TABLES.queue.c.id)).all()

        def shown() -> set[str]:
            return {holder.what.split()[2] for holder in dialect_of(connection).read_holders(connection) or []}

        until = time.monotonic() + 60
        while ids[0] not in shown():  # MariaDB shows the same for a tenth of a second
            assert time.monotonic() < until
        assert ids[1] not in shown()
    engine.dispose()


def test_a_user_without_process_sees_no_session_of_mariadb(mariadb: Database) -> None:
    user = f"poor_{mariadb.owners_url.database}"
    with mariadb.engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE USER {user}")
        connection.exec_driver_sql(f"GRANT SELECT ON * TO {user}")
    engine = sa.create_engine(mariadb.owners_url.set(username=user), poolclass=sa.NullPool)

    with engine.connect() as connection:
        health = read_database_health(connection, TABLES)

    with mariadb.engine.begin() as connection:
        connection.exec_driver_sql(f"DROP USER {user}")
    assert health.holders is None
    assert health.history is not None


def test_a_session_that_holds_back_the_vacuum_is_shown(postgresql: Database) -> None:
    other = postgresql.new_engine()
    with other.connect() as holding, postgresql.owner() as connection:
        holding.execution_options(isolation_level="REPEATABLE READ")
        holding.execute(sa.select(TABLES.queue.c.id)).all()
        pid = holding.connection.driver_connection.info.backend_pid  # type: ignore[union-attr]
        health = read_database_health(connection, TABLES)
    other.dispose()

    assert health.holders is not None
    assert any(str(pid) in holder.what for holder in health.holders)
