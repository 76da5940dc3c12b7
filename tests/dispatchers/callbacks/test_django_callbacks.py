"""Callbacks that use Django's ORM write in the transaction that settles the entry: both are kept, or neither is."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from functools import cache, partial
from typing import Any

import django.db.models
import pytest
import sqlalchemy as sa
from asgiref.sync import sync_to_async
from django.db import DatabaseError, IntegrityError, connections, transaction
from support.callbacks import kept, warnings_in
from support.database import TABLES, Database
from support.entries import HOUR, age, dispatcher, put_one, reasons, state
from support.http_requests import use_django

import outbox
from dispatchers import Delivered, Dispatcher, Fleet, Operations, Settlement, Tick
from dispatchers.adapters import MemoryAdapter
from dispatchers.django import DjangoTransactions
from outbox import Effect
from outbox.django import joined_session
from outbox.errors import ConfigurationError

Work = Callable[[Any, Settlement], Any]


POOLED = pytest.param(True, marks=pytest.mark.skipif(django.VERSION < (5, 1), reason="Django 5.1 brings the option"))


@pytest.fixture(params=[False, POOLED], ids=["own connections", "pool"])
def shop(request: pytest.FixtureRequest, postgresql: Database) -> Iterator[Database]:
    use_django(postgresql, "READ_COMMITTED", [])
    ours = connections["default"]
    if request.param:
        connections.settings["default"]["OPTIONS"]["pool"] = True
    yield postgresql
    ours.close()
    if request.param:
        connections.settings["default"]["OPTIONS"]["pool"] = True  # a test may have set Django up again
        ours.close_pool()
        connections.settings["default"]["OPTIONS"].pop("pool")


@cache
def order() -> Any:
    """Django's model of the test's own row. It is made late: Django must have been set up."""
    meta = type("Meta", (), {"app_label": "shop", "db_table": "shop_order", "managed": False})
    columns = {"customer": django.db.models.TextField(), "amount": django.db.models.IntegerField()}
    return type("Order", (django.db.models.Model,), {"__module__": __name__, "Meta": meta, **columns})


def place(customer: str, amount: int = 2000) -> None:
    order().objects.create(customer=customer, amount=amount)


def make(ob: outbox.Outbox, target: Any, work: Work, **settings: Any) -> Dispatcher:
    """A dispatcher with one callback, in Django's transactions."""
    effects = Operations()
    effects.on_settled("crm.upsert")(work)
    chosen = {"callback_transactions": DjangoTransactions(), "adapters": {"crm": MemoryAdapter()}} | settings
    return dispatcher(target, ob, include=[effects], **chosen)


def run(shop: Database, ob: outbox.Outbox, work: Work, **settings: Any) -> int:
    return asyncio.run(make(ob, shop.engine, work, **settings).run_once())


def customers(shop: Database) -> list[str]:
    with shop.observer.connect() as connection:
        return list(connection.execute(sa.text("SELECT customer FROM shop_order ORDER BY id")).scalars())


# --- one transaction


def write_both(ob: outbox.Outbox) -> Work:
    def callback(session: Any, settlement: Settlement) -> None:
        place("ada")
        ob.enqueue(session, "mail.send", {"to": "ada"})

    return callback


def write_both_async(ob: outbox.Outbox) -> Work:
    async def callback(session: Any, settlement: Settlement) -> None:
        await order().objects.acreate(customer="ada", amount=2000)
        ob.enqueue(session, "mail.send", {"to": "ada"})
        await sync_to_async(place)("ada")
        await order().objects.filter(amount=2000).order_by("-id").afirst()

    return callback


