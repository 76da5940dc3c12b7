"""Callbacks that wait, take too long or hang, and callbacks at a drain: none keeps another waiting, or is half done."""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from support.callbacks import Gate, Shop, warnings_in
from support.database import TABLES, Database
from support.entries import (
    HOUR,
    LEASE,
    age,
    claim,
    dispatcher,
    pumping,
    put,
    put_one,
    queue_row,
    quota,
    reasons,
    run_once,
    state,
    states,
    until_true,
)

import outbox
from dispatchers import Deferred, Delivered, Delivery, Operations
from dispatchers.adapters import MemoryAdapter
from dispatchers.callbacks import Callbacks, Calls, Settlement
from dispatchers.pipeline.app_transactions import SettlementWorker
from dispatchers.pipeline.destinations import UNLIMITED, CallbackPace, Destinations
from dispatchers.store.database import DatabaseStore
from dispatchers.stored_outcome import read_outcome
from dispatchers.telemetry.errors import ErrorReports
from dispatchers.transitions import ClaimedEntry, RetryCallback, Settle, Transition


@given(
    at_once=st.integers(1, 50),
    usable=st.floats(1, 3600),
    seconds=st.lists(st.floats(0, 600), min_size=1, max_size=20),
)
def test_no_more_is_claimed_than_callbacks_settle_within_a_lease(
    at_once: int, usable: float, seconds: list[float]
) -> None:
    pace = CallbackPace(at_once, timedelta(seconds=usable))
    destinations = Destinations(permits=1, permits_in_all=1, pace=pace, called_back=["crm"])
    crm = destinations.of["crm"]
    for each in seconds:
        pace.measure(each)
    for _ in range(1000):
        if (free := min(pace.free_of(crm), 20)) == 0:
            break
        destinations.reserve_callbacks("crm", free)

    claimed = pace.max_entries - pace.free
    assert claimed <= 2 * at_once or claimed == UNLIMITED or claimed * pace.seconds_each <= at_once * usable / 2 * 1.001
    assert pace.free >= pace.max_entries // 2 or claimed < UNLIMITED // 2, "one destination leaves half to the others"
    assert pace.max_entries >= 2 * at_once, "none of the callbacks waits for a claim"


def test_nothing_is_claimed_that_callbacks_cannot_settle_in_time(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=90)
    put(postgresql, ob, "mail.send", count=90)
    shop, gate, adapter = Shop(postgresql, ob, is_async=False), Gate(), MemoryAdapter()
    shop.on_settled(gate)
    working = shop.dispatcher(
        adapters={"crm": adapter, "mail": MemoryAdapter()},
        callback_concurrency=2,
        callback_timeout=timedelta(seconds=50),
    )

    async def main() -> None:
        pump = asyncio.create_task(pumping(working, lambda: states(postgresql)["delivered"] == 180))
        await until_true(lambda: gate.entered == 2 and states(postgresql)["delivered"] == 90)
        sent = len(adapter.deliveries)
        assert gate.entered == 2, "as many run at once as the setting says"
        gate.opened.set()
        await pump
        assert sent == 28, "half of what two callbacks settle in half a lease, at an assumed second each"

    asyncio.run(main())

    assert len(shop.seen) == len(adapter.deliveries) == 90


