"""Listeners of a session may enqueue: in a flush, in a commit, beside the caller or alone."""

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import Order
from support.enqueued import enqueue, listen, parents

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]


@pytest.mark.parametrize("moment", ["before_flush", "after_flush", "after_flush_postexec", "before_commit"])
def test_a_listener_may_enqueue(database, ob, moment):
    with database.session() as session:
        listen(session, moment, lambda session: enqueue(ob, session, "from the listener"))
        session.add(Order(customer="ada", amount=2000))
        session.commit()

    assert parents(database) == ["from the listener"]


@pytest.mark.parametrize("moment", ["before_flush", "after_flush", "after_flush_postexec"])
def test_a_listener_may_enqueue_beside_the_caller(database, ob, moment):
    with database.session() as session:
        listen(session, moment, lambda session: enqueue(ob, session, "from the listener"))
        session.add(Order(customer="ada", amount=2000))
        enqueue(ob, session, "from the caller")
        session.commit()

    assert parents(database) == ["from the caller", "from the listener"]


@pytest.mark.parametrize("moment", ["before_insert", "after_insert", "before_update", "after_update"])
def test_a_mapper_listener_may_enqueue(database, ob, moment):
    """And nothing warns, which would fail this test."""

    def charge(mapper, connection, order):
        enqueue(ob, sa.orm.object_session(order), "from the listener")

    sa.event.listen(Order, moment, charge)
    try:
        with database.session() as session:
            order = Order(customer="ada", amount=2000)
            session.add(order)
            if moment.endswith("update"):
                session.flush()
                order.amount = 1
            session.commit()
    finally:
        sa.event.remove(Order, moment, charge)

    assert parents(database) == ["from the listener"]


def test_a_session_class_of_the_apps_own_with_its_own_listener_may_enqueue(database, ob):
    class AppSession(Session):
        pass

    @sa.event.listens_for(AppSession, "before_flush")
    def charge_new_orders(session, context, instances):
        for order in session.new:
            enqueue(ob, session, f"order of {order.customer}")

    with AppSession(database.engine) as session:
        session.add(Order(customer="ada", amount=2000))
        session.commit()

    assert parents(database) == ["order of ada"]


def test_a_listener_may_enqueue_in_the_commit_of_a_session_that_never_did(database, ob):
    """The last moments: no flush follows, and the session's commit is the first that the outbox hears of it."""
    with database.session() as session:
        listen(session, "before_commit", lambda session: enqueue(ob, session, "from the listener"))
        session.connection()
        session.commit()

    assert parents(database) == ["from the listener"]


def test_a_listener_may_enqueue_in_a_flush_that_then_has_nothing_to_do(database, ob):
    def enqueue_and_forget(session):
        enqueue(ob, session, "from the listener")
        session.expunge_all()

    with database.session() as session:
        listen(session, "before_flush", enqueue_and_forget)
        session.add(Order(customer="ada", amount=2000))
        session.commit()

    assert database.orders == []
    assert parents(database) == ["from the listener"]


def test_a_savepoint_open_at_the_commit_keeps_what_its_listeners_enqueue(database, ob):
    with database.session() as session:
        transaction = session.begin()
        savepoint = session.begin_nested()
        sa.event.listen(
            session,
            "after_transaction_end",
            lambda session, ended: ended is savepoint and enqueue(ob, session, "from the listener"),
        )
        transaction.commit()

    assert parents(database) == ["from the listener"]