@pytest.mark.parametrize("is_async_engine", [False, True])
@pytest.mark.parametrize(("make_work", "count"), [(write_both, 1), (write_both_async, 2)], ids=["sync", "async"])
def test_what_djangos_orm_writes_commits_with_the_settlement(
    shop: Database, ob: outbox.Outbox, make_work: Any, count: int, is_async_engine: bool
) -> None:
    id = put_one(shop, ob)
    seen: list[Any] = []

    def watched(work: Work) -> Work:
        def callback(session: Any, settlement: Settlement) -> None:
            seen.append((state(shop, id), customers(shop)))
            work(session, settlement)
            seen.append((state(shop, id), customers(shop)))

        return callback if make_work is write_both else work

    target = shop.async_engine() if is_async_engine else shop.engine
    assert asyncio.run(make(ob, target, watched(make_work(ob))).run_once()) == 1

    assert all(entry == ("sending", []) for entry in seen)  # another connection sees nothing before the commit
    assert state(shop, id) == "delivered"
    assert customers(shop) == ["ada"] * count
    assert sorted(entry.operation for entry in shop.entries) == ["crm.upsert", "mail.send"]


@dataclass
class Card:
    number: str
    amount: Decimal


@dataclass
class Charge:
    id: str
    fee: Decimal


charge = Effect("bank.charge", Card, result=Charge)


def test_a_typed_effect_is_enqueued_and_settled_in_djangos_transactions(shop: Database, ob: outbox.Outbox) -> None:
    """The view enqueues objects, all or none, and the callback gets objects and writes with Django's ORM."""
    effects = Operations()
    effects.handles(charge)(lambda delivery: Delivered(Charge(delivery.payload.number, delivery.payload.amount / 100)))

    def charged(session: Any, settlement: Settlement[Card, Charge]) -> None:
        assert settlement.result is not None
        place(settlement.result.id, int(settlement.entry.payload.amount + settlement.result.fee))

    effects.on_settled(charge)(charged)
    settings: dict[str, Any] = {"parent": "order:1", "discriminator": lambda card: card.number, "outbox": ob}
    with transaction.atomic(), joined_session() as session:
        charge.enqueue_many(session, [Card("4242", Decimal("200.00")), Card("4000", Decimal("100.00"))], **settings)
    with suppress(outbox.InvalidPayload), transaction.atomic(), joined_session() as session:
        charge.enqueue_many(session, [Card("1", Decimal(1)), Card("2", 5.5)], **settings)  # type: ignore[list-item]

    working = dispatcher(shop, ob, include=[effects], callback_transactions=DjangoTransactions())

    assert asyncio.run(working.run_once()) == 2
    with shop.observer.connect() as connection:
        rows = connection.execute(sa.text("SELECT customer, amount FROM shop_order ORDER BY customer")).all()
    assert rows == [("4000", 101), ("4242", 202)]


def test_a_callback_that_raises_leaves_neither_and_is_called_again(shop: Database, ob: outbox.Outbox) -> None:
    id = put_one(shop, ob)
    adapter = MemoryAdapter()
    tries: list[Settlement] = []
    committed: list[int] = []

    def callback(session: Any, settlement: Settlement) -> None:
        place(f"try {len(tries)}")
        tries.append(settlement)
        transaction.on_commit(lambda: committed.append(len(tries)))
        if len(tries) == 1:
            raise LookupError

    work = make(ob, shop.engine, callback, adapters={"crm": adapter})
    asyncio.run(work.run_once())
    assert (kept(shop, id).state, customers(shop)) == ("delivered", [])
    age(shop, HOUR)
    asyncio.run(work.run_once())

    assert (state(shop, id), customers(shop), len(adapter.deliveries)) == ("delivered", ["try 1"], 1)
    assert committed == [2], "a hook runs for no callback that fails"


# --- atomic blocks and hooks


def test_an_inner_block_can_fail_and_the_rest_is_kept(shop: Database, ob: outbox.Outbox) -> None:
    """What was enqueued in the block goes with it: the session's statements are in the order of the code."""
    id = put_one(shop, ob)

    def callback(session: Any, settlement: Settlement) -> None:
        place("ada", 13)
        ob.enqueue(session, "mail.send", {"to": "before"})
        with suppress(IntegrityError), transaction.atomic():
            ob.enqueue(session, "mail.send", {"to": "inside"}, discriminator="2")
            place("ada", 13)
        place("ada")

    assert run(shop, ob, callback) == 1

    assert (state(shop, id), customers(shop)) == ("delivered", ["ada", "ada"])
    assert [entry.payload for entry in shop.entries if entry.operation == "mail.send"] == [b'{"to":"before"}']


