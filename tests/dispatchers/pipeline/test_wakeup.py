"""An idle dispatcher begins to send when an entry is committed, and goes back to polling when hints do not arrive."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session
from support.cli_runner import succeeded
from support.database import Database
from support.entries import HOUR, dispatcher, put_one, settlement_row, until_true
from support.hints import elsewhere, put_by, wait_for, working_until

import outbox
from dispatchers import Operations
from dispatchers.adapters import MemoryAdapter
from dispatchers.pipeline import wakeup
from dispatchers.process.dispatcher_work import DispatcherWork
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Survey
from outbox.sessions.hint_sender import HintSender

pytestmark = pytest.mark.sends_hints

ROUNDS = 5  # the first may come while the dispatcher has not begun to rest


async def each_is_sent(database: Database, enqueue: Callable[[int], UUID]) -> None:
    """Each is enqueued when the one before has settled: nothing but a hint can bring them within an hour."""
    for number in range(ROUNDS):
        id = await asyncio.to_thread(enqueue, number)
        await until_true(lambda id=id: settlement_row(database, id) is not None)


def passes_over(working: DispatcherWork, operation: str) -> None:
    """As after it has met an entry of the operation: it claims no other one, and hands none back."""
    working._loops._scheduler.skip_operation(operation, operation.partition(".")[0])


# --- a hint of another process


@pytest.mark.parametrize("driver", ["psycopg", "psycopg async", "asyncpg"])
def test_a_hint_wakes_a_dispatcher_that_polls_once_an_hour(
    postgresql: Database, ob: outbox.Outbox, driver: str
) -> None:
    apps = elsewhere(postgresql)

    async def main() -> None:
        make = sa.create_engine if driver == "psycopg" else create_async_engine
        engine: Any = make(postgresql.url.set(drivername=f"postgresql+{driver.removesuffix(' async')}"))
        working = dispatcher(engine, ob, adapters={"crm": MemoryAdapter()}, poll=HOUR)
        await working_until(working, lambda: each_is_sent(postgresql, lambda n: put_by(apps, ob, n)))
        await asyncio.to_thread(engine.dispose) if driver == "psycopg" else await engine.dispose()

    asyncio.run(main())


def test_a_destination_that_was_never_seen_is_asked_at_once(postgresql: Database, ob: outbox.Outbox) -> None:
    apps = elsewhere(postgresql)
    working = dispatcher(postgresql, ob, adapters={"crm": MemoryAdapter()}, poll=HOUR)

    asyncio.run(
        working_until(
            working, lambda: each_is_sent(postgresql, lambda n: put_by(apps, ob, n, destination=f"account-{n}"))
        )
    )


def test_all_dispatchers_are_woken(postgresql: Database, ob: outbox.Outbox) -> None:
    """Each serves an operation of its own: whichever is not woken would leave its entry for an hour."""
    apps = elsewhere(postgresql)

    async def main() -> None:
        crm = dispatcher(postgresql, ob, adapters={"crm": MemoryAdapter()}, poll=HOUR)
        mail = dispatcher(postgresql.new_engine(), ob, adapters={"mail": MemoryAdapter()}, poll=HOUR)

        passes_over(crm, "mail.send")
        passes_over(mail, "crm.upsert")

        async def steps() -> None:
            await each_is_sent(postgresql, lambda n: put_by(apps, ob, n))
            await each_is_sent(postgresql, lambda n: put_by(apps, ob, n, "mail.send"))

        await working_until(crm, lambda: working_until(mail, steps))

    asyncio.run(main())


def test_what_a_callback_enqueues_wakes_the_dispatcher_that_serves_it(postgresql: Database, ob: outbox.Outbox) -> None:
    effects = Operations()

    @effects.on_settled("crm.upsert")
    def settled(session: Session, settlement: Any) -> None:
        ob.enqueue(session, "mail.send", {})

    apps = elsewhere(postgresql)
    mailed = MemoryAdapter()

    async def main() -> None:
        crm = dispatcher(elsewhere(postgresql), ob, include=[effects], adapters={"crm": MemoryAdapter()}, poll=HOUR)
        mail = dispatcher(postgresql, ob, adapters={"mail": mailed}, poll=HOUR)

        passes_over(crm, "mail.send")
        passes_over(mail, "crm.upsert")

        async def steps() -> None:
            for number in range(ROUNDS):
                await asyncio.to_thread(put_by, apps, ob, number)
                await until_true(lambda number=number: len(mailed.deliveries) > number)

        await working_until(crm, lambda: working_until(mail, steps))

    asyncio.run(main())


@pytest.mark.parametrize("decision", ["retry", "release"])
def test_a_decision_on_the_command_line_wakes_a_dispatcher(
    postgresql: Database, ob: outbox.Outbox, decision: str
) -> None:
    working = dispatcher(postgresql, ob, adapters={"crm": MemoryAdapter()}, poll=HOUR)

    def decide(number: int) -> UUID:
        id = put_one(postgresql, ob, due=HOUR)
        if decision == "release":
            postgresql.execute(
                sa.text("UPDATE outbox_queue SET suspended_reason = 'for a test', due_at = '9999-01-01Z'")
            )
        succeeded(decision, str(id), "--reason", "asked", database=postgresql)
        return id

    asyncio.run(working_until(working, lambda: each_is_sent(postgresql, decide)))


def test_a_listener_whose_connection_is_ended_listens_again(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wakeup, "RETRY_SECONDS", (0.01, 0.01))
    apps = elsewhere(postgresql)
    working = dispatcher(postgresql, ob, adapters={"crm": MemoryAdapter()}, poll=HOUR)
    terminate = sa.text(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE datname = current_database() AND query LIKE 'LISTEN %'"
    )

    async def steps() -> None:
        await each_is_sent(postgresql, lambda n: put_by(apps, ob, n))
        with postgresql.observer.connect() as connection:
            assert connection.execute(terminate).scalar_one() == 1
        await until_true(lambda: "hints arrive again" in caplog.text)
        await each_is_sent(postgresql, lambda n: put_by(apps, ob, ROUNDS + n))

    asyncio.run(working_until(working, steps))

    assert caplog.text.count("hints from the apps do not arrive") == caplog.text.count("hints arrive again") == 1


def test_a_dispatcher_listens_again_on_another_event_loop(postgresql: Database, ob: outbox.Outbox) -> None:
    apps = elsewhere(postgresql)
    working = dispatcher(postgresql, ob, adapters={"crm": MemoryAdapter()}, poll=HOUR)

    for first in (0, ROUNDS):
        asyncio.run(
            working_until(working, lambda first=first: each_is_sent(postgresql, lambda n: put_by(apps, ob, first + n)))
        )

    wait_for(lambda: listeners(postgresql) == 0)


def listeners(database: Database) -> int:
    with database.observer.connect() as connection:
        found = sa.text(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN %'"
        )
        count: int = connection.execute(found).scalar_one()
        return count


def test_an_outbox_without_hints_does_not_listen(postgresql: Database, ob: outbox.Outbox) -> None:
    silent = outbox.Outbox(ob.configuration.keyring, env="test", hints=False)
    working = dispatcher(postgresql, silent, adapters={"crm": MemoryAdapter()})

    async def main() -> None:
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        id = await asyncio.to_thread(put_one, postgresql, ob)
        await until_true(lambda: settlement_row(postgresql, id) is not None)
        assert listeners(postgresql) == 0
        stopping.set()
        await pump
        await working.close()

    asyncio.run(main())


def test_an_idle_dispatcher_that_hears_hints_sweeps_seldom(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.pipeline.claim_loops.SWEEP_SECONDS", 0.0)
    asked: list[str] = []
    survey, exchange, is_unavailable = DatabaseStore.survey, DatabaseStore.exchange, False

    async def sweep(self: DatabaseStore) -> Survey:
        asked.append("sweep")
        return await survey(self)

    async def ask(self: DatabaseStore, *arguments: Any) -> Any:
        nonlocal is_unavailable
        asked.append("exchange")
        if is_unavailable:
            is_unavailable = False
            asked.append("failure")
            raise ConnectionError
        return await exchange(self, *arguments)

    monkeypatch.setattr(DatabaseStore, "survey", sweep)
    monkeypatch.setattr(DatabaseStore, "exchange", ask)

    async def steps() -> None:
        nonlocal is_unavailable
        asked.clear()
        await until_true(lambda: asked.count("exchange") >= 30)
        assert asked.count("sweep") < 10  # for the first hint, and those that had begun

        is_unavailable = True
        await until_true(lambda: "sweep" in asked[asked.index("failure") :] if "failure" in asked else False)

        asked.clear()
        id = await asyncio.to_thread(put_one, postgresql, ob)
        await until_true(lambda: settlement_row(postgresql, id) is not None and "sweep" in asked)

    working = dispatcher(postgresql, ob, adapters={"crm": MemoryAdapter()}, poll=timedelta(milliseconds=1))
    asyncio.run(working_until(working, steps))


# --- in one process


def test_a_dispatcher_whose_url_spells_the_database_otherwise_is_woken(postgresql: Database, ob: outbox.Outbox) -> None:
    """Another dispatcher of the process is woken directly, and the hint says so."""

    async def main() -> None:
        crm = dispatcher(postgresql, ob, adapters={"crm": MemoryAdapter()}, poll=HOUR)
        mail = dispatcher(elsewhere(postgresql), ob, adapters={"mail": MemoryAdapter()}, poll=HOUR)
        passes_over(crm, "mail.send")
        passes_over(mail, "crm.upsert")

        async def steps() -> None:
            await each_is_sent(postgresql, lambda n: put_by(postgresql.engine, ob, n, "mail.send"))

        await working_until(crm, lambda: working_until(mail, steps))

    asyncio.run(main())


def test_a_dispatcher_of_the_same_process_is_woken_without_sql(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HintSender, "send", lambda *arguments, **settings: None)
    working = dispatcher(database, ob, adapters={"crm": MemoryAdapter()}, poll=HOUR)

    async def main() -> None:
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        await each_is_sent(database, lambda n: put_by(database.engine, ob, n))
        stopping.set()
        await pump
        await working.close()

    asyncio.run(main())


def test_a_commit_around_the_session_wakes_it_too(sqlite: Database, ob: outbox.Outbox) -> None:
    working = dispatcher(sqlite, ob, adapters={"crm": MemoryAdapter()}, poll=HOUR)

    def put_joined(number: int) -> UUID:
        with sqlite.engine.begin() as connection, Session(connection) as session:
            id = ob.enqueue(session, "crm.upsert", {}, parent=f"order:{number}").id
            session.commit()
        return id

    async def main() -> None:
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        await each_is_sent(sqlite, put_joined)
        stopping.set()
        await pump
        await working.close()

    asyncio.run(main())
