"""Requests with another request's key are counted for operators, apart from the transaction that is refused."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support.database import REQUEST, TABLES, Database
from support.hints import TEST_TIMEOUT, driver_url, listening, wait_for

import outbox
from outbox import migrations
from outbox.errors import RequestMismatch
from outbox.sessions import hint_sender, hints
from outbox.sql.postgresql.mismatch_counts import CountTables, statements

pytestmark = [pytest.mark.as_app, pytest.mark.sends_hints]

OTHER = {"customer": "ada", "amount": 13}
KEY = "key-00001"


def answer(database: Database, ob: outbox.Outbox, key: str = KEY, content: Any = REQUEST) -> None:
    with database.begin() as session:
        ob.run_idempotent(session, key, lambda claim: claim.respond(201, {}), scope="ada", content=content)


def mismatches(database: Database) -> dict[str, int]:
    """How many are counted, by the key."""
    mismatch, record = TABLES.mismatch, TABLES.record
    joined = sa.select(record.c.parent, mismatch.c.requests).join(record, record.c.id == mismatch.c.id)
    with database.observer.connect() as connection:
        return {row.parent: row.requests for row in connection.execute(joined)}


def until_counted(database: Database, expected: dict[str, int]) -> None:
    wait_for(lambda: mismatches(database) == expected)


# --- every way to claim a key


def by_idempotent(database: Database, ob: outbox.Outbox) -> None:
    answer(database, ob, content=OTHER)


def by_idempotent_caught(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session:
        try:
            with ob.idempotent(session, KEY, scope="ada", content=OTHER):
                pass
        except RequestMismatch as error:
            mismatch = error
    raise mismatch


def by_lease(database: Database, ob: outbox.Outbox) -> None:
    with ob.leased(database.engine, KEY, scope="ada", content=OTHER):
        pass


def by_async_session(driver: str) -> Callable[[Database, outbox.Outbox], None]:
    async def run(database: Database, ob: outbox.Outbox) -> None:
        engine = create_async_engine(database.url.set(drivername=f"postgresql+{driver}"))
        try:
            async with (
                AsyncSession(engine) as session,
                session.begin(),
                ob.idempotent(session, KEY, scope="ada", content=OTHER),
            ):
                pass
        finally:
            await asyncio.to_thread(wait_for, lambda: mismatches(database) != {})
            await engine.dispose()

    return lambda database, ob: asyncio.run(run(database, ob))


WAYS: dict[str, Callable[[Database, outbox.Outbox], None]] = {
    "idempotent": by_idempotent,
    "idempotent, caught": by_idempotent_caught,
    "leased": by_lease,
    "psycopg, async": by_async_session("psycopg"),
    "asyncpg": by_async_session("asyncpg"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_request_with_anothers_key_is_counted(postgresql: Database, ob: outbox.Outbox, way: str) -> None:
    answer(postgresql, ob)
    answer(postgresql, ob, "key-00002")

    with pytest.raises(RequestMismatch):
        WAYS[way](postgresql, ob)

    until_counted(postgresql, {KEY: 1})
    (row,) = postgresql.rows(TABLES.mismatch)
    assert row.first_at == row.last_at


def test_a_request_with_the_key_of_a_lease_is_counted(postgresql: Database, ob: outbox.Outbox) -> None:
    with ob.leased(postgresql.engine, KEY, scope="ada", content=REQUEST) as claim:
        with pytest.raises(RequestMismatch):
            by_lease(postgresql, ob)
        with pytest.raises(RequestMismatch):
            by_idempotent(postgresql, ob)
        with postgresql.begin() as session, claim.fence(session) as fence:
            fence.respond(201, {})

    until_counted(postgresql, {KEY: 2})


def test_the_same_request_and_an_expired_key_are_not_counted(postgresql: Database, ob: outbox.Outbox) -> None:
    answer(postgresql, ob, "key-00002")
    answer(postgresql, ob, "key-00002")
    postgresql.age_records(timedelta(days=30))
    answer(postgresql, ob)
    answer(postgresql, ob, "key-00002", OTHER)
    with pytest.raises(RequestMismatch):
        by_idempotent(postgresql, ob)

    until_counted(postgresql, {KEY: 1})


# --- apart from the business transaction


def test_nothing_is_counted_in_the_business_transaction(postgresql: Database, ob: outbox.Outbox) -> None:
    answer(postgresql, ob)
    seen: list[str] = []
    sa.event.listen(postgresql.engine, "before_cursor_execute", lambda *given: seen.append(given[2]))

    with pytest.raises(RequestMismatch):
        by_idempotent(postgresql, ob)

    until_counted(postgresql, {KEY: 1})
    assert seen
    assert not [statement for statement in seen if "mismatch" in statement]


def test_mismatches_of_a_moment_are_one_transaction(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed = seen_by_the_sender(monkeypatch)
    monkeypatch.setattr(hint_sender, "COUNT_SECONDS", 0.5)
    for key in ("key-00001", "key-00002"):
        answer(postgresql, ob, key)
    for _ in range(10):
        for key in ("key-00001", "key-00002"):
            with pytest.raises(RequestMismatch):
                answer(postgresql, ob, key, OTHER)

    until_counted(postgresql, {"key-00001": 10, "key-00002": 10})
    assert len(executed) < 10


def seen_by_the_sender(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that store counts, as they are executed."""
    executed: list[str] = []
    execute = hint_sender._Link.execute

    def see(link: Any, statements: Any) -> None:
        executed.extend(statement for statement in statements if statement.startswith("INSERT"))
        execute(link, statements)

    monkeypatch.setattr(hint_sender._Link, "execute", see)
    return executed


