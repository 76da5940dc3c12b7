"""The failover guard on both databases: stored identities, remembered ones, and what a suspension prevents."""

import asyncio
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database
from support.entries import claim, dispatcher, put_one, run_once, states, until_true
from support.late_answers import begun_and_held

import outbox
from dispatchers import database_identity
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import decisions
from dispatchers.database_identity import DatabaseIdentity, IdentityCheck
from dispatchers.errors import DecisionRefused, Suspended
from dispatchers.pipeline.failover_guard import FailoverGuard, IdentityFile
from dispatchers.store.database import DatabaseStore
from dispatchers.store.records import identity as store_identity

pytestmark = pytest.mark.on_mariadb

META = TABLES.meta
LATER = timedelta(minutes=5)


@pytest.fixture
def store(database: Database, ob: outbox.Outbox) -> DatabaseStore:
    return DatabaseStore(database.engine, ob.configuration)


def check_identity(store: DatabaseStore, known: DatabaseIdentity | None = None, env: str = "test") -> IdentityCheck:
    return asyncio.run(store.check_identity(env, known))


def identity_of(watched: IdentityCheck) -> DatabaseIdentity:
    assert watched.identity is not None
    return watched.identity


def hold(database: Database, reason: str = "restored") -> None:
    database.execute(sa.update(META).values(suspended_reason=reason))


# --- the stored identity


@pytest.mark.differs("portable", "the identity has no place and no timeline")
def test_the_first_check_writes_an_identity_and_the_next_ones_leave_it(
    store: DatabaseStore, database: Database
) -> None:
    first = check_identity(store)
    again = check_identity(store, first.identity)

    assert first == again
    assert identity_of(first).environment == "test"
    assert identity_of(first).place is not None
    assert len(database.rows(META)) == 1


