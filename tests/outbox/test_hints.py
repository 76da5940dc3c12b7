"""The hint of an app to the dispatchers after a commit: which commits send one, and which do not."""

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support.database import REQUEST, Database
from support.hints import CRM, TEST_TIMEOUT, by_connection, by_session, enqueue, listening, wait_for

import outbox
from outbox.sessions import hint_sender, hints

pytestmark = pytest.mark.sends_hints


@pytest.fixture(autouse=True)
def no_other_senders() -> None:
    """A process has a limited number of senders, and other tests' engines may have them all."""
    hints._stop_all()
    hints._senders.clear()


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
