"""The hint of an app after a commit: which commits send one, by which thread, and that no commit fails or waits for it."""

import asyncio
import gc
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support.database import REQUEST, Database
from support.hints import (
    CRM,
    TEST_TIMEOUT,
    by_connection,
    by_session,
    commit_on,
    driver_url,
    enqueue,
    listening,
    senders,
    wait_for,
)

import outbox
from outbox.sessions import hint_sender, hints
from outbox.sql.postgresql.hint_messages import Hint

pytestmark = pytest.mark.sends_hints


@pytest.fixture(autouse=True)
def no_other_senders() -> None:
    """A process has a limited number of senders, and other tests' engines may have them all."""
    hints._stop_all()
    hints._senders.clear()


def test_a_sender_keeps_to_one_connection(postgresql: Database, ob: outbox.Outbox) -> None:
    with listening(postgresql) as ear:
        by_session(postgresql, ob)
        ear.next()
        pids = {backend_of_hints(postgresql)}
        with postgresql.begin() as session:
            enqueue(session, ob, parent="order:2")
        ear.next()

    assert pids == {backend_of_hints(postgresql)}


def backend_of_hints(database: Database) -> int | None:
    with database.observer.connect() as connection:
        found = connection.execute(
            sa.text(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%pg_notify%'"
                " AND pid <> pg_backend_pid()"
            )
        )
        pid: int | None = found.scalar_one_or_none()
        return pid


@pytest.mark.parametrize("ending", ["disposed", "forgotten"])
def test_a_sender_ends_with_its_engine(postgresql: Database, ob: outbox.Outbox, ending: str) -> None:
    engine = sa.create_engine(postgresql.url, poolclass=sa.NullPool)  # none stays open when it is forgotten
    with listening(postgresql) as ear:
        commit_on(engine, ob)
        ear.next()
    thread = hints.sender_of(engine)._thread

    if ending == "disposed":
        engine.dispose()
    del engine

    for _ in range(60):  # the thread may still use the engine at the first collection
        gc.collect()  # what SQLAlchemy has made of the engine goes in circles
        thread.join(1)
        if not thread.is_alive():
            break
    assert not thread.is_alive()
    wait_for(lambda: backend_of_hints(postgresql) is None)