def test_what_is_counted_when_the_process_ends_is_stored(postgresql: Database, ob: outbox.Outbox) -> None:
    answer(postgresql, ob)
    with pytest.raises(RequestMismatch):
        by_idempotent(postgresql, ob)
    until_counted(postgresql, {KEY: 1})
    for _ in range(3):
        with pytest.raises(RequestMismatch):
            by_idempotent(postgresql, ob)

    sender = hints.sender_of(postgresql.engine)
    assert sender is not None
    sender.stop()
    sender.join(TEST_TIMEOUT)

    assert mismatches(postgresql) == {KEY: 4}


def test_no_hint_and_no_request_waits_for_a_lock_on_the_counts(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hint_sender, "RETRY_SECONDS", (0.0, 0.0))
    answer(postgresql, ob)
    with postgresql.observer.connect() as migration, listening(postgresql) as ear:
        migration.execute(sa.text("LOCK TABLE outbox_mismatch"))
        with pytest.raises(RequestMismatch):
            by_idempotent(postgresql, ob)
        wait_for(lambda: "cannot count mismatched requests" in caplog.text)
        with Session(postgresql.engine) as session, session.begin():
            ob.enqueue(session, "crm.upsert", {}, parent="order:1")
        assert ear.next().due == frozenset({("crm", "crm.upsert")})

    until_counted(postgresql, {KEY: 1})
    wait_for(lambda: "can be counted again" in caplog.text)


