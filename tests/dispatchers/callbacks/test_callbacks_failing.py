"""Callbacks that fail: the outcome of the entry is kept, nothing is sent again, and the callback is tried again."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.callbacks import Shop, failing, kept, warnings_in
from support.database import Database, Order, colliding_order
from support.entries import (
    HOUR,
    age,
    claim_one,
    dispatcher,
    put,
    put_one,
    queue_row,
    reasons,
    settlement_row,
    state,
    states,
)

import outbox
from dispatchers import KeyConflict, Operations, Outcome, Rejected, Unknown, time_limits
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import cancel
from dispatchers.callbacks import Settlement
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
