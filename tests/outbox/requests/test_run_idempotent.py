"""`run_idempotent`, and what an asynchronous handler adds: scoped sessions, cancelling."""

import asyncio

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker
from sqlalchemy.orm import scoped_session, sessionmaker
from support.database import ALL, CHARGE, NOTHING, PAYLOAD, REQUEST, Order

import outbox

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

ARGUMENTS = {"scope": "acct_1", "content": REQUEST}


class Handler:
    """Places an order each time it is called, and counts."""

    def __init__(self, ob, session):
        self.calls = 0
        self._ob = ob
        self._session = session

    def __call__(self, claim):
        self.calls += 1
        self._session.add(Order(customer="ada", amount=2000))
        self._ob.enqueue(self._session, CHARGE, PAYLOAD)
        claim.respond(201, {"call": self.calls})

    async def in_a_coroutine(self, claim):
        self(claim)


def test_a_handler_runs_once_and_is_replayed_afterwards(database, ob):
    with database.session() as session:
        handler = Handler(ob, session)

        responses = []
        for _ in range(2):
            responses.append(ob.run_idempotent(session, "retry-001", handler, **ARGUMENTS))
            session.commit()

    assert handler.calls == 1
    assert [response.json() for response in responses] == [{"call": 1}] * 2
    assert database.counts() == ALL


def test_a_coroutine_runs_once_and_is_replayed_afterwards(database, ob):
    responses = []

    async def run_twice():
        async with database.async_session() as session:
            handler = Handler(ob, session)
            for _ in range(2):
                responses.append(await ob.run_idempotent(session, "retry-001", handler.in_a_coroutine, **ARGUMENTS))
                await session.commit()
            return handler.calls

    assert asyncio.run(run_twice()) == 1
    assert [response.json() for response in responses] == [{"call": 1}] * 2
    assert database.counts() == ALL


def test_a_scoped_session_does_as_well(database, ob):
    session = scoped_session(sessionmaker(database.engine))

    for _ in range(2):
        ob.run_idempotent(session, "retry-001", Handler(ob, session), **ARGUMENTS)
        session.commit()
    session.remove()

    assert database.counts() == ALL


def test_an_async_scoped_session_does_as_well(database, ob):
    async def run_twice():
        session = async_scoped_session(async_sessionmaker(database.async_engine()), asyncio.current_task)
        try:
            for _ in range(2):
                await ob.run_idempotent(session, "retry-001", Handler(ob, session).in_a_coroutine, **ARGUMENTS)
                await session.commit()
        finally:
            await session.remove()

    asyncio.run(run_twice())

    assert database.counts() == ALL


def test_a_handler_without_an_answer_keeps_nothing(database, ob):
    with database.session() as session:
        with pytest.raises(outbox.NotAnswered):
            ob.run_idempotent(
                session, "retry-001", lambda claim: session.add(Order(customer="a", amount=1)), **ARGUMENTS
            )
        session.commit()

    assert database.counts() == NOTHING


def test_a_plain_function_on_an_async_session_is_refused_and_keeps_nothing(database, ob):
    async def run_and_commit():
        async with database.async_session() as session:
            with pytest.raises(outbox.ClaimError) as refused:
                await ob.run_idempotent(session, "retry-001", Handler(ob, session), **ARGUMENTS)
            await session.commit()
        return str(refused.value)

    assert asyncio.run(run_and_commit()) == (
        "outbox.run_idempotent got an AsyncSession, but its function returned NoneType and not an awaitable: make the"
        " function an 'async def', even if it awaits nothing"
    )
    assert database.counts() == NOTHING


def test_a_plain_function_that_returns_a_coroutine_does_as_well(database, ob):
    async def run():
        async with database.async_session() as session, session.begin():
            handler = Handler(ob, session)
            await ob.run_idempotent(session, "retry-001", lambda claim: handler.in_a_coroutine(claim), **ARGUMENTS)

    asyncio.run(run())

    assert database.counts() == ALL


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_coroutine_on_a_session_is_refused_and_keeps_nothing(database, ob):
    with database.session() as session:
        handler = Handler(ob, session)
        with pytest.raises(outbox.ClaimError) as refused:
            ob.run_idempotent(session, "retry-001", handler.in_a_coroutine, **ARGUMENTS)
        session.commit()

    assert str(refused.value) == (
        "outbox.run_idempotent got a Session, but its function returned an awaitable: pass an AsyncSession, or a function"
        " that is not async"
    )
    assert handler.calls == 0
    assert database.counts() == NOTHING


def test_what_idempotent_refuses_is_refused_here_too(database, ob):
    with database.session() as session:
        ob.run_idempotent(session, "retry-001", Handler(ob, session), **ARGUMENTS)
        session.commit()

        with pytest.raises(outbox.RequestMismatch):
            ob.run_idempotent(session, "retry-001", Handler(ob, session), scope="acct_1", content={})


# --- a client that hangs up


async def cancel_in_the_block(ob, session, wait_inside):
    """Place an order in a task that then waits inside its block, and cancel the task there."""
    waiting = asyncio.Event()

    async def handle():
        async with ob.idempotent(session, "retry-001", **ARGUMENTS) as claim:
            Handler(ob, session)(claim)
            await session.flush()
            waiting.set()
            await wait_inside()

    task = asyncio.create_task(handle())
    await waiting.wait()  # by the time that this wakes, the task waits in `wait_inside`
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def commit_an_order(ob, session):
    async with session, session.begin():
        await ob.run_idempotent(session, "retry-001", Handler(ob, session).in_a_coroutine, **ARGUMENTS)


def test_a_cancelled_handler_keeps_nothing_and_frees_the_key(database, ob):
    async def hang_up():
        async with database.async_session() as session:
            await cancel_in_the_block(ob, session, asyncio.Event().wait)
        await commit_an_order(ob, database.async_session())

    asyncio.run(hang_up())

    assert database.counts() == ALL


def test_a_cancelled_handler_leaves_nothing_pending_for_a_later_commit(database, ob):
    async def hang_up():
        async with database.async_session() as session:
            await cancel_in_the_block(ob, session, asyncio.Event().wait)
            await session.commit()

    asyncio.run(hang_up())

    assert database.counts() == NOTHING


def test_a_handler_cancelled_in_a_statement_frees_its_key(postgresql, ob):
    async def hang_up():
        async with postgresql.async_engine().connect() as blocker, postgresql.async_session() as session:
            await blocker.execute(sa.text("SELECT pg_advisory_xact_lock(1)"))

            async def wait_for_the_blocker():
                await session.execute(sa.text("SELECT pg_advisory_xact_lock(1)"))

            await cancel_in_the_block(ob, session, wait_for_the_blocker)
        await commit_an_order(ob, postgresql.async_session())

    asyncio.run(hang_up())

    assert postgresql.counts() == ALL