def test_an_old_identity_is_renewed_and_its_number_never_decreases(
    store: DatabaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = identity_of(check_identity(store))
    monkeypatch.setattr(database_identity, "IDENTITY_EVERY", timedelta(0))

    second = identity_of(check_identity(store, first))

    assert second.checked_at > first.checked_at
    assert replace(second, checked_at=first.checked_at, lsn=first.lsn, number=1) == first
    assert second.number == 2


def test_of_two_that_renew_an_identity_the_second_leaves_the_firsts(store: DatabaseStore, database: Database) -> None:
    old = identity_of(check_identity(store))
    first, second = (replace(old, checked_at=old.checked_at + LATER * count) for count in (2, 1))

    with database.engine.begin() as connection:
        store_identity.renew(connection, TABLES, old, first)
        store_identity.renew(connection, TABLES, old, second)

    assert [(row.number, row.checked_at) for row in database.rows(META)] == [(2, first.checked_at)]


def test_an_identity_written_during_a_check_is_not_of_a_longer_log(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DatabaseStore(postgresql.engine, ob.configuration)
    identity = identity_of(check_identity(store))
    read_server = store_identity.read_server

    def overtaken(*given: Any, **settings: Any) -> DatabaseIdentity:
        now = read_server(*given, **settings)
        with postgresql.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE longer_log AS SELECT generate_series(1, 10000)")
        with postgresql.engine.begin() as connection:
            store_identity.renew(
                connection, TABLES, identity, read_server(connection, TABLES, "test", reads_server=True)
            )
        return now

    monkeypatch.setattr(store_identity, "read_server", overtaken)

    assert check_identity(store, identity).suspended is None


def test_a_missing_identity_suspends_every_dispatcher(store: DatabaseStore, database: Database) -> None:
    known = identity_of(check_identity(store))
    database.execute(sa.delete(META))

    assert str(check_identity(store, known).suspended).startswith(
        "the database has no identity, although identity 1 of "
    )
    assert check_identity(store).suspended == check_identity(store, known).suspended  # also one that remembers nothing


def test_an_identity_older_than_the_remembered_suspends_all_dispatchers(
    store: DatabaseStore, database: Database
) -> None:
    identity = identity_of(check_identity(store))

    assert "an older state was restored" in str(
        check_identity(store, replace(identity, checked_at=identity.checked_at + LATER, number=2)).suspended
    )
    assert "an older state was restored" in str(check_identity(store).suspended)
    assert database.rows(META)[0].checked_at == identity.checked_at  # doubt will count from there


def test_an_identity_renewed_after_the_loss_does_not_bound_its_time(store: DatabaseStore, database: Database) -> None:
    """By a dispatcher that remembers nothing, and looked first."""
    identity = identity_of(check_identity(store))

    assert "an older state was restored" in str(
        check_identity(store, replace(identity, checked_at=identity.checked_at - LATER, number=2)).suspended
    )

    assert database.rows(META)[0].checked_at is None  # so `resume` asks for it


def test_a_suspension_that_an_operator_has_ended_is_not_stored_again(store: DatabaseStore, database: Database) -> None:
    identity = identity_of(check_identity(store))
    database.execute(sa.update(META).values(resumed_at=identity.checked_at))

    with database.engine.begin() as connection:
        store_identity.suspend(connection, TABLES, identity, "restored")

    assert database.rows(META)[0].suspended_reason is None


def test_a_copied_file_is_another_place(sqlite: Database, ob: outbox.Outbox, tmp_path: Path) -> None:
    check_identity(DatabaseStore(sqlite.engine, ob.configuration))
    sqlite.dispose()
    copy = Database(sqlite.url.set(database=str(shutil.copy(str(sqlite.url.database), tmp_path / "copy.db"))))

    assert "the tables have changed, file " in str(
        check_identity(DatabaseStore(copy.engine, ob.configuration)).suspended
    )

    copy.dispose()


def test_a_server_with_fewer_rights_is_guarded_by_what_it_does_report(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    role = f"poor_{os.getpid()}"
    with postgresql.engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role}")
        connection.exec_driver_sql(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
        connection.exec_driver_sql("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
    engine = postgresql.new_engine(connect_args={"options": f"-c role={role}"})
    store = DatabaseStore(engine, ob.configuration)

    with caplog.at_level(logging.WARNING):
        first, again = check_identity(store), check_identity(store)

    assert first == again
    assert (identity_of(first).system_identifier, identity_of(first).timeline, identity_of(first).lsn) == (
        None,
        None,
        None,
    )
    assert identity_of(first).place is not None
    assert [record.getMessage() for record in caplog.records] == [
        "this role may not read the server's system identifier, timeline and log position, so failovers, and some restores"
        " and copies, are not detected"
    ]
    engine.dispose()
    with postgresql.engine.begin() as connection:
        connection.exec_driver_sql("GRANT EXECUTE ON FUNCTION pg_control_system() TO PUBLIC")
        connection.exec_driver_sql(f"DROP OWNED BY {role}")
        connection.exec_driver_sql(f"DROP ROLE {role}")


# --- what a suspension prevents


def test_the_late_answer_of_a_check_does_not_replace_a_later_check(
    store: DatabaseStore, database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = FailoverGuard(store, env=lambda: "test", clock=time.monotonic, file=None)

    async def main() -> None:
        await guard.refresh()
        late = await begun_and_held(guard.refresh, DatabaseStore, "check_identity", monkeypatch)
        hold(database)
        await guard.refresh()
        await late()

    asyncio.run(main())

    assert guard.suspended == "restored"


def test_a_slow_identity_file_does_not_hide_a_later_suspension(
    store: DatabaseStore, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = FailoverGuard(store, env=lambda: "test", clock=time.monotonic, file=IdentityFile(tmp_path / "identity"))

    async def main() -> None:
        begun, end = threading.Event(), threading.Event()

        def write(file: IdentityFile, identity: DatabaseIdentity) -> None:
            begun.set()
            end.wait(60)

        monkeypatch.setattr(IdentityFile, "write", write)
        slow = asyncio.create_task(guard.refresh())
        await asyncio.to_thread(begun.wait, 60)
        hold(database)
        await guard.refresh()
        end.set()
        await slow

    asyncio.run(main())

    assert guard.suspended == "restored"


def test_nothing_is_claimed_where_the_known_identity_is_missing(
    store: DatabaseStore, database: Database, ob: outbox.Outbox
) -> None:
    put_one(database, ob)
    seen = identity_of(check_identity(store)).number
    database.execute(sa.delete(META))

    assert claim(store, seen=seen) == []


def test_nothing_is_cancelled_while_every_dispatcher_holds(
    store: DatabaseStore, database: Database, ob: outbox.Outbox
) -> None:
    id = put_one(database, ob)
    check_identity(store)
    hold(database)

    with database.begin() as session:
        assert not ob.cancel(session, id)
    saying = (
        f"entry {id} is pending: sending is suspended and the database may have lost the record of a send: run `outbox resume"
        " --after-restore` first"
    )
    with pytest.raises(DecisionRefused, match=saying), database.engine.begin() as connection:
        decisions.cancel(connection, TABLES, id, actor="ada", reason="asked")
    database.execute(sa.update(META).values(suspended_reason=None))
    with database.begin() as session:
        assert ob.cancel(session, id)


# --- the dispatcher


def test_run_once_raises_the_reason_for_a_suspension_and_the_way_out(database: Database, ob: outbox.Outbox) -> None:
    service = MemoryAdapter()
    run_once(database, ob, adapters={"crm": service})
    put_one(database, ob)
    hold(database, "the server has changed")

    with pytest.raises(Suspended) as caught:
        run_once(database, ob, adapters={"crm": service})

    assert str(caught.value) == (
        "sending is suspended in every dispatcher of this database: the server has changed; see `outbox status`, then resume"
        " with `outbox resume --after-restore`"
    )
    assert service.deliveries == []


def test_a_dispatcher_at_work_stays_up_while_suspended_and_then_resumes(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.pipeline.claim_loops.SWEEP_SECONDS", 0.0)
    caplog.set_level(logging.WARNING, "outbox.dispatcher")

    def logged(text: str) -> Callable[[], bool]:
        return lambda: any(text in record.getMessage() for record in caplog.records)

    async def main() -> None:
        working = dispatcher(database, ob, adapters={"crm": MemoryAdapter()})
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        put_one(database, ob)
        await until_true(lambda: states(database)["delivered"] == 1)
        hold(database, "the disk was lost")
        await until_true(logged("sending suspended in every dispatcher: the disk was lost"))
        put_one(database, ob)
        database.execute(sa.update(META).values(suspended_reason=None))
        await until_true(logged("sending resumed by an operator"))
        await until_true(lambda: states(database)["delivered"] == 2)
        stopping.set()
        await pump
        await working.close()

    asyncio.run(main())

    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