def test_a_count_that_met_a_lock_is_not_tried_twice_at_once(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Hints wait for it."""
    monkeypatch.setattr(hint_sender, "RETRY_SECONDS", (600.0, 600.0))
    monkeypatch.setattr(hint_sender, "COUNT_SECONDS", 0.0)
    executed = seen_by_the_sender(monkeypatch)
    answer(postgresql, ob)
    with pytest.raises(RequestMismatch):
        by_idempotent(postgresql, ob)
    until_counted(postgresql, {KEY: 1})
    executed.clear()

    with postgresql.observer.connect() as migration:
        migration.execute(sa.text("LOCK TABLE outbox_mismatch"))
        with pytest.raises(RequestMismatch):
            by_idempotent(postgresql, ob)
        wait_for(lambda: "cannot count mismatched requests" in caplog.text)

    assert len(executed) == 1


def test_no_hint_is_dropped_for_many_counts(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hint_sender, "MAX_WAITING", 3)
    is_storing, may_store, execute = Event(), Event(), hint_sender._Link.execute

    def late(link: Any, statements: Any) -> None:
        if len(statements) > 1:
            is_storing.set()
            assert may_store.wait(TEST_TIMEOUT)
        execute(link, statements)

    monkeypatch.setattr(hint_sender._Link, "execute", late)
    answer(postgresql, ob)
    with pytest.raises(RequestMismatch):
        by_idempotent(postgresql, ob)
    assert is_storing.wait(TEST_TIMEOUT)
    for _ in range(10):
        with pytest.raises(RequestMismatch):
            by_idempotent(postgresql, ob)

    with listening(postgresql) as ear:
        with postgresql.begin() as session:
            ob.enqueue(session, "crm.upsert", {}, parent="order:1")
        may_store.set()
        assert ear.next().due == frozenset({("crm", "crm.upsert")})

    until_counted(postgresql, {KEY: 11})


@pytest.mark.owner
def test_a_schema_without_the_table_keeps_back_no_other(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hint_sender, "COUNT_SECONDS", 0.5)
    executed = seen_by_the_sender(monkeypatch)
    postgresql.execute(sa.text("CREATE SCHEMA tenant"))
    migrations.upgrade(postgresql.observer, schema="tenant")
    postgresql.execute(sa.text("DROP TABLE tenant.outbox_mismatch"))
    tenant = outbox.Outbox(ob.configuration.keyring, env="test", schema="tenant")
    answer(postgresql, tenant)
    answer(postgresql, ob)
    with pytest.raises(RequestMismatch):
        by_idempotent(postgresql, tenant)
    wait_for(lambda: "tenant.outbox_mismatch" in "".join(executed))

    with pytest.raises(RequestMismatch):
        by_idempotent(postgresql, ob)

    until_counted(postgresql, {KEY: 1})


def test_a_role_that_reads_only_by_default_counts(postgresql: Database, ob: outbox.Outbox) -> None:
    """Its app asks for each transaction that writes."""
    answer(postgresql, ob)
    settings: Any = {"execution_options": {"postgresql_readonly": False}}
    engine = postgresql.new_engine(connect_args={"options": "-c default_transaction_read_only=on"}, **settings)

    with pytest.raises(RequestMismatch), Session(engine) as session, session.begin():
        ob.run_idempotent(session, KEY, lambda claim: claim.respond(201, {}), scope="ada", content=OTHER)

    until_counted(postgresql, {KEY: 1})


def test_who_deletes_counted_records_loses_no_deadlock(postgresql: Database, ob: outbox.Outbox) -> None:
    """Half of PostgreSQL's default until it searches for a deadlock is more than enough."""
    for key in ("key-00001", "key-00002"):
        answer(postgresql, ob, key)
        with pytest.raises(RequestMismatch):
            answer(postgresql, ob, key, OTHER)
    until_counted(postgresql, {"key-00001": 1, "key-00002": 1})
    first, second = sorted(row.id for row in postgresql.rows(TABLES.record))
    names = CountTables("outbox_mismatch", "outbox_record")
    failures: list[BaseException] = []

    def count() -> None:
        try:
            with psycopg.connect(driver_url(postgresql), autocommit=True) as connection:
                for statement in statements(names, {first: 1, second: 1}):
                    connection.execute(statement)
        except psycopg.Error as error:
            failures.append(error)

    delete = "DELETE FROM outbox_record WHERE id = %s"
    with psycopg.connect(driver_url(postgresql)) as maintenance:
        maintenance.execute("SET LOCAL deadlock_timeout = '500ms'")
        maintenance.execute(delete, [second])
        counting = Thread(target=count)
        counting.start()
        wait_for(lambda: bool(failures) or has_lock(postgresql, maintenance.info.backend_pid))
        maintenance.execute(delete, [first])
        maintenance.commit()
        counting.join(TEST_TIMEOUT)

    assert [type(failure) for failure in failures] == [psycopg.errors.LockNotAvailable]


def has_lock(database: Database, pid: int) -> bool:
    """Whether another transaction waits for this one."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE :pid = ANY (pg_blocking_pids(pid))"
    with database.observer.connect() as connection:
        return bool(connection.execute(sa.text(waiting), {"pid": pid}).scalar_one())


def test_the_sender_forgets_connections_that_were_in_use_before(postgresql: Database, ob: outbox.Outbox) -> None:
    """The server may give their numbers to later ones, such as the sender's own."""
    engine = postgresql.new_engine(poolclass=sa.NullPool)
    answer(postgresql, ob)
    with pytest.raises(RequestMismatch), Session(engine) as session, session.begin():
        ob.run_idempotent(session, KEY, lambda claim: claim.respond(201, {}), scope="ada", content=OTHER)
    until_counted(postgresql, {KEY: 1})

    sender = hints.sender_of(engine)
    assert sender is not None
    assert sender._link.is_open
    assert sender._link.taken == set()


def test_requests_are_refused_as_ever_before_the_migration(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    answer(postgresql, ob)
    postgresql.execute(sa.text("DROP TABLE outbox_mismatch"))

    with pytest.raises(RequestMismatch):
        by_idempotent(postgresql, ob)

    wait_for(lambda: "cannot count mismatched requests" in caplog.text)
    assert "UndefinedTable" in caplog.text


# --- where nothing is counted


def test_an_outbox_without_hints_counts_nothing(postgresql: Database, ob: outbox.Outbox) -> None:
    quiet = outbox.Outbox(ob.configuration.keyring, env="test", hints=False)
    answer(postgresql, quiet)

    with pytest.raises(RequestMismatch):
        by_idempotent(postgresql, quiet)

    assert postgresql.engine.pool not in hints._senders


def test_on_sqlite_nothing_is_counted(sqlite: Database, ob: outbox.Outbox) -> None:
    answer(sqlite, ob)

    with pytest.raises(RequestMismatch):
        by_idempotent(sqlite, ob)

    assert sqlite.engine.pool not in hints._senders


# --- with the record


def test_the_count_goes_with_its_record(postgresql: Database, ob: outbox.Outbox) -> None:
    answer(postgresql, ob)
    with pytest.raises(RequestMismatch):
        by_idempotent(postgresql, ob)
    until_counted(postgresql, {KEY: 1})

    postgresql.execute(sa.delete(TABLES.record))

    assert postgresql.rows(TABLES.mismatch) == []
