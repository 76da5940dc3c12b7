"""Callbacks that fail or end their transaction: nothing of them is kept but the entry's outcome, and they are tried again."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from support.callbacks import Shop, failing, kept, warnings_in
from support.database import TABLES, Database, Order, colliding_order
from support.entries import (
    HOUR,
    age,
    claim_one,
    dispatcher,
    pumping,
    put,
    put_one,
    queue_row,
    reasons,
    settlement_row,
    state,
    states,
)

import outbox
from dispatchers import KeyConflict, Operations, Outcome, Rejected, Settlement, Unknown, time_limits
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import cancel
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import MarkUncertain, RetryCallback, Settle
from outbox.sql.errors.driver import is_passing

CARD = "4242424242424242"


@pytest.fixture(params=["sync", "async"])
def shop(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Shop:
    """The app with callbacks on a Session, and on an AsyncSession."""
    return Shop(database, ob, is_async=request.param == "async")


# --- kept, retried, reported


def test_the_outcome_is_kept_and_only_the_callback_is_repeated(shop: Shop) -> None:
    id = put_one(shop.database, shop.ob, parent="invoice:42")
    adapter = MemoryAdapter()
    shop.on_settled(failing(shop, ValueError("a bug"), times=2))

    counts = []
    for _ in range(3):
        counts.append(shop.run_once(adapters={"crm": adapter}))
        age(shop.database, HOUR)
        if len(counts) < 3:
            known = kept(shop.database, id)
            assert (known.state, known.result, known.attempts) == ("delivered", {"id": str(id)}, 1)
            assert (shop.database.orders, len(shop.database.entries)) == ([], 1)
            with shop.database.begin() as session:
                (status,) = shop.ob.status(session, "invoice:42")
            assert (status.state, status.reason) == ("retry", "delivered, but its callback raised ValueError")
            assert reasons(shop.database, id) == ["delivered, but its callback raised ValueError"] * len(counts)

    assert counts == [1, 1, 1]
    assert len(adapter.deliveries) == 1
    assert len(shop.database.orders) == 1
    assert states(shop.database) == {"delivered": 1, "pending": 1}
    assert (settlement_row(shop.database, id).attempts, shop.seen[2].attempts) == (1, 1)
    assert shop.seen[2].entry.payload == shop.seen[0].entry.payload
    assert [(each.state, each.result, each.reason) for each in shop.seen] == [("delivered", {"id": str(id)}, None)] * 3


def test_the_callback_is_tried_again_with_backoff(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = (time_limits.MAX_BACKOFF, time_limits.MAX_BACKOFF)  # three runs take longer than a second somewhere
    monkeypatch.setattr(time_limits.backoff, "__defaults__", longest)
    put_one(shop.database, shop.ob)
    shop.on_settled(failing(shop, ValueError("a bug"), times=9))

    class Most:
        """Jitter of nearly everything, so that the backoff is really waited."""

        def random(self) -> float:
            return 0.999

        def getrandbits(self, bits: int) -> int:
            return len(shop.seen) + 1

    for _ in range(3):
        shop.run_once(adapters={"crm": MemoryAdapter()}, rng=Most())

    assert len(shop.seen) == 1


def raise_with_payload(session: Session, settlement: Settlement) -> None:
    raise ValueError(settlement.entry.payload)


def raise_from_the_database(session: Session, settlement: Settlement) -> None:
    session.execute(sa.text("SELECT * FROM nothing_here WHERE card = :card"), {"card": CARD})


def raise_over_the_database(session: Session, settlement: Settlement) -> None:
    try:
        raise_from_the_database(session, settlement)
    except sa.exc.DBAPIError as error:
        raise RuntimeError(f"cannot charge {CARD}") from error


def raise_for_a_flush_in_ruins(session: Session, settlement: Settlement) -> None:
    session.add_all([colliding_order(), Order(customer="ada", amount=13)])
    try:
        session.flush()
    except sa.exc.IntegrityError:
        session.execute(sa.select(Order.id))


@pytest.mark.parametrize(
    ("work", "name"),
    [
        (raise_with_payload, "ValueError"),
        (raise_from_the_database, "Error"),
        (raise_over_the_database, "RuntimeError"),
        (raise_for_a_flush_in_ruins, "Error"),
    ],
)
def test_a_failure_is_logged_once_with_its_place_but_without_texts(
    shop: Shop, caplog: pytest.LogCaptureFixture, work: Any, name: str
) -> None:
    id = put_one(shop.database, shop.ob, payload={"card": CARD})
    shop.on_settled(work)

    for _ in range(2):
        shop.run_once(adapters={"crm": MemoryAdapter()})
        age(shop.database, HOUR)

    first, second = warnings_in(caplog)
    assert first.startswith(f"entry {id} (crm.upsert): its callback raised ")
    assert name in first
    assert work.__name__ in first, "where it was raised"
    assert name in second
    assert CARD not in caplog.text
    assert "13" not in [line.strip() for line in caplog.text.split(",")]
    assert "DETAIL" not in caplog.text


@pytest.mark.parametrize(
    ("outcome", "kind", "ends"),
    [
        (Rejected("no card", result={"code": 402}), "on_settled", "failed"),
        (KeyConflict("other"), "on_uncertain", "uncertain"),
        (Unknown("500", final=True), "on_uncertain", "uncertain"),
    ],
)
def test_every_other_end_is_kept_as_well(shop: Shop, outcome: Outcome, kind: str, ends: str) -> None:
    id = put_one(shop.database, shop.ob)
    adapter = MemoryAdapter([outcome])
    shop.on(kind, "crm.upsert", failing(shop, ValueError("a bug")))

    shop.run_once(adapters={"crm": adapter})
    doubt = queue_row(shop.database, id)
    age(shop.database, HOUR)
    assert shop.run_once(adapters={"crm": adapter}) == 1

    assert len(adapter.deliveries) == len(shop.database.orders) == 1
    assert (doubt.maybe_sent, doubt.in_doubt_since is not None) == (True, ends == "uncertain")
    assert shop.states == [ends, ends]
    assert state(shop.database, id) == ends
    if ends == "uncertain":
        row = queue_row(shop.database, id)
        assert row.in_doubt_since == doubt.in_doubt_since - HOUR
        assert json.loads(row.outcome) == {"reason": shop.seen[0].reason, "stored": True}


def test_a_cancelling_that_fails_is_repeated_and_never_sent(shop: Shop) -> None:
    id = put_one(shop.database, shop.ob)
    adapter = MemoryAdapter()
    shop.on_settled(failing(shop, ValueError("a bug")))
    with shop.database.engine.begin() as connection:
        cancel(connection, shop.ob.configuration.tables, id, actor="ada", reason="asked")

    for _ in range(2):
        shop.run_once(adapters={"crm": adapter})
        age(shop.database, HOUR)

    assert (state(shop.database, id), adapter.deliveries) == ("cancelled", [])
    assert len(shop.database.orders) == 1


def test_late_proof_of_success_is_kept_though_its_callback_fails(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    store = DatabaseStore(database.engine, ob.configuration)
    stale = claim_one(store)
    age(database, HOUR)
    fresh = claim_one(store)
    late = RetryCallback(Settle("delivered", 1), timedelta(0), "delivered, but its callback raised ValueError")
    park = MarkUncertain("the window has passed", 2, True, fresh.in_doubt_since)

    asyncio.run(store.exchange([(fresh, park)], None))
    assert asyncio.run(store.exchange([(stale, late)], None)).settled == {stale.lease}

    assert kept(database, id).state == "delivered"


@pytest.mark.parametrize("end", [Settle("failed", 1), MarkUncertain("500", 1, True, None)])
def test_other_late_ends_are_not_kept(database: Database, ob: outbox.Outbox, end: Any) -> None:
    id = put_one(database, ob)
    store = DatabaseStore(database.engine, ob.configuration)
    stale = claim_one(store)
    age(database, HOUR)
    fresh = claim_one(store)

    late = RetryCallback(end, timedelta(0), "its callback raised ValueError")
    assert asyncio.run(store.exchange([(stale, late)], None)).settled == set()

    assert queue_row(database, id).lease_token == fresh.lease_token


class Timeout(BaseException):
    """As gevent's."""


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(1),
        asyncio.CancelledError(),
        BaseExceptionGroup("many", [SystemExit(1)]),
        GeneratorExit(),
        Timeout(),
    ],
    ids=repr,
)
def test_whatever_a_callback_raises_is_its_own_failure(shop: Shop, error: BaseException) -> None:
    put(shop.database, shop.ob, count=6)
    adapter = MemoryAdapter()
    shop.on_settled(failing(shop, error))

    assert shop.run_once(adapters={"crm": adapter}) == 6
    age(shop.database, HOUR)
    assert shop.run_once(adapters={"crm": adapter}) == 1

    assert len(adapter.deliveries) == len(shop.database.orders) == 6