def test_a_destination_without_callbacks_does_not_wait_for_those_of_others(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    put(postgresql, ob, count=20)
    shop, gate, adapter = Shop(postgresql, ob, is_async=False), Gate(), MemoryAdapter()
    shop.on_settled(gate)
    working = shop.dispatcher(
        adapters={"crm": adapter, "mail": MemoryAdapter()},
        max_in_flight=4,
        callback_concurrency=1,
        callback_timeout=timedelta(seconds=50),
    )

    async def main() -> None:
        pump = asyncio.create_task(pumping(working, lambda: states(postgresql)["delivered"] == 30))
        await until_true(lambda: gate.entered == 1 and len(adapter.deliveries) >= 4)
        await asyncio.to_thread(put, postgresql, ob, "mail.send", count=10)
        await until_true(lambda: states(postgresql)["delivered"] == 10, seconds=20)  # before a callback is overdue
        sent = len(adapter.deliveries)
        gate.opened.set()
        await pump
        assert sent <= 8, "so few wait for a callback that the process needs no more memory"

    asyncio.run(main())


class Stuck:
    """A store in which the first callback hangs until `continues` is set."""

    def __init__(self) -> None:
        self.begun: list[UUID] = []
        self.continues = asyncio.Event()

    async def settle_with(self, entry: ClaimedEntry, end: Any, calls: Calls) -> bool:
        self.begun.append(entry.id)
        await self.continues.wait()
        return True


def test_who_waits_until_its_lease_ends_is_released_with_its_outcome(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=3)
    store = DatabaseStore(postgresql.engine, ob.configuration)
    claimed = claim(store, quota(permits=3))
    changes: list[tuple[ClaimedEntry, Transition]] = []

    async def main() -> None:
        stuck = Stuck()
        settling = SettlementWorker(
            stuck,  # type: ignore[arg-type]
            CallbackPace(1, timedelta(seconds=1)),
            at_once=1,
            usable=timedelta(seconds=0.2),
            clock=asyncio.get_running_loop().time,
            rng=random.Random(0),
            callbacks=Callbacks([]),
            ended=lambda waiting, result: changes.append((waiting.entry, result.instead)) if result.instead else None,
            away=lambda error: None,
            trace=None,
            errors=ErrorReports(),
        )
        settling.note_claim(claimed[0].lease_token, asyncio.get_running_loop().time())
        for entry in claimed:
            settling.start(entry, Settle("delivered", 1, result={"id": "c_1"}), Calls(lambda *_: None))
        await until_true(lambda: len(changes) == 2)
        assert len(settling) == 1
        stuck.continues.set()
        await settling.finish(timedelta(seconds=20))
        assert stuck.begun == [claimed[0].id]

    asyncio.run(main())
    asyncio.run(store.exchange(changes, None))

    assert all(isinstance(change, RetryCallback) and not change.delay for _, change in changes)
    again = claim(store, quota(permits=3))
    assert {entry.id for entry in again} == {entry.id for entry in claimed[1:]}
    for entry in again:
        known = entry.outcome.known
        assert known is not None
        assert (known.state, known.result) == ("delivered", {"id": "c_1"})
    assert postgresql.rows(TABLES.event) == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"callback_concurrency": 0}, "callback_concurrency must be an int of at least 1, not 0"),
        (
            {"callback_timeout": timedelta(0)},
            r"callback_timeout must be a positive timedelta of at most lease - margin",
        ),
        ({"callback_timeout": LEASE}, r"lease - margin \(0:00:55\), not datetime.timedelta\(seconds=60\): raise lease"),
    ],
)
def test_settings_of_callbacks_that_cannot_work_are_refused(settings: dict[str, Any], text: str) -> None:
    ob = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test")
    with pytest.raises(outbox.ConfigurationError, match=text):
        dispatcher(sa.create_engine("sqlite://"), ob, adapters={"crm": MemoryAdapter()}, **settings)


# --- Callbacks whose transaction does not come to its end: they take too long, or the database ends it.


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


# --- Callbacks when their dispatcher ends: a drain waits for them until its grace, and an abandoned one leaves nothing half
# done.


