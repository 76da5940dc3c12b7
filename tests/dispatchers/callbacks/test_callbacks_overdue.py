"""Callbacks whose transaction does not come to its end: they take too long, or the database ends it."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from support.callbacks import Shop, warnings_in
from support.database import TABLES, Database
from support.entries import HOUR, age, put, put_one, queue_row, reasons, states

import outbox
from dispatchers import Operations
from dispatchers.adapters import MemoryAdapter
from dispatchers.callbacks import Settlement
from dispatchers.stored_outcome import read_outcome

SHORT = timedelta(seconds=0.3)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Set at the end, so that no callback hangs beyond its test."""
    event = threading.Event()
    yield event
    event.set()


def sleep_in_python(session: Session, released: threading.Event) -> None:
    released.wait(60)


def sleep_in_a_statement(session: Session, released: threading.Event) -> None:
    session.execute(sa.text("SELECT pg_sleep(60)"))


def ask_until_released(session: Session, released: threading.Event) -> None:
    while not released.wait(0.01):
        session.execute(sa.text("SELECT 1"))


def open_transactions(database: Database) -> int:
    """Of other sessions, with a transaction that holds the vacuum's horizon back."""
    open_elsewhere = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_xid IS NOT NULL"
    )
    with database.engine.connect() as connection:
        count: int = connection.execute(open_elsewhere).scalar_one()
    return count


@pytest.mark.parametrize("hang", [sleep_in_python, sleep_in_a_statement, ask_until_released])
def test_an_overdue_sync_callback_is_given_up_and_its_transaction_ended(
    postgresql: Database,
    ob: outbox.Outbox,
    caplog: pytest.LogCaptureFixture,
    released: threading.Event,
    hang: Callable[[Session, threading.Event], None],
) -> None:
    id = put_one(postgresql, ob)
    shop, adapter = Shop(postgresql, ob, is_async=False), MemoryAdapter(window=None)

    def work(session: Session, settlement: Settlement) -> None:
        shop.pay(session, settlement)
        session.flush()
        if len(shop.seen) == 1:
            hang(session, released)

    shop.on_settled(work)
    shop.run_once(adapters={"crm": adapter}, callback_timeout=timedelta(seconds=2))

    known = read_outcome(queue_row(postgresql, id).outcome).known
    assert known is not None
    assert known.state == "delivered"
    latest = time.monotonic() + 60
    while open_transactions(postgresql) and time.monotonic() < latest:
        time.sleep(0.02)
    assert open_transactions(postgresql) == 0
    assert reasons(postgresql, id) == ["delivered, but its callback took longer than 2 s"]
    (line,) = warnings_in(caplog)
    assert "took longer than 2 s, its deadline; its transaction is rolled back" in line
    assert hang.__name__ in line, "where it hangs"
    assert "the callback is tried again in" in line
    age(postgresql, HOUR)
    shop.run_once(adapters={"crm": adapter})
    assert states(postgresql) == {"delivered": 1, "pending": 1}
    assert len(adapter.deliveries) == len(postgresql.orders) == 1


def test_callbacks_that_hang_use_up_neither_the_workers_nor_the_pool(
    database: Database, ob: outbox.Outbox, released: threading.Event
) -> None:
    put(database, ob, count=5)
    shop = Shop(database, ob, is_async=False)

    def work(session: Session, settlement: Settlement) -> None:
        if len(shop.seen) <= 4:
            sleep_in_python(session, released)

    shop.on_settled(work)
    engine = database.new_engine(poolclass=sa.QueuePool, pool_size=2, max_overflow=1, pool_timeout=60)
    limits = {"callback_concurrency": 2, "callback_timeout": timedelta(seconds=1)}
    working = shop.dispatcher(engine, adapters={"crm": MemoryAdapter()}, **limits)

    asyncio.run(asyncio.wait_for(working.run_once(), 120))

    assert states(database) == {"retry": 4, "delivered": 1}


@pytest.mark.differs("portable", "no other connection can end its transaction, as on SQLite")
@pytest.mark.parametrize("listens", [True, False])
def test_an_async_callback_that_is_overdue_is_cancelled(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, listens: bool
) -> None:
    if database.name == "sqlite" and not listens:
        pytest.skip("no other connection can end a transaction of SQLite's")
    id = put_one(database, ob)
    effects, adapter, calls = Operations(), MemoryAdapter(window=None), [0]

    @effects.on_settled("crm")
    async def settled(session: AsyncSession, settlement: Settlement) -> None:
        calls[0] += 1
        await session.execute(sa.text("SELECT 1"))
        if calls[0] == 1:
            for _ in range(1 if listens else 3):
                with suppress(() if listens else asyncio.CancelledError):  # type: ignore[arg-type]
                    await asyncio.sleep(60)

    shop = Shop(database, ob, is_async=True)
    shop.effects = effects
    shop.run_once(adapters={"crm": adapter}, callback_timeout=SHORT)
    assert reasons(database, id) == ["delivered, but its callback took longer than 0.3 s"]
    age(database, HOUR)
    shop.run_once(adapters={"crm": adapter})

    assert (states(database), len(adapter.deliveries), calls) == ({"delivered": 1}, 1, [2])
    assert "settled took longer than 0.3 s, its deadline" in warnings_in(caplog)[0]


# --- the database ends it


def end_the_connection(session: Session, database: Database) -> None:
    pid = session.scalar(sa.text("SELECT pg_backend_pid()"))
    database.execute(sa.text("SELECT pg_terminate_backend(:pid)").bindparams(pid=pid))


def raise_code(code: str) -> Callable[[Session, Database], None]:
    def work(session: Session, database: Database) -> None:
        session.execute(sa.text(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END $$"))

    return work


def catch_and_raise_another(session: Session, database: Database) -> None:
    try:
        end_the_connection(session, database)
        session.execute(sa.text("SELECT 1"))
    except sa.exc.DBAPIError as error:
        raise RuntimeError("what the app makes of it") from error


PASSING: dict[str, Callable[[Session, Database], None]] = {
    "the connection is ended": end_the_connection,
    "the app makes another error of it": catch_and_raise_another,
    "deadlock": raise_code("40P01"),
    "serialization": raise_code("40001"),
    "lock timeout": raise_code("55P03"),
    "disk full": raise_code("53100"),
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", PASSING)
def test_what_the_database_did_to_a_callback_is_no_failure_of_it(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, name: str, is_async: bool
) -> None:
    put_one(postgresql, ob)
    shop, adapter = Shop(postgresql, ob, is_async=is_async), MemoryAdapter()

    def work(session: Session, settlement: Settlement) -> None:
        shop.pay(session, settlement)
        if len(shop.seen) == 1:
            PASSING[name](session, postgresql)

    shop.on_settled(work)

    assert shop.run_once(adapters={"crm": adapter}) == 1

    assert states(postgresql) == {"delivered": 1, "pending": 1}
    assert len(adapter.deliveries) == len(postgresql.orders) == 1
    assert postgresql.rows(TABLES.event) == []
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(
    "error",
    [
        sa.exc.OperationalError("", {}, Exception("gone"), connection_invalidated=True),
        ConnectionRefusedError(),
        sa.exc.TimeoutError(),
    ],
    ids=repr,
)
def test_what_another_database_does_to_a_callback_is_its_own_failure(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, error: Any
) -> None:
    put_one(database, ob)
    shop = Shop(database, ob, is_async=False)

    def work(session: Session, settlement: Settlement) -> None:
        raise error

    shop.on_settled(work)
    shop.run_once(adapters={"crm": MemoryAdapter()})

    assert f"its callback raised {type(error).__name__}" in warnings_in(caplog)[0]