def test_a_coroutine_that_the_dispatcher_would_not_await_is_refused(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    put_one(database, ob)
    effects = Operations()

    async def settled(session: Session, settlement: Settlement) -> None: ...

    effects.on_settled("crm")(lambda *arguments: settled(*arguments))
    working = dispatcher(database, ob, include=[effects], adapters={"crm": MemoryAdapter()})

    assert asyncio.run(working.run_once()) == 1

    assert "CallbackError: a callback that is not an `async def` returned an awaitable" in caplog.text
    assert states(database) == {"retry": 1}


# --- refused at the commit


class FromPostgres(Exception):
    def __init__(self, code: str | None) -> None:
        self.sqlstate = code


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (sa.exc.OperationalError("", {}, FromPostgres(None)), True),  # no connection: the driver knows no code
        (sa.exc.OperationalError("", {}, FromPostgres("40003")), True),  # CockroachDB: it may have committed
        (sa.exc.OperationalError("", {}, FromPostgres("57P01")), True),  # the server is being shut down
        (sa.exc.OperationalError("", {}, FromPostgres("53300")), True),  # too many connections
        (sa.exc.OperationalError("", {}, FromPostgres("40001")), True),  # serialization
        (sa.exc.DBAPIError("", {}, FromPostgres("40P01")), True),  # deadlock
        (sa.exc.DBAPIError("", {}, FromPostgres("XX000"), connection_invalidated=True), True),
        (sa.exc.TimeoutError("the pool is empty"), True),
        (ConnectionRefusedError(), True),
        (sa.exc.IntegrityError("", {}, FromPostgres("23505")), False),
        (sa.exc.IntegrityError("", {}, Exception("FOREIGN KEY constraint failed")), False),  # SQLite
        (sa.exc.OperationalError("", {}, FromPostgres("57014")), False),  # statement_timeout
        (sa.exc.InternalError("", {}, FromPostgres("25P02")), False),
        (ValueError("a bug"), False),
    ],
)
def test_only_what_passes_by_itself_is_waited_for(error: Exception, passing: bool) -> None:
    assert is_passing(error) == passing


