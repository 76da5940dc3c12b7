"""App, dispatcher and database one version apart run together: the database is upgraded first, the processes in any order."""

import asyncio
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from dispatching import dispatcher, pumping, put, put_one, queue_row, run_once, state, states, wait_for
from migrating import ROOT, everything
from migrating import Database as Blank
from support import PAYLOAD, REQUEST, TABLES, Base, Database

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.claims import Claims
from dispatchers.marks import Mark, Watched
from dispatchers.pressure import Pressures
from outbox import migrations
from outbox.errors import SchemaError
from outbox.keys import ParentKey, encode_native, parent_id
from outbox.migrations import locks, scripts
from outbox.schema import SCHEMA_VERSION

pytest_plugins = ["blank_databases"]


@pytest.fixture
def migrated(blank: Blank) -> Iterator[Database]:
    """A database that our migrations made, on each kind."""
    migrations.upgrade(blank.url)
    database = Database(blank.url)
    Base.metadata.create_all(database.engine)
    yield database
    database.dispose()


# A database that a newer release has upgraded

NEXT = """
import sqlalchemy as sa
from alembic.operations import Operations

revision = "9999"
down_revision = {head!r}
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    for table in ("entry", "queue", "settlement", "event", "record"):
        op.add_column(prefix + table, sa.Column("tenant", sa.Text(), server_default="none"), schema=schema)
    op.create_table(prefix + "tenant", sa.Column("name", sa.Text(), primary_key=True), schema=schema)
    op.create_index(prefix + "queue_tenant", prefix + "queue", ["tenant", "state"], schema=schema)
"""


@pytest.fixture
def ahead(migrated: Database, tmp_path: Path) -> Database:
    """A database one migration ahead of this release: columns with defaults, a table and an index that it does not know."""
    newer = tmp_path / "newer"
    shutil.copytree(ROOT / "alembic", newer)
    (newer / "versions" / "9999_tenants.py").write_text(NEXT.format(head=migrations.head()))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scripts, "home", lambda: newer)
        migrations.upgrade(migrated.url)
    return migrated


def test_this_release_works_on_a_database_that_is_one_migration_ahead(ahead: Database, ob: outbox.Outbox) -> None:
    service = MemoryAdapter()

    def request() -> outbox.Response:
        with ahead.begin() as session, ob.idempotent(session, "retry-1", scope="acct_1", request=REQUEST) as claim:
            if not claim.replayed:
                ob.enqueue(session, "crm.upsert", PAYLOAD)
                claim.respond(201, {"order": "placed"})
        return claim.answer

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


def test_this_release_checks_a_database_that_is_one_migration_ahead_and_leaves_it_so(
    ahead: Database, ob: outbox.Outbox
) -> None:
    working = dispatcher(ahead, ob, adapters={"crm": MemoryAdapter()})

    migrations.check(ahead.url)
    asyncio.run(working.check())
    with pytest.raises(SchemaError, match="at revision 9999, made by a newer release"):
        migrations.upgrade(ahead.url)

    assert migrations.current(ahead.url) == "9999"


def test_a_dispatcher_does_not_start_on_a_database_that_is_behind_it(migrated: Database, ob: outbox.Outbox) -> None:
    migrations.downgrade(migrated.url, "0001")
    working = dispatcher(migrated, ob, adapters={"crm": MemoryAdapter()})

    with pytest.raises(
        SchemaError, match=rf"is at revision 0001, this release needs {migrations.head()}.*: run `outbox db upgrade`"
    ):
        asyncio.run(working.check())


# An app of the previous release: its statements as they were at revision 0001

ENTRY_0001 = """
    INSERT INTO outbox_entry (id, env, scope, source, parent, operation, discriminator, kid, tag, parent_id, record_id,
        destination, payload, options, headers, ordering_key, schema_version, due_at, created_at)
    VALUES (:id, 'test', '', 'app', 'order:1', 'crm.upsert', '', 'k1', :tag, :parent_id, NULL,
        'crm', :payload, '{}', '{}', NULL, 1, :now, :now)
    ON CONFLICT (id) DO NOTHING
"""
QUEUE_0001 = """
    INSERT INTO outbox_queue (id, destination, state, due_at, deliveries, attempts, maybe_sent, key_epoch, ordering_key)
    VALUES (:id, 'crm', 'pending', :now, 0, 0, false, 0, NULL)
"""
CANCEL_0001 = """
    DELETE FROM outbox_queue WHERE id = :id AND state IN ('pending', 'retry') AND lease_token IS NULL AND NOT maybe_sent
"""
CANCELLED_0001 = """
    INSERT INTO outbox_settlement (id, state, deliveries, attempts, key_epoch, settled_at)
    VALUES (:id, 'cancelled', 0, 0, 0, :now)
"""


def execute_as_0001(database: Database, *statements: str, **values: Any) -> None:
    with database.engine.begin() as connection:
        clock = "now()" if database.name == "postgresql" else "CAST(strftime('%s') AS INTEGER) * 1000000"
        bare = [statement.replace(":now", clock) for statement in statements]
        for statement in bare:
            used = {name: value for name, value in values.items() if f":{name}" in statement}
            typed = [sa.bindparam(name, type_=sa.Uuid if "id" in name else sa.LargeBinary) for name in used]
            connection.execute(sa.text(statement).bindparams(*typed), used)


