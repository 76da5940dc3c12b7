"""Many concurrent threads, and a shop whose requests they race for, at any isolation level, with a Session or an AsyncSession."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import outbox
from outbox.requests.claim_block import IdempotentBlock
from support.database import CHARGE, PAYLOAD, REQUEST, Database, Order

Result = TypeVar("Result")

CONFLICT = "DO $$ BEGIN RAISE EXCEPTION 'another transaction was preferred' USING ERRCODE = '40001'; END $$"
"""A statement of PostgreSQL that fails as one whose transaction was undone in favour of another one."""

TEST_TIMEOUT = 60  # seconds until a test that hangs fails; nothing takes that long
ANSWER = outbox.Response(201, b'{"execution":1}', {"Content-Type": "application/json"})


def at_once(count: int, work: Callable[[], Any]) -> list[Any]:
    """Do `work()` in so many threads that start together; returns what each returned or raised."""
    barrier = threading.Barrier(count)

    def one(_: int) -> Any:
        barrier.wait(TEST_TIMEOUT)
        try:
            return work()
        except (outbox.OutboxError, sa.exc.DBAPIError) as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def is_conflict(error: object) -> bool:
    """Whether PostgreSQL ended the transaction, or its statement, in favour of another: 40001."""
    return isinstance(error, sa.exc.DBAPIError) and getattr(error.orig, "sqlstate", None) == "40001"


class RacingShop:
    """Handles requests of the key `retry-001`, each in a transaction and on a connection of its own.

    while_working: what the handler does in the middle of
    its work. executions: how often it ran, whatever became of its transaction.
    """

    def __init__(self, database: Database, ob: outbox.Outbox, *, is_async: bool, **settings: Any) -> None:
        self.database = database
        self.ob = ob
        self.is_async = is_async
        self.executions = 0
        self.while_working: Callable[[Session], object] = lambda session: None
        self._settings = settings
        self.engine = database.new_engine(pool_size=50, **settings)

    def request(
        self,
        content: object = REQUEST,
        *,
        before: Callable[[Session], object] = lambda session: None,
        **settings: Any,
    ) -> outbox.Response:
        """One request, and its answer. before: done in the same transaction, before the claim."""

        async def run() -> outbox.Response:
            async with self._async_session() as session, session.begin():
                await session.run_sync(before)
                async with self.claim(session, content, **settings) as claim:
                    return await session.run_sync(self._handle, claim)

        if self.is_async:
            return asyncio.run(run())
        with Session(self.engine) as session, session.begin():
            before(session)
            with self.claim(session, content, **settings) as claim:
                return self._handle(session, claim)

    def unit(self, work: Callable[[Session], Result]) -> Result:
        """Do `work` in a transaction that commits."""

        async def run() -> Result:
            async with self._async_session() as session, session.begin():
                return await session.run_sync(work)

        if self.is_async:
            return asyncio.run(run())
        with Session(self.engine) as session, session.begin():
            return work(session)

    def claim(self, session: Any, content: object = REQUEST, **settings: Any) -> IdempotentBlock:
        return self.ob.idempotent(session, "retry-001", scope="acct_1", content=content, **settings)

    def wait_until_others_wait(self, count: int) -> None:
        """Return once so many connections to this database wait for a lock."""
        waiting = sa.text(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        with self.database.unprepared_engine(isolation_level="AUTOCOMMIT").connect() as connection:
            deadline = time.monotonic() + TEST_TIMEOUT
            while connection.execute(waiting).scalar_one() < count:
                assert time.monotonic() < deadline, f"fewer than {count} wait"

    def _handle(self, session: Session, claim: outbox.Claim) -> outbox.Response:
        if claim.replayed:
            return claim.require_response()
        self.executions += 1
        session.add(Order(customer="ada", amount=2000))
        self.ob.enqueue(session, CHARGE, PAYLOAD)
        session.flush()
        self.while_working(session)
        return claim.respond(201, {"execution": self.executions})

    def _async_session(self) -> AsyncSession:
        return AsyncSession(self.database.async_engine(**self._settings))


def retried(unit: Callable[[], Result]) -> Result:
    """As a caller should: the whole unit again, in a new transaction, for as long as it meets others."""
    deadline = time.monotonic() + TEST_TIMEOUT
    while True:
        try:
            return unit()
        except (outbox.KeyInFlight, sa.exc.DBAPIError) as error:
            if time.monotonic() > deadline or not (isinstance(error, outbox.KeyInFlight) or is_conflict(error)):
                raise


@contextmanager
def retold(engine: Any, execute: Callable[..., tuple[str, Any]]) -> Iterator[None]:
    """Let `execute` choose what is sent for each statement of an engine, or of all."""
    sa.event.listen(engine, "before_cursor_execute", execute, retval=True)
    try:
        yield
    finally:
        sa.event.remove(engine, "before_cursor_execute", execute)


@contextmanager
def conflict_at(engine: Any, number: int) -> Iterator[list[str]]:
    """Let the server end the transaction at its statement with this number, once. Yields the statements."""
    sent: list[str] = []

    def execute(connection: sa.Connection, cursor: Any, statement: str, parameters: Any, *rest: Any) -> tuple[str, Any]:
        sent.append(statement)
        return (CONFLICT, {}) if len(sent) == number else (statement, parameters)

    with retold(engine, execute):
        yield sent
