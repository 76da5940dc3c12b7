"""A callback writes in the dispatcher's transaction: if it ends that itself, or the commit fails, nothing of it is kept."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.callbacks import Shop, kept, warnings_in
from support.database import Database, Order, colliding_order
from support.entries import HOUR, age, put_one

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.callbacks import Settlement


@pytest.fixture(params=["sync", "async"])
def shop(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Shop:
    """The app with callbacks on a Session, and on an AsyncSession."""
    return Shop(database, ob, is_async=request.param == "async")


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