def entry_of_0001(database: Database) -> tuple[Any, bytes]:
    id, tag = uuid4(), bytes(range(32))
    values = {
        "id": id,
        "tag": tag,
        "parent_id": parent_id("test", ParentKey("order:1")),
        "payload": b'{"amount": 2000}',
    }
    execute_as_0001(database, ENTRY_0001, QUEUE_0001, **values)
    return id, tag


def test_what_an_app_of_the_previous_release_enqueues_is_sent(migrated: Database, ob: outbox.Outbox) -> None:
    id, tag = entry_of_0001(migrated)
    service = MemoryAdapter()

    run_once(migrated, ob, adapters={"crm": service})

    (delivery,) = service.deliveries
    assert (delivery.id, delivery.payload, delivery.key) == (id, {"amount": 2000}, encode_native(tag))
    with migrated.begin() as session:
        assert [entry.state for entry in ob.status(session, "order:1")] == ["delivered"]


def test_what_an_app_of_the_previous_release_cancels_is_not_sent(migrated: Database, ob: outbox.Outbox) -> None:
    id, _ = entry_of_0001(migrated)
    execute_as_0001(migrated, CANCEL_0001, CANCELLED_0001, id=id)
    service = MemoryAdapter()

    run_once(migrated, ob, adapters={"crm": service})

    assert service.deliveries == []
    assert state(migrated, id) == "cancelled"


# An app of a newer release


def test_an_entry_that_only_a_newer_release_can_read_waits_and_is_reported_while_others_go_on(
    migrated: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    newer, *others = put(migrated, ob, count=4)
    entry = TABLES.entry
    migrated.execute(sa.update(entry).where(entry.c.id == newer).values(schema_version=SCHEMA_VERSION + 1))
    service = MemoryAdapter()

    with caplog.at_level(logging.WARNING, "outbox.dispatcher"):
        run_once(migrated, ob, adapters={"crm": service})

    assert {delivery.id for delivery in service.deliveries} == set(others)
    waiting = queue_row(migrated, newer)
    assert (waiting.state, waiting.deliveries, waiting.attempts) == ("pending", 0, 0)
    assert f"entry {newer} (crm.upsert) waits: a newer release wrote it" in caplog.text


# The upgrade itself, while all are at work


@pytest.fixture
def previous(blank_postgresql: Blank) -> Iterator[Database]:
    """A PostgreSQL at the revision before this release's."""
    migrations.upgrade(blank_postgresql.url)
    migrations.downgrade(blank_postgresql.url, "0001")
    database = Database(blank_postgresql.url)
    yield database
    database.dispose()


class EarlierClaims(Claims):
    """As an earlier release's, whose looks ask for nothing that later revisions have brought."""

    async def watch(self, env: str, known: Mark | None) -> Watched:
        return Watched(mark=None)

    async def pressures(self) -> Pressures:
        return Pressures(datetime.now(UTC), {})


def test_the_upgrade_runs_while_apps_enqueue_and_a_dispatcher_sends(previous: Database, ob: outbox.Outbox) -> None:
    service = MemoryAdapter()
    over = threading.Event()
    together = threading.Barrier(3)

    def app(name: str) -> int:
        together.wait(10)
        number = 0
        while not over.is_set():
            with previous.begin() as session:
                ob.enqueue(session, "crm.upsert", PAYLOAD, parent=f"{name}:{number}")
            number += 1
        return number

    async def sending() -> None:
        store = EarlierClaims(previous.engine, ob.configuration)
        working = dispatcher(None, ob, store=store, adapters={"crm": service})
        together.wait(10)
        await pumping(working, lambda: over.is_set() and "pending" not in states(previous))
        await working.close()

    def sent(count: int) -> Callable[[], bool]:
        return lambda: len(service.effects) >= count

    with ThreadPoolExecutor(3) as pool:
        dispatching = pool.submit(asyncio.run, sending())
        apps = [pool.submit(app, name) for name in ("north", "south")]
        try:
            wait_for(sent(50), "the first entries to be sent")
            migrations.upgrade(previous.url)
            wait_for(sent(len(service.effects) + 50), "entries to be sent after the upgrade")
        finally:
            over.set()
        enqueued = sum(app.result(30) for app in apps)
        dispatching.result(30)

    migrations.check(previous.url)
    assert states(previous) == {"delivered": enqueued}
    assert set(service.effects.values()) == {1}


def test_a_long_transaction_makes_the_upgrade_give_up_and_the_app_go_on(
    previous: Database, ob: outbox.Outbox, blank_postgresql: Blank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "TABLE_LOCK_WAIT_SECONDS", 0.1)
    first = entry_of_0001(previous)[0]
    before = everything(blank_postgresql)

    with previous.new_engine().connect() as long_transaction:
        long_transaction.exec_driver_sql(CANCELLED_0001.replace(":id", f"'{uuid4()}'").replace(":now", "now()"))
        with pytest.raises(SchemaError, match=r"another session, perhaps a long transaction, .* Nothing was changed"):
            migrations.upgrade(previous.url)
        second = put_one(previous, ob, parent="order:2")

    assert everything(blank_postgresql) == before
    assert migrations.current(previous.url) == "0001"
    migrations.upgrade(previous.url)
    migrations.check(previous.url)
    run_once(previous, ob, adapters={"crm": MemoryAdapter()})
    assert [state(previous, first), state(previous, second)] == ["delivered", "delivered"]
