"""Maintenance beside everybody else, over real connections, and maintenance that is killed in the middle of a batch."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from support.daemons import wait_for
from support.database import IMPORT_PATH, TABLES, Database
from support.entries import claim, put, put_one, quota, run_once, settle, states
from support.python_processes import run_python
from support.retention import A_MOMENT, RETENTION, WINDOW, clean, elapse, kept, request, settle_all, shift

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.maintenance.retention import Retention
from dispatchers.maintenance.retention_sql import STEPS, Batch, Scan
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import Settle
from outbox.configuration import RECORD_RETENTION

pytestmark = pytest.mark.on_mariadb

TEST_TIMEOUT = 60
PAST_AUDIT = RECORD_RETENTION + A_MOMENT
PAST_RETENTION = RETENTION + A_MOMENT


@contextmanager
def batch_in_progress(database: Database, step: str, max_rows: int = 500) -> Iterator[Batch]:
    """For the block, a batch has been done and is not committed; then it is."""
    scan = Scan(Retention.of(RETENTION, [WINDOW]), max_rows)
    with database.new_engine().begin() as connection:
        yield STEPS[step](connection, TABLES, scan)


def wait_for_a_waiter(database: Database) -> None:
    waiting = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    with database.unprepared_engine(isolation_level="AUTOCOMMIT").connect() as connection:
        wait_for(lambda: connection.scalar(waiting), "a transaction to wait for a lock")


def test_a_maintenance_run_passes_over_what_another_is_deleting(postgresql: Database, ob: outbox.Outbox) -> None:
    for number in range(10):
        request(postgresql, ob, f"retry-{number}", "crm.upsert")
    settle_all(postgresql)
    elapse(postgresql, PAST_RETENTION)

    with batch_in_progress(postgresql, "records", 4) as first:
        # The entries of those four are kept: their records are there still.
        assert clean(postgresql) == {"records": 6, "entries": 6}
    with batch_in_progress(postgresql, "entries", 2) as second:
        assert clean(postgresql) == {"entries": 2}

    assert (first.deleted, second.deleted) == (4, 2)
    assert kept(postgresql) == {"tombstone": 10}


def test_two_upkeeps_at_once_divide_the_work(database: Database, ob: outbox.Outbox) -> None:
    for number in range(40):
        request(database, ob, f"retry-{number}", "crm.upsert")
    put(database, ob, count=60)
    settle_all(database)
    elapse(database, PAST_RETENTION)
    barrier = threading.Barrier(2)

    def one(engine: sa.Engine) -> dict[str, int]:
        barrier.wait(TEST_TIMEOUT)
        return clean(engine, max_rows=7)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, [database.new_engine(), database.new_engine()])

    # One may have passed over entries whose records the other was deleting.
    last = clean(database)
    together = {name: first[name] + second[name] + last[name] for name in ("records", "entries")}
    assert together == {"records": 40, "entries": 100}
    assert kept(database) == {"tombstone": 40}


@pytest.mark.parametrize("step", ["entries", "records"])
def test_enqueueing_does_not_wait_for_an_maintenance(postgresql: Database, ob: outbox.Outbox, step: str) -> None:
    request(postgresql, ob, "retry-001", "crm.upsert")
    put(postgresql, ob)
    settle_all(postgresql)
    elapse(postgresql, PAST_RETENTION)

    with batch_in_progress(postgresql, step) as batch:
        put_one(postgresql, ob, parent="order:new")
        request(postgresql, ob, "retry-002", "crm.upsert")

    assert batch.deleted == 1
    assert states(postgresql)["pending"] == 2


@pytest.mark.parametrize("if_exists", ["ignore", "raise"])
def test_an_enqueue_of_an_entry_that_is_being_deleted_is_a_new_one(
    postgresql: Database, ob: outbox.Outbox, if_exists: str
) -> None:
    put_one(postgresql, ob, parent="invoice:42")
    settle_all(postgresql)
    elapse(postgresql, PAST_RETENTION)

    with ThreadPoolExecutor(1) as pool:
        with batch_in_progress(postgresql, "entries") as batch:
            enqueued = pool.submit(put_one, postgresql, ob, parent="invoice:42", if_exists=if_exists)
            wait_for_a_waiter(postgresql)
        enqueued.result(TEST_TIMEOUT)

    assert batch.deleted == 1
    assert kept(postgresql) == {"entry": 1, "queue": 1}


def test_a_record_stays_while_its_last_entry_is_being_settled(postgresql: Database, ob: outbox.Outbox) -> None:
    (id,) = request(postgresql, ob, "retry-001", "crm.upsert")
    elapse(postgresql, PAST_AUDIT)

    with postgresql.engine.begin() as settling:
        settling.execute(sa.delete(TABLES.queue).where(TABLES.queue.c.id == id))
        row = {"id": id, "state": "delivered", "deliveries": 1, "attempts": 1, "key_epoch": 0}
        settling.execute(sa.insert(TABLES.settlement).values(**row, settled_at=sa.func.now()))
        assert not clean(postgresql.new_engine())

    assert clean(postgresql) == {"records": 1}
    assert kept(postgresql) == {"tombstone": 1, "entry": 1, "settlement": 1}


def test_beside_a_dispatcher_no_record_goes_before_its_entries_have_ended(
    database: Database, ob: outbox.Outbox
) -> None:
    count = 80
    for number in range(count):
        request(database, ob, f"retry-{number}", "crm.upsert")
    elapse(database, PAST_AUDIT)
    stopping = threading.Event()

    def keep_cleaning() -> int:
        engine = database.new_engine()
        tombstoned = 0
        while not stopping.is_set():
            done = clean(engine, max_rows=20)
            assert set(done) <= {"records"}
            tombstoned += done["records"]
        return tombstoned

    with ThreadPoolExecutor(1) as pool:
        tombstoned = pool.submit(keep_cleaning)
        try:
            settled = run_once(database, ob, adapters={"crm": MemoryAdapter()}, concurrency=10)
        finally:
            stopping.set()

    assert settled == count
    assert states(database) == {"delivered": count}
    assert tombstoned.result() + clean(database)["records"] == count
    assert len(database.rows(TABLES.tombstone)) == len(database.entries) == count


def test_a_maintenance_run_passes_over_a_record_whose_key_is_being_claimed(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    request(postgresql, ob)
    elapse(postgresql, PAST_AUDIT)

    with (
        postgresql.begin() as session,
        ob.idempotent(session, "retry-001", scope="acct_1", content={"amount": 1}) as claimed,
    ):
        assert not clean(postgresql.new_engine())
        ob.enqueue(session, "crm.upsert", {})
        claimed.respond(201)

    assert not clean(postgresql)
    assert kept(postgresql) == {"record": 1, "entry": 1, "queue": 1}


def test_a_claim_of_a_key_whose_record_is_being_deleted_is_refused(postgresql: Database, ob: outbox.Outbox) -> None:
    request(postgresql, ob, "retry-001", "crm.upsert")
    settle_all(postgresql)
    elapse(postgresql, PAST_AUDIT)

    with ThreadPoolExecutor(1) as pool, batch_in_progress(postgresql, "records") as batch:
        claimed = pool.submit(request, postgresql, ob)
        with pytest.raises(outbox.KeyExpired):
            claimed.result(TEST_TIMEOUT)
    with pytest.raises(outbox.KeyExpired):
        request(postgresql, ob)

    assert batch.deleted == 1


def test_a_claim_does_not_wait_for_the_deletion_of_its_keys_tombstone(postgresql: Database, ob: outbox.Outbox) -> None:
    request(postgresql, ob, "retry-001", "crm.upsert")
    settle_all(postgresql)
    elapse(postgresql, PAST_RETENTION)
    clean(postgresql)
    shift(postgresql, TABLES.tombstone.c.forget_at, 2 * RETENTION)

    with batch_in_progress(postgresql, "tombstones") as batch:
        request(postgresql, ob, "retry-001", "crm.upsert")

    assert batch.deleted == 1
    assert kept(postgresql) == {"record": 1, "entry": 1, "queue": 1}


def test_what_was_written_again_since_it_was_read_is_kept(postgresql: Database, ob: outbox.Outbox) -> None:
    request(postgresql, ob, "retry-001", "crm.upsert")
    settle_all(postgresql)
    elapse(postgresql, PAST_AUDIT)
    clean(postgresql)
    shift(postgresql, TABLES.tombstone.c.forget_at, 2 * RETENTION)
    engine = postgresql.new_engine()

    @sa.event.listens_for(engine, "before_cursor_execute")
    def renew(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "tombstone" in statement and "FOR UPDATE" in statement:
            shift(postgresql, TABLES.tombstone.c.forget_at, -4 * RETENTION)

    assert not clean(engine)
    assert len(postgresql.rows(TABLES.tombstone)) == 1


def test_a_claimed_entry_is_not_touched(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)
    elapse(database, 10 * RETENTION)
    store = DatabaseStore(database.engine, ob.configuration)
    claimed = claim(store, quota())

    assert not clean(database)

    assert len(settle(store, *((entry, Settle("delivered", 1)) for entry in claimed))) == 3
    assert not clean(database)


# --- killed in the middle

KILLED = """
import os, re, signal, sys
import sqlalchemy as sa
from support.retention import clean
from outbox.sql.sqlite import prepare_sqlite