def catch_without_a_block(session: Any, settlement: Settlement) -> None:
    place("ada", 13)
    with suppress(IntegrityError):
        place("ada", 13)


def catch_without_a_savepoint(session: Any, settlement: Settlement) -> None:
    with suppress(LookupError), transaction.atomic(savepoint=False):
        place("ada")
        raise LookupError


def mark_for_rollback(session: Any, settlement: Settlement) -> None:
    place("ada")
    transaction.set_rollback(True)


def close_the_connection(session: Any, settlement: Settlement) -> None:
    place("ada")
    connections["default"].close()


def commit_the_session(session: Any, settlement: Settlement) -> None:
    place("ada")
    session.commit()


def roll_the_session_back(session: Any, settlement: Settlement) -> None:
    place("ada")
    session.rollback()


def commit_django(session: Any, settlement: Settlement) -> None:
    place("ada")
    transaction.commit()


def roll_psycopg_back(session: Any, settlement: Settlement) -> None:
    connections["default"].connection.rollback()
    place("ada")


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (catch_without_a_block, "a callback closed Django's connection, called transaction.set_rollback(True)"),
        (catch_without_a_savepoint, "or caught a database error outside"),
        (mark_for_rollback, "a callback closed Django's connection, called transaction.set_rollback(True)"),
        (close_the_connection, "a callback closed Django's connection"),
        (commit_the_session, "a callback must not commit"),
        (roll_the_session_back, "a callback must not roll back"),
        (commit_django, "raised TransactionManagementError"),
        (roll_psycopg_back, "a callback has ended its transaction itself"),
    ],
)
def test_no_callback_ends_the_transaction_or_leaves_it_half(
    shop: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, work: Work, says: str
) -> None:
    id = put_one(shop, ob)

    run(shop, ob, work)

    assert customers(shop) == []
    assert state(shop, id) != "delivered"
    assert kept(shop, id).state == "delivered"
    assert says in "\n".join(warnings_in(caplog))


@pytest.mark.parametrize("raised", [LookupError, SystemExit])
def test_a_hook_of_on_commit_runs_after_the_commit_and_cannot_undo_it(
    shop: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, raised: type[BaseException]
) -> None:
    id = put_one(shop, ob)
    seen: list[Any] = []

    def hook() -> None:
        seen.append((state(shop, id), customers(shop)))
        raise raised

    def callback(session: Any, settlement: Settlement) -> None:
        place("ada")
        transaction.on_commit(hook)

    assert run(shop, ob, callback) == 1

    assert seen == [("delivered", ["ada"])]
    assert f"a hook of transaction.on_commit raised {raised.__name__}" in caplog.text
    assert "tried again" not in caplog.text