# --- A callback writes in the dispatcher's transaction: if it ends that itself, or the commit fails, nothing of it is kept.


def roll_back(session: Session, settlement: Settlement) -> None:
    session.rollback()


def commit(session: Session, settlement: Settlement) -> None:
    session.commit()


def send_a_rollback(session: Session, settlement: Settlement) -> None:
    """SQLAlchemy sees a statement, and what follows would commit without the settlement."""
    session.execute(sa.text("ROLLBACK"))
    session.execute(sa.insert(Order).values(customer="ada", amount=1))


def catch_a_failed_flush(session: Session, settlement: Settlement) -> None:
    session.add_all([colliding_order(), colliding_order()])
    with suppress(sa.exc.IntegrityError):
        session.flush()


def catch_a_failed_statement(session: Session, settlement: Settlement) -> None:
    with suppress(sa.exc.ProgrammingError):
        session.execute(sa.text("SELECT * FROM nothing_here"))


ROLLED_BACK = (
    "CallbackError: a callback must not roll back, and must not catch a failed flush without session.begin_nested()"
)
MISUSES = [
    (roll_back, ROLLED_BACK),
    (
        commit,
        "CallbackError: a callback must not commit: what it writes commits together with the settlement of the entry",
    ),
    (catch_a_failed_flush, ROLLED_BACK),
    (send_a_rollback, "CallbackError: a callback must not send a COMMIT, a ROLLBACK or another statement"),
]


