"""One migration at a time, whole or not at all, and never long in anyone's way."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool
from support.migrations import ROOT, Database, everything
from support.python_processes import PIPE, PythonProcess

from outbox import migrations
from outbox.errors import SchemaError
from outbox.sql import migration_locks

pytest_plugins = ["support.blank_databases"]


def test_upgrades_at_once_make_the_tables_once(blank):
    with ThreadPoolExecutor(4) as pool, holding_everyone_up(blank) as release:
        runs = [pool.submit(migrations.upgrade, blank.url) for _ in range(4)]
        release(4)
        for run in runs:
            run.result(30)

    migrations.check(blank.url)
    with blank.begin() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM outbox_version").scalar_one() == 1


def test_two_processes_upgrade_at_once(blank):
    program = "import sys; from outbox import migrations; migrations.upgrade(sys.argv[1]); print('upgraded')"
    arguments = ("-c", program, blank.url.render_as_string(hide_password=False))
    with holding_everyone_up(blank) as release:
        processes = [PythonProcess(*arguments, cwd=ROOT, stdout=PIPE) for _ in range(2)]
        release(2)
        printed = [process.stdout.read() for process in processes if process.wait(60) == 0]
        for process in processes:
            process.stdout.close()

    assert printed == ["upgraded\n"] * 2
    migrations.check(blank.url)


@contextmanager
def holding_everyone_up(database: Database) -> Iterator[Callable[[int], None]]:
    """Hold the migrations' lock until `release(n)`, which waits for n others to queue up for it, where that can be seen."""
    with create_engine(database.url, poolclass=NullPool).connect() as connection:
        if database.is_postgresql:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({migration_locks.MIGRATION_LOCK})")
        else:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

        def release(waiting_runs: int) -> None:
            waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            latest = time.monotonic() + 30
            while database.is_postgresql and connection.exec_driver_sql(waiting).scalar_one() < waiting_runs:
                assert time.monotonic() < latest
                time.sleep(0.01)
            connection.rollback()

        yield release


def test_a_migration_that_meets_a_long_transaction_gives_up_unchanged(blank_postgresql, monkeypatch):
    monkeypatch.setattr(migration_locks, "TABLE_LOCK_WAIT_SECONDS", 0.1)
    migrations.upgrade(blank_postgresql.url)
    before = everything(blank_postgresql)

    with blank_postgresql.begin() as long_transaction:
        long_transaction.exec_driver_sql("SELECT * FROM outbox_entry")
        with pytest.raises(SchemaError, match=r"another session, perhaps .* for 0\.1 s\. Nothing was changed"):
            migrations.downgrade(blank_postgresql.url)

    assert everything(blank_postgresql) == before


def test_a_migration_that_times_out_waiting_for_another_one_reports_it(blank_postgresql, monkeypatch):
    monkeypatch.setattr(migration_locks, "MIGRATION_WAIT_SECONDS", 0.1)

    with (
        holding_everyone_up(blank_postgresql),
        pytest.raises(SchemaError, match=r"another migration has locked this database"),
    ):
        migrations.upgrade(blank_postgresql.url)


def test_a_migration_that_times_out_on_a_writer_of_sqlite_reports_it(blank_sqlite):
    impatient = create_engine(blank_sqlite.url, connect_args={"timeout": 0.05}, poolclass=NullPool)

    with holding_everyone_up(blank_sqlite), pytest.raises(SchemaError, match="another connection is writing"):
        migrations.upgrade(impatient)


def test_a_migration_that_fails_halfway_leaves_nothing(blank):
    with blank.begin() as connection:  # its index has the name of one of ours
        connection.exec_driver_sql("CREATE TABLE business (id INTEGER)")
        connection.exec_driver_sql("CREATE INDEX outbox_tombstone_forget ON business (id)")
    before = everything(blank)

    with pytest.raises(Exception, match="already exists"):
        migrations.upgrade(blank.url)

    assert everything(blank) == before