@pytest.fixture(params=["sync", "async"])
def shop(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Shop:
    """The app with callbacks on a Session, and on an AsyncSession."""
    return Shop(database, ob, is_async=request.param == "async")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_drain_ends_at_its_grace_and_keeps_what_waits_for_a_callback(
    postgresql: Database, ob: outbox.Outbox, is_async: bool
) -> None:
    put(postgresql, ob, count=10)
    gate, effects, adapter = Gate(), Operations(), MemoryAdapter(window=None)
    stuck: list[UUID] = []

    @effects.on_settled("crm")
    def hang(session: Session, settlement: Settlement) -> None:
        stuck.append(settlement.entry.id)
        gate(session, settlement)

    async def hang_async(session: AsyncSession, settlement: Settlement) -> None:
        stuck.append(settlement.entry.id)
        await asyncio.sleep(60)

    if is_async:
        effects = Operations()
        effects.on_settled("crm")(hang_async)
    target = postgresql.async_engine() if is_async else postgresql
    working = dispatcher(
        target,
        ob,
        include=[effects],
        adapters={"crm": adapter},
        grace=timedelta(seconds=0.3),
        margin=timedelta(minutes=20),
        lease=timedelta(hours=1),
    )

    async def main() -> float:
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        await until_true(lambda: len(stuck) == 4 and len(adapter.deliveries) == 10)
        began = asyncio.get_running_loop().time()
        stopping.set()
        await pump
        return asyncio.get_running_loop().time() - began

    try:
        took = asyncio.run(main())
        assert took < 30, "the callbacks hang for a minute"
        rows = {row.id: row for row in postgresql.queue}
        waiting = [row for id, row in rows.items() if id not in stuck]
        assert {rows[id].state for id in stuck} == {"sending"}
        assert [read_outcome(row.outcome).known.state for row in waiting] == ["delivered"] * 6  # type: ignore[union-attr]
        reason = "delivered; the process stopped before its callback ran"
        assert {json.loads(row.outcome)["reason"] for row in waiting} == {reason}
        assert postgresql.orders == []
    finally:
        gate.open()


def test_an_abandoned_callback_leaves_nothing_half_done(postgresql: Database, ob: outbox.Outbox) -> None:
    id = put_one(postgresql, ob)
    effects, entered = Operations(), asyncio.Event()
    shop, adapter = Shop(postgresql, ob, is_async=True), MemoryAdapter()

    @effects.on_settled("crm")
    async def settled(session: AsyncSession, settlement: Settlement) -> None:
        await session.run_sync(shop.pay, settlement)
        await session.flush()
        if not entered.is_set():
            entered.set()
            await asyncio.sleep(60)

    working = dispatcher(postgresql.async_engine(), ob, include=[effects], adapters={"crm": adapter})

    async def main() -> None:
        pump = asyncio.create_task(working.pump(stopping := asyncio.Event()))
        await entered.wait()
        stopping.set()
        await working.abandon()
        await pump

    asyncio.run(main())
    assert (state(postgresql, id), postgresql.orders, len(postgresql.entries)) == ("sending", [], 1)
    age(postgresql, HOUR)
    assert asyncio.run(working.run_once()) == 1

    assert len(postgresql.orders) == len(adapter.effects) == 1


# --- However many destinations have callbacks, each entry that is due is sent: with default settings, and from one process.


COUNTS = (4, 30)


class Effects:
    """An operation with a callback for each of so many destinations. called: how often each callback ran."""

    def __init__(self, count: int, *, refusals: int = 0, callback_seconds: float = 0.0) -> None:
        self.names = [f"d{number:02}" for number in range(count)]
        self.operations = Operations()
        self.called: Counter[str] = Counter()
        self.sent: Counter[object] = Counter()
        self._refusals, self._callback_seconds = refusals, callback_seconds
        for name in self.names:
            self.operations.operation(f"{name}.do", timeout=timedelta(seconds=0.5))(self._send)
            self.operations.on_settled(f"{name}.do")(self._note)

    def _send(self, delivery: Delivery) -> Delivered | Deferred:
        self.sent[delivery.id] += 1
        if self.sent[delivery.id] <= self._refusals:
            return Deferred("busy", after=timedelta(milliseconds=1))
        return Delivered()

    def _note(self, session: Session, settlement: Settlement) -> None:
        if self._callback_seconds:
            session.execute(text(f"SELECT pg_sleep({self._callback_seconds})"))
        self.called[settlement.entry.destination] += 1


@pytest.mark.parametrize("count", COUNTS)
def test_run_once_sends_a_backlog_of_all_of_them(database: Database, ob: outbox.Outbox, count: int) -> None:
    effects = Effects(count)
    for name in effects.names:
        put(database, ob, f"{name}.do", count=5)

    assert run_once(database, ob, include=[effects.operations]) == 5 * count
    assert effects.called == dict.fromkeys(effects.names, 5)


@pytest.mark.parametrize("count", COUNTS)
def test_slow_callbacks_of_some_keep_none_of_the_others_waiting(
    postgresql: Database, ob: outbox.Outbox, count: int
) -> None:
    """One callback at a time, and a lease in which few of them fit: the budget is used up all the time."""
    effects = Effects(count, callback_seconds=0.03)
    for name in effects.names:
        put(postgresql, ob, f"{name}.do", count=10 if name in effects.names[:2] else 1)
    working = dispatcher(
        postgresql,
        ob,
        include=[effects.operations],
        callback_concurrency=1,
        lease=timedelta(seconds=2),
        margin=timedelta(seconds=1),
    )

    asyncio.run(pumping(working, lambda: states(postgresql)["delivered"] == 18 + count))

    assert effects.called == {name: 10 if name in effects.names[:2] else 1 for name in effects.names}