def misuse(shop: Shop, work: Callable[[Session, Settlement], None], text: str, log: pytest.LogCaptureFixture) -> None:
    id = put_one(shop.database, shop.ob)
    adapter = MemoryAdapter()

    def paying(session: Session, settlement: Settlement) -> None:
        shop.pay(session, settlement)
        session.flush()
        work(session, settlement)

    shop.on_settled(paying)
    assert shop.run_once(adapters={"crm": adapter}) == 1
    age(shop.database, HOUR)
    assert shop.run_once(adapters={"crm": adapter}) == 1

    assert all(text in warning for warning in warnings_in(log))
    assert len(warnings_in(log)) == 2
    assert kept(shop.database, id).state == "delivered"
    assert (shop.database.orders, len(shop.database.entries), len(adapter.deliveries)) == ([], 1, 1)


@pytest.mark.parametrize(("work", "text"), MISUSES)
def test_who_ends_the_settlings_transaction_keeps_nothing_of_it(
    shop: Shop, caplog: pytest.LogCaptureFixture, work: Any, text: str
) -> None:
    misuse(shop, work, text, caplog)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_statements_error_that_was_caught_keeps_nothing_of_it(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    shop = Shop(postgresql, ob, is_async=is_async)

    misuse(shop, catch_a_failed_statement, "CallbackError: a callback caught a statement's error, and its", caplog)

    assert "ProgrammingError" not in warnings_in(caplog)[0].partition("after")[0]
    assert "25P02" in warnings_in(caplog)[0]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_rollback_before_the_first_statement_is_the_callbacks_failure(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    """What the callback has enqueued is gone, so the settlement must not commit without it."""
    shop, adapter = Shop(postgresql, ob, is_async=is_async), MemoryAdapter()
    id = put_one(postgresql, ob)

    def enqueue_and_roll_back(session: Session, settlement: Settlement) -> None:
        ob.enqueue(session, "mail.receipt", {})
        session.rollback()

    shop.on_settled(enqueue_and_roll_back)
    shop.run_once(adapters={"crm": adapter})

    assert ROLLED_BACK in warnings_in(caplog)[0]
    assert kept(postgresql, id).state == "delivered"
    assert postgresql.operations() == ["crm.upsert"]


def test_a_savepoint_may_be_rolled_back_and_its_entries_go_with_it(shop: Shop) -> None:
    put_one(shop.database, shop.ob)

    def work(session: Session, settlement: Settlement) -> None:
        shop.pay(session, settlement)
        with suppress(sa.exc.IntegrityError), session.begin_nested():
            shop.ob.enqueue(session, "mail.survey", {})
            session.add_all([colliding_order(), colliding_order()])

    shop.on_settled(work)
    shop.run_once(adapters={"crm": MemoryAdapter()})

    assert shop.database.operations() == ["crm.upsert", "mail.receipt"]
    assert len(shop.database.orders) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_refused_only_at_the_commit_is_the_callbacks_failure(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    postgresql.execute(
        sa.text("ALTER TABLE shop_order ADD CONSTRAINT once UNIQUE (customer) DEFERRABLE INITIALLY DEFERRED")
    )
    shop, adapter = Shop(postgresql, ob, is_async=is_async), MemoryAdapter()
    with postgresql.begin() as session:
        session.add(Order(customer="invoice:42", amount=1))
    id = put_one(postgresql, ob, parent="invoice:42")
    shop.on_settled(shop.pay)

    assert shop.run_once(adapters={"crm": adapter}) == 1

    assert kept(postgresql, id).state == "delivered"
    assert "its callback raised IntegrityError 23505" in warnings_in(caplog)[0]
    assert "invoice:42" not in caplog.text
    postgresql.execute(sa.delete(Order))
    age(postgresql, HOUR)
    assert shop.run_once(adapters={"crm": adapter}) == 1
    assert (len(adapter.deliveries), len(postgresql.orders)) == (1, 1)


# --- Callbacks on MariaDB, which undoes a whole transaction after a deadlock and then executes later statements in a new
# one.


CHANGE = sa.update(Order).values(amount=7)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE", "AUTOCOMMIT"])
def test_a_callback_runs_at_read_committed_on_any_engine(
    mariadb: Database, ob: outbox.Outbox, level: str, is_async: bool
) -> None:
    put_one(mariadb, ob)
    operations, levels = Operations(), list[str]()

    @operations.on_settled("crm.upsert")
    def note(session: Session, settlement: Settlement) -> None:
        levels.append(session.connection().get_isolation_level())
        session.add(Order(customer="eve", amount=1))

    new_engine = mariadb.async_engine if is_async else mariadb.unprepared_engine
    engine: Any = new_engine(isolation_level=level)
    working = dispatcher(engine, ob, adapters={"crm": MemoryAdapter()}, include=[operations])

    assert asyncio.run(working.run_once()) == 1

    assert (levels, states(mariadb), len(mariadb.orders)) == (["READ COMMITTED"], {"delivered": 1}, 1)


def test_a_callback_that_catches_a_deadlock_commits_nothing(mariadb: Database, ob: outbox.Outbox) -> None:
    operations, crm, calls = Operations(), MemoryAdapter(timeout=timedelta(seconds=1)), list[int]()
    with mariadb.begin() as session:
        session.add_all([Order(id=number, customer="ada", amount=number) for number in (1, 2)])
        ob.enqueue(session, "crm.upsert", {}, parent="n:1")

    @operations.on_settled("crm.upsert")
    def note(session: Session, settlement: Settlement) -> None:
        calls.append(len(calls))
        if calls == [0]:
            catch_a_deadlock(mariadb, session)
        session.add(Order(customer="eve", amount=len(calls)))

    working = dispatcher(
        mariadb,
        ob,
        adapters={"crm": crm},
        include=[operations],
        lease=timedelta(seconds=4),
        margin=timedelta(seconds=1),
    )
    asyncio.run(pumping(working, lambda: not mariadb.rows(TABLES.queue)))

    assert len(crm.deliveries) == 1
    assert [row.state for row in mariadb.rows(TABLES.settlement)] == ["delivered"]
    written = sa.select(Order.amount).where(Order.customer == "eve")
    with mariadb.begin() as session:
        assert session.scalars(written).all() == [2]


def catch_a_deadlock(mariadb: Database, session: Session) -> None:
    with mariadb.begin() as other, ThreadPoolExecutor(1) as beside:
        session.execute(CHANGE.where(Order.id == 1))
        other.execute(CHANGE.where(Order.id == 2))
        more = [Order(customer="bob", amount=number) for number in range(100, 250)]
        other.add_all(more)  # the one that has written less is ended
        other.flush()
        waiting = beside.submit(other.execute, CHANGE.where(Order.id == 1))
        try:
            session.execute(CHANGE.where(Order.id == 2))
        except OperationalError:
            waiting.result()
        else:
            raise AssertionError("no deadlock")