def test_a_database_on_which_django_does_not_commit_is_refused(
    shop: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every settlement would be undone, and the effect sent again."""
    id = put_one(shop, ob)
    monkeypatch.setitem(connections.settings["default"], "AUTOCOMMIT", False)

    run(shop, ob, lambda session, settlement: place("ada"))

    assert (customers(shop), kept(shop, id).state) == ([], "delivered")
    assert "set AUTOCOMMIT = True for this database" in caplog.text


# --- errors of the database


def fail(sqlstate: str) -> None:
    with connections["default"].cursor() as cursor:
        cursor.execute(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{sqlstate}'; END $$")


def end_connection() -> None:
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")


def fail_once(end: Callable[[], None], tries: list[None]) -> Work:
    def callback(session: Any, settlement: Settlement) -> None:
        place(f"try {len(tries)}")
        tries.append(None)
        if len(tries) == 1:
            end()

    return callback


@pytest.mark.parametrize(
    "end", [*(partial(fail, code) for code in ("40001", "40P01", "55P03", "53100")), end_connection]
)
def test_an_error_that_passes_is_no_failure_of_the_callback(
    shop: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, end: Callable[[], None]
) -> None:
    id = put_one(shop, ob)

    asyncio.run(_run_until_settled(make(ob, shop.engine, fail_once(end, []))))

    assert (state(shop, id), customers(shop)) == ("delivered", ["try 1"])
    assert "its callback" not in caplog.text


@pytest.mark.parametrize("is_in_block", [False, True])
def test_a_lost_connection_that_a_callback_caught_is_no_failure_of_it(
    shop: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, is_in_block: bool
) -> None:
    id = put_one(shop, ob)

    def catching() -> None:
        with suppress(DatabaseError), transaction.atomic() if is_in_block else nullcontext():
            end_connection()

    asyncio.run(_run_until_settled(make(ob, shop.engine, fail_once(catching, []))))

    assert (state(shop, id), customers(shop)) == ("delivered", ["try 1"])
    assert "its callback" not in caplog.text


async def _run_until_settled(work: Dispatcher) -> None:
    async with asyncio.timeout(20):
        assert await work.run_once() == 1


def test_a_constraint_that_fails_at_the_commit_fails_the_callback(
    shop: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """Django's foreign keys are checked at the commit."""
    with shop.owner() as connection:
        connection.execute(sa.text("CREATE TABLE late (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
        connection.execute(sa.text("GRANT ALL ON late TO PUBLIC"))
    id = put_one(shop, ob)

    def callback(session: Any, settlement: Settlement) -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute("INSERT INTO late VALUES (1), (1)")

    run(shop, ob, callback)

    assert kept(shop, id).state == "delivered"
    assert state(shop, id) == "retry"
    assert "its callback raised" in caplog.text
    assert "IntegrityError" in caplog.text


def test_a_callback_that_hangs_is_given_up_and_holds_nothing(shop: Database, ob: outbox.Outbox) -> None:
    id = put_one(shop, ob)

    def callback(session: Any, settlement: Settlement) -> None:
        place("late")
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT pg_sleep(60)")

    run(shop, ob, callback, callback_timeout=timedelta(milliseconds=300))

    assert reasons(shop, id) == ["delivered, but its callback took longer than 0.3 s"]
    assert customers(shop) == []


# --- refused at the start


def test_another_database_of_django_is_refused_at_the_start(
    shop: Database, ob: outbox.Outbox, server_url: sa.URL
) -> None:
    use_django(Database(server_url), "READ_COMMITTED", [])
    work = make(ob, shop.engine, write_both(ob))

    with pytest.raises(ConfigurationError, match="callback_transactions is on another database than the dispatcher"):
        asyncio.run(work.check())


def test_a_fleet_refuses_the_transactions_of_one_database() -> None:
    with pytest.raises(ConfigurationError, match="a fleet serves several databases"):
        Fleet({}, callback_transactions=DjangoTransactions())


def test_a_schedule_writes_by_django_with_the_record_of_its_instant(shop: Database, ob: outbox.Outbox) -> None:
    effects, fails = Operations(), [True, False]

    @effects.periodic("@hourly", name="report")
    def report(session: Any, tick: Tick) -> None:
        place("ada")
        ob.enqueue(session, "crm.upsert", {"at": tick.at.isoformat()})
        if fails.pop(0):
            raise ValueError("no figures")

    settings: dict[str, Any] = {"callback_transactions": DjangoTransactions(), "adapters": {"crm": MemoryAdapter()}}

    def run_once() -> int:
        return asyncio.run(dispatcher(shop.engine, ob, include=[effects], **settings).run_once())

    run_once()
    with shop.observer.begin() as connection:
        at = sa.func.date_trunc("hour", sa.func.now()) - HOUR
        connection.execute(sa.update(TABLES.schedule).values(enqueued_to=at))

    assert (run_once(), customers(shop)) == (0, [])
    assert (run_once(), customers(shop)) == (1, ["ada"])
    assert (run_once(), customers(shop)) == (0, ["ada"])