engine = sa.create_engine(os.environ["SHOP_URL"])
if engine.dialect.name == "sqlite":
    prepare_sqlite(engine)

@sa.event.listens_for(engine, "after_cursor_execute")
def die(connection, cursor, statement, *rest):
    if sys.argv[1] in re.sub(r"/[*].*?[*]/ ", "", statement):  # without MySQL's hints
        os.kill(os.getpid(), signal.SIGKILL)

clean(engine)
"""

MOMENTS = [
    "INSERT INTO outbox_tombstone",
    "DELETE FROM outbox_record",
    "DELETE FROM outbox_event",
    "DELETE FROM outbox_settlement",
    "DELETE FROM outbox_entry",
]


@pytest.mark.every_value
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_maintenance_run_killed_in_a_batch_leaves_everything_whole(
    database: Database, ob: outbox.Outbox, moment: str
) -> None:
    for number in range(3):
        request(database, ob, f"retry-{number}", "crm.upsert")
    settle_all(database)
    elapse(database, PAST_RETENTION)
    url = database.url.render_as_string(hide_password=False)
    environment = os.environ | {"SHOP_URL": url, "PYTHONPATH": IMPORT_PATH}

    killed = run_python("-c", KILLED, moment, env=environment)

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before_the_entries = {"record": 3, "entry": 3, "settlement": 3, "event": 3}
    after_the_records = {"tombstone": 3, "entry": 3, "settlement": 3, "event": 3}
    assert kept(database) == (before_the_entries if moment in MOMENTS[:2] else after_the_records)
    # Until the server notices that its client is dead, the rows stay locked.
    assert wait_for(lambda: clean(database)["entries"], "the killed run's locks") == 3
    assert kept(database) == {"tombstone": 3}
