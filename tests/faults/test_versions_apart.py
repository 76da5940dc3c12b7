"""App, dispatcher and database one version apart run together: the database is upgraded first, the processes in any order."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.daemons import wait_for
from support.database import PAYLOAD, REQUEST, TABLES, Base, Database
from support.entries import dispatcher, pumping, put, put_one, queue_row, run_once, state, states
from support.migrations import Database as Blank
from support.migrations import newer_release

import outbox
from dispatchers.adapters import MemoryAdapter
from outbox import migrations
from outbox.errors import SchemaError
from outbox.keys import ParentKey
from outbox.sql import migration_locks
from outbox.sql.schema.tables import ENCRYPTED_VERSION

pytest_plugins = ["support.blank_databases"]


@pytest.fixture
def migrated(blank: Blank) -> Iterator[Database]:
    """A database that our migrations made, on each kind."""
    migrations.upgrade(blank.url)
    database = Database(blank.url)
    Base.metadata.create_all(database.engine)
    yield database
    database.dispose()


# A database that a newer release has upgraded


@pytest.fixture
def ahead(migrated: Database, tmp_path: Path) -> Database:
    """A database one migration ahead of this release: columns with defaults, a table and an index that it does not know."""
    with newer_release(tmp_path):
        migrations.upgrade(migrated.url)
    return migrated


def test_this_release_works_on_a_database_that_is_one_migration_ahead(ahead: Database, ob: outbox.Outbox) -> None:
    service = MemoryAdapter()

    def request() -> outbox.Response:
        with ahead.begin() as session, ob.idempotent(session, "retry-1", scope="acct_1", content=REQUEST) as claim:
            if not claim.replayed:
                ob.enqueue(session, "crm.upsert", PAYLOAD)
                claim.respond(201, {"order": "placed"})
        return claim.require_response()

    put(ahead, ob, count=3)
    assert request() == request()
    cancelled = put_one(ahead, ob, parent="order:cancelled")
    with ahead.begin() as session:
        assert ob.cancel(session, cancelled)

    settled = run_once(ahead, ob, adapters={"crm": service})

    assert settled == len(service.effects) == 4
    assert states(ahead) == {"delivered": 4, "cancelled": 1}
    with ahead.begin() as session:
        (entry,) = ob.status(session, ParentKey("retry-1", scope="acct_1", source="http"))
    assert (entry.state, entry.result) == ("delivered", {"id": str(entry.id)})


def test_this_release_accepts_a_database_one_migration_ahead_unchanged(ahead: Database, ob: outbox.Outbox) -> None:
    working = dispatcher(ahead, ob, adapters={"crm": MemoryAdapter()})

    migrations.check(ahead.url)
    asyncio.run(working.check())
    with pytest.raises(SchemaError, match="at revision 9999, made by a newer release"):
        migrations.upgrade(ahead.url)

    assert migrations.current(ahead.url) == "9999"


def test_a_dispatcher_does_not_start_on_a_database_of_an_older_revision(
    migrated: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    working = dispatcher(migrated, ob, adapters={"crm": MemoryAdapter()})

    with (
        newer_release(tmp_path),
        pytest.raises(
            SchemaError, match=r"is at revision 0001, but this release needs 9999.*: run `outbox db upgrade`"
        ),
    ):
        asyncio.run(working.check())


# An app of a newer release


def test_an_entry_for_a_newer_release_waits_and_is_reported_beside_others(
    migrated: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    newer, *others = put(migrated, ob, count=4)
    entry = TABLES.entry
    migrated.execute(sa.update(entry).where(entry.c.id == newer).values(schema_version=ENCRYPTED_VERSION + 1))
    service = MemoryAdapter()

    with caplog.at_level(logging.WARNING, "outbox.dispatcher"):
        run_once(migrated, ob, adapters={"crm": service})

    assert {delivery.id for delivery in service.deliveries} == set(others)
    waiting = queue_row(migrated, newer)
    assert (waiting.state, waiting.deliveries, waiting.attempts) == ("pending", 0, 0)
    assert f"entry {newer} (crm.upsert) waits: a newer release wrote it" in caplog.text


# The upgrade itself, while all are at work


@pytest.fixture
def migrated_postgresql(blank_postgresql: Blank) -> Iterator[Database]:
    migrations.upgrade(blank_postgresql.url)
    database = Database(blank_postgresql.url)
    yield database
    database.dispose()


def test_the_upgrade_runs_while_apps_enqueue_and_a_dispatcher_sends(
    migrated_postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    previous = migrated_postgresql
    service = MemoryAdapter()
    over = threading.Event()
    together = threading.Barrier(3)

    def app(name: str) -> int:
        together.wait(60)
        number = 0
        while not over.is_set():
            with previous.begin() as session:
                ob.enqueue(session, "crm.upsert", PAYLOAD, parent=f"{name}:{number}")
            number += 1
        return number

    async def sending() -> None:
        working = dispatcher(previous, ob, adapters={"crm": service})
        together.wait(60)
        await pumping(working, lambda: over.is_set() and "pending" not in states(previous))
        await working.close()

    def sent(count: int) -> Callable[[], bool]:
        return lambda: len(service.effects) >= count

    with ThreadPoolExecutor(3) as pool:
        dispatching = pool.submit(asyncio.run, sending())
        apps = [pool.submit(app, name) for name in ("north", "south")]
        try:
            wait_for(sent(50), "the first entries to be sent")
            with newer_release(tmp_path, altered=("queue",)):
                migrations.upgrade(previous.url)
            wait_for(sent(len(service.effects) + 50), "entries to be sent after the upgrade")
        finally:
            over.set()
        enqueued = sum(app.result(30) for app in apps)
        dispatching.result(30)

    assert migrations.current(previous.url) == "9999"
    assert states(previous) == {"delivered": enqueued}
    assert set(service.effects.values()) == {1}


def test_a_long_transaction_makes_the_upgrade_give_up_and_the_app_continue(
    migrated_postgresql: Database, ob: outbox.Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    previous = migrated_postgresql
    monkeypatch.setattr(migration_locks, "TABLE_LOCK_WAIT_SECONDS", 0.1)
    first = put_one(previous, ob, parent="order:1")

    with previous.new_engine().connect() as long_transaction:
        long_transaction.exec_driver_sql("SELECT id FROM outbox_settlement")
        with newer_release(tmp_path), pytest.raises(SchemaError, match=r"another session, .* Nothing was changed"):
            migrations.upgrade(previous.url)
        second = put_one(previous, ob, parent="order:2")

    assert migrations.current(previous.url) == "0001"
    with newer_release(tmp_path):
        migrations.upgrade(previous.url)
    run_once(previous, ob, adapters={"crm": MemoryAdapter()})
    assert [state(previous, first), state(previous, second)] == ["delivered", "delivered"]
