"""What the tests of hints share: a listener, engines that lead their hints another way, and a dispatcher that listens."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import psycopg
import sqlalchemy as sa
from sqlalchemy.orm import Session

import outbox
from dispatchers.process.dispatcher_work import DispatcherWork
from outbox.sql.postgresql.hint_messages import Hint, channel_of, decode
from support.database import Database
from support.entries import until_true

TEST_TIMEOUT = 60
SENDERS = "outbox-hints"
CRM = frozenset({("crm", "crm.upsert")})


class Ear:
    """Listens as a dispatcher does."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def next(self) -> Hint:
        """The next hint. Fails if none comes."""
        for notification in self._connection.notifies(timeout=TEST_TIMEOUT, stop_after=1):
            return decode(notification.payload)
        raise AssertionError("no hint has come")


@contextmanager
def listening(database: Database, *, schema: str | None = None, prefix: str = "outbox_") -> Iterator[Ear]:
    with psycopg.connect(driver_url(database), autocommit=True) as connection:
        connection.execute(f"LISTEN {channel_of(schema, prefix)}")
        yield Ear(connection)


def driver_url(database: Database, url: sa.URL | None = None) -> str:
    return (url or database.owners_url).set(drivername="postgresql").render_as_string(hide_password=False)


def elsewhere(database: Database) -> sa.Engine:
    """An engine of the same database whose URL does not say so: no dispatcher of another engine is woken directly."""
    url = driver_url(database, database.url)
    named = sa.URL.create("postgresql+psycopg", database=f"elsewhere {uuid4()}")  # no two are alike
    return database._create_engine(named, creator=lambda: psycopg.connect(url))


def senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == SENDERS]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TEST_TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.005)


def is_listening(working: DispatcherWork) -> bool:
    return working._loops._wakeup.is_listening


async def working_until(working: DispatcherWork, steps: Callable[[], Any]) -> None:
    """Let the dispatcher listen, then take the `steps`, then let it drain."""
    stopping = asyncio.Event()
    pump = asyncio.create_task(working.pump(stopping))
    try:
        await until_true(lambda: is_listening(working) or pump.done())
        await steps()
    finally:
        stopping.set()
        await pump
        await working.close()


def put_by(engine: sa.Engine, ob: outbox.Outbox, number: int, operation: str = "crm.upsert", **settings: Any) -> UUID:
    with Session(engine) as session, session.begin():
        return ob.enqueue(session, operation, {}, parent=f"order:{number}", **settings).id


def enqueue(
    session: Any, ob: outbox.Outbox, operation: str = "crm.upsert", parent: str = "order:1", **more: Any
) -> None:
    ob.enqueue(session, operation, {"amount": 1}, parent=parent, **more)


def commit_on(engine: sa.Engine, ob: outbox.Outbox, parent: str = "order:1") -> None:
    with Session(engine) as session, session.begin():
        enqueue(session, ob, parent=parent)


def by_session(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session:
        enqueue(session, ob)


def by_connection(database: Database, ob: outbox.Outbox) -> None:
    joined = {"join_transaction_mode": "create_savepoint"}
    with database.engine.begin() as connection, Session(connection, **joined) as session, session.begin():  # type: ignore[arg-type]
        enqueue(session, ob)