def test_a_process_of_many_engines_has_few_senders(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None is replaced: the thread of one that was would still be there for a moment.
    monkeypatch.setattr(hints, "SENDER_RESTS_SECONDS", 600)
    engines = [sa.create_engine(postgresql.url, poolclass=sa.NullPool) for _ in range(hints.MAX_SENDERS + 4)]
    for number, engine in enumerate(engines):
        commit_on(engine, ob, f"order:{number}")

    found = len(senders())
    for engine in engines:
        engine.dispose()
    assert found <= hints.MAX_SENDERS
    assert len(postgresql.entries) == len(engines)


def test_a_new_engine_takes_the_sender_that_has_rested_longest(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an app that makes an engine for each task: the earlier ones are not collected yet."""
    monkeypatch.setattr(hints, "MAX_SENDERS", 2)
    monkeypatch.setattr(hints, "SENDER_RESTS_SECONDS", 0.0)
    engines = [sa.create_engine(postgresql.url, poolclass=sa.NullPool) for _ in range(4)]
    with listening(postgresql) as ear:
        for number, engine in enumerate([*engines, engines[0]]):
            commit_on(engine, ob, f"order:{number}")
            assert ear.next().due == CRM
    assert list(hints._senders) == [engines[3].pool, engines[0].pool]
    wait_for(lambda: len(senders()) == 2)
    for engine in engines:
        engine.dispose()


def test_a_connection_that_was_ended_is_replaced(postgresql: Database, ob: outbox.Outbox) -> None:
    with listening(postgresql) as ear:
        by_session(postgresql, ob)
        ear.next()
        with postgresql.observer.connect() as connection:
            connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": backend_of_hints(postgresql)})
        with postgresql.begin() as session:
            enqueue(session, ob, parent="order:2")

        assert ear.next().due == CRM


class Troubled:
    """Makes an engine's connections; those of the thread that sends hints are refused, or hang until `released` is set."""

    def __init__(self, url: str, *, hangs: bool) -> None:
        self.url, self.hangs = url, hangs
        self.released, self.asked = threading.Event(), threading.Event()

    def connect(self) -> Any:
        if threading.current_thread().name == "outbox-hints":
            self.asked.set()
            if self.hangs:
                self.released.wait(TEST_TIMEOUT)
            raise psycopg.OperationalError("refused")
        return psycopg.connect(self.url)


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "is refused"])
def test_no_commit_waits_for_a_connection_that(
    postgresql: Database, ob: outbox.Outbox, hangs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    troubled = Troubled(driver_url(postgresql, postgresql.url), hangs=hangs)
    engine = sa.create_engine("postgresql+psycopg://", creator=troubled.connect)
    try:
        for number in range(hint_sender.MAX_WAITING // 200):
            commit_on(engine, ob, f"order:{number}")
            assert troubled.asked.wait(TEST_TIMEOUT)

        assert len(postgresql.entries) == hint_sender.MAX_WAITING // 200
        assert hints.sender_of(engine)._thread.is_alive()
    finally:
        troubled.released.set()
        wait_for(lambda: "cannot send hints" in caplog.text)
        engine.dispose()
    assert caplog.text.count("cannot send hints") == 1


def test_senders_that_cannot_end_are_few(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an app that makes an engine for each task, while the server lets the senders' connections wait."""
    monkeypatch.setattr(hints, "MAX_SENDERS", 1)
    monkeypatch.setattr(hints, "MAX_THREADS", 3)
    monkeypatch.setattr(hints, "SENDER_RESTS_SECONDS", 0.0)
    wait_for(lambda: not senders())
    troubled = Troubled(driver_url(postgresql, postgresql.url), hangs=True)
    engines = [sa.create_engine("postgresql+psycopg://", creator=troubled.connect) for _ in range(6)]
    try:
        for number, engine in enumerate(engines):
            commit_on(engine, ob, f"task:{number}")

        assert len(senders()) == 3
        assert len(postgresql.entries) == len(engines)
    finally:
        troubled.released.set()
        for engine in engines:
            engine.dispose()
    wait_for(lambda: len(senders()) <= 1)
    with listening(postgresql) as ear:
        by_session(postgresql, ob)
        assert ear.next().due == CRM


def test_an_engine_does_not_keep_a_sender_that_has_ended(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a process that uses more engines in turn than it has senders would keep every sender of its life."""
    monkeypatch.setattr(hints, "MAX_SENDERS", 1)
    monkeypatch.setattr(hints, "SENDER_RESTS_SECONDS", 0.0)
    engines = [sa.create_engine(postgresql.url, poolclass=sa.NullPool) for _ in range(2)]
    commit_on(engines[0], ob, "order:1")
    sender = weakref.ref(hints._senders[engines[0].pool])

    commit_on(engines[1], ob, "order:2")

    wait_for(lambda: sender() is None)
    for engine in engines:
        engine.dispose()


@pytest.mark.parametrize("way", [by_session, by_connection])
def test_a_commit_succeeds_where_no_thread_can_be_started(
    postgresql: Database,
    ob: outbox.Outbox,
    way: Callable[[Database, outbox.Outbox], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        way(postgresql, ob)

    assert len(postgresql.entries) == 1
    assert caplog.text.count("a hint to the dispatchers was not sent: RuntimeError") == 1
    hints.sender_of(postgresql.engine).join(0)  # as at the end of the process
    with listening(postgresql) as ear:
        with postgresql.begin() as session:
            enqueue(session, ob, "mail.send", "order:2")
        assert ear.next().due == CRM | {("mail", "mail.send")}


def test_a_hint_of_an_engine_that_was_disposed_of_is_no_trouble(
    postgresql: Database, caplog: pytest.LogCaptureFixture
) -> None:
    engine = sa.create_engine(postgresql.url, poolclass=sa.NullPool)
    sender = hint_sender.HintSender(engine)
    engine.dispose()
    gc.collect()

    sender.send("outbox", Hint(), taken=None)
    sender.stop()
    sender.join(TEST_TIMEOUT)

    assert "cannot send hints" not in caplog.text


def test_the_end_of_trouble_is_logged(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hint_sender, "RETRY_SECONDS", (0.0, 0.0))
    troubled = Troubled(driver_url(postgresql, postgresql.url), hangs=False)
    engine = sa.create_engine("postgresql+psycopg://", creator=lambda: troubled.connect())
    with listening(postgresql) as ear:
        commit_on(engine, ob)
        wait_for(lambda: "cannot send hints" in caplog.text)
        troubled.connect = lambda: psycopg.connect(troubled.url)  # type: ignore[method-assign]
        commit_on(engine, ob, "order:2")

        assert ear.next().due == CRM
    wait_for(lambda: "can be sent again" in caplog.text)
    engine.dispose()


def test_a_connection_that_the_app_uses_is_left_alone(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """A `creator` may hand out the one connection that a test, or another framework, works on."""
    with psycopg.connect(driver_url(postgresql, postgresql.url)) as shared:
        engine = sa.create_engine("postgresql+psycopg://", creator=lambda: shared, poolclass=sa.StaticPool)
        commit_on(engine, ob)
        shared.execute("CREATE TEMPORARY TABLE kept (id int)")  # in a transaction that is now open

        wait_for(lambda: "SharedConnection" in caplog.text)

        assert not shared.autocommit
        assert shared.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        shared.rollback()
        shared.execute("SELECT 1")


def test_a_fork_sends_over_a_connection_of_its_own(postgresql: Database, ob: outbox.Outbox) -> None:
    with listening(postgresql) as ear:
        by_session(postgresql, ob)
        ear.next()
        parents = backend_of_hints(postgresql)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
            pid = os.fork()
        if pid == 0:
            fork_and_commit(postgresql, ob)
        assert ear.next().due == frozenset({("child", "child.send")})
        assert os.waitpid(pid, 0)[1] == 0
        with postgresql.begin() as session:
            enqueue(session, ob, "parent.send", "order:3")

        assert ear.next().due == frozenset({("parent", "parent.send")})
        assert backend_of_hints(postgresql) == parents


def fork_and_commit(database: Database, ob: outbox.Outbox) -> None:
    try:
        database.engine.dispose(close=False)
        with database.begin() as session:
            enqueue(session, ob, "child.send", "order:2")
        hints.sender_of(database.engine).stop()
        hints.sender_of(database.engine).join(TEST_TIMEOUT)
        os._exit(0)
    finally:
        os._exit(1)


# --- The hint of an app to the dispatchers after a commit: which commits send one, and which do not.


def by_savepoint(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session, session.begin_nested():
        enqueue(session, ob)


def by_connection_without_transaction(database: Database, ob: outbox.Outbox) -> None:
    with database.engine.connect() as connection, Session(connection) as session, session.begin():
        enqueue(session, ob)


def by_idempotent_request(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session, ob.idempotent(session, "key-00001", scope="ada", content=REQUEST) as claim:
        enqueue(session, ob)
        claim.respond(201, {})


def by_inbox(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session, ob.inbox(session, consumer="billing", message_id="evt_1", scope="shop"):
        enqueue(session, ob)


def by_lease(database: Database, ob: outbox.Outbox) -> None:
    leased = ob.leased(database.engine, "key-00001", scope="ada", content=REQUEST)
    with leased as claim, database.begin() as session, claim.fence(session) as fence:
        enqueue(session, ob)
        fence.respond(201, {})


def by_async_session(driver: str) -> Callable[[Database, outbox.Outbox], None]:
    async def run(database: Database, ob: outbox.Outbox) -> None:
        engine = create_async_engine(database.url.set(drivername=f"postgresql+{driver}"))
        async with AsyncSession(engine) as session, session.begin():
            enqueue(session, ob)
        await asyncio.to_thread(wait_for, lambda: hints._senders[engine.sync_engine.pool]._sent_at > 0)
        await engine.dispose()

    return lambda database, ob: asyncio.run(run(database, ob))


WAYS: dict[str, Callable[[Database, outbox.Outbox], None]] = {
    "Session": by_session,
    "savepoint": by_savepoint,
    "joined connection": by_connection,
    "connection": by_connection_without_transaction,
    "idempotent": by_idempotent_request,
    "inbox": by_inbox,
    "lease": by_lease,
    "AsyncSession of psycopg": by_async_session("psycopg"),
    "AsyncSession of asyncpg": by_async_session("asyncpg"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_commit_sends_a_hint(postgresql: Database, ob: outbox.Outbox, way: str) -> None:
    with listening(postgresql) as ear:
        WAYS[way](postgresql, ob)

        assert ear.next().due == CRM


def test_a_hint_waits_for_its_own_transaction_only(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hint_sender, "MAX_COMMIT_SECONDS", TEST_TIMEOUT * 2)
    with listening(postgresql) as ear, postgresql.engine.connect() as connection:
        with connection.begin(), Session(connection, join_transaction_mode="create_savepoint") as session:
            enqueue(session, ob)
            session.commit()
        with connection.begin():  # at once: a batch continues
            assert ear.next().due == CRM


# --- only for what is committed and due


def roll_back(database: Database, ob: outbox.Outbox) -> None:
    with database.session() as session:
        enqueue(session, ob, "mail.send")
        session.flush()
        session.rollback()


def roll_a_savepoint_back(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session, session.begin_nested() as savepoint:
        enqueue(session, ob, "mail.send")
        with session.begin_nested():
            pass  # it writes what was enqueued before
        savepoint.rollback()


def roll_the_transaction_around_back(database: Database, ob: outbox.Outbox) -> None:
    with database.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session, session.begin():
            enqueue(session, ob, "mail.send")
        outer.rollback()
        with connection.begin():
            connection.execute(sa.text("SELECT 1"))


def enqueue_for_later(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session:
        enqueue(session, ob, "mail.send", due=timedelta(hours=1))
        enqueue(session, ob, "mail.send", "order:2", due=datetime.now(UTC) + timedelta(hours=1))


def enqueue_nothing(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session:
        session.execute(sa.text("SELECT 1"))


def enqueue_again(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session:
        enqueue(session, ob, "crm.upsert", "order:0", destination="mail", if_exists="ignore")


QUIET = [
    roll_back,
    roll_a_savepoint_back,
    roll_the_transaction_around_back,
    enqueue_for_later,
    enqueue_nothing,
    enqueue_again,
]


@pytest.mark.parametrize("quiet", QUIET, ids=lambda quiet: quiet.__name__)
def test_there_is_no_hint_for(postgresql: Database, ob: outbox.Outbox, quiet: Callable[..., None]) -> None:
    """The first hint to come is of the entry after it, and of that one alone."""
    with postgresql.begin() as session:
        enqueue(session, ob, parent="order:0", due=timedelta(hours=1))
    with listening(postgresql) as ear:
        quiet(postgresql, ob)
        by_session(postgresql, ob)

        assert ear.next().due == CRM


def test_what_was_due_in_the_past_is_hinted_at(postgresql: Database, ob: outbox.Outbox) -> None:
    with listening(postgresql) as ear:
        with postgresql.begin() as session:
            enqueue(session, ob, due=datetime.now(UTC) - timedelta(hours=1))

        assert ear.next().due == CRM


def test_nothing_is_notified_in_the_business_transaction(postgresql: Database, ob: outbox.Outbox) -> None:
    statements: list[str] = []

    @sa.event.listens_for(postgresql.engine, "before_cursor_execute")
    def see(connection: sa.Connection, cursor: Any, statement: str, *rest: Any) -> None:
        statements.append(statement)

    with listening(postgresql) as ear:
        by_session(postgresql, ob)
        ear.next()

    assert statements
    assert not [statement for statement in statements if "notify" in statement.lower()]


def test_an_outbox_without_hints_sends_none(postgresql: Database, ob: outbox.Outbox) -> None:
    silent = outbox.Outbox(ob.configuration.keyring, env="test", hints=False)
    with listening(postgresql) as ear:
        with postgresql.begin() as session:
            enqueue(session, silent, "mail.send")
        by_session(postgresql, ob)

        assert ear.next().due == CRM


def test_hints_of_a_moment_are_one(postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    moment = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: seconds and is_over.wait(60))
    with listening(postgresql) as ear:
        by_session(postgresql, ob)
        assert ear.next().due == CRM
        monkeypatch.setattr(hint_sender, "APART_SECONDS", 3600.0)
        monkeypatch.setattr(hint_sender, "time", moment)
        for number in range(20):
            with postgresql.begin() as session:
                enqueue(session, ob, f"d{number}.send", f"order:{number + 2}")
        is_over.set()

        assert ear.next().due == frozenset((f"d{number}", f"d{number}.send") for number in range(20))
