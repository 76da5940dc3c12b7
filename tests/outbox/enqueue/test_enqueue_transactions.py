"""An entry lives and dies with the caller's transaction and savepoints, whatever happens to the session's own objects."""

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import CHARGE, PAYLOAD, Order, colliding_order, statements_of
from support.enqueued import enqueue, expire_all, forget_all, listen, parents
from support.python_processes import run_python

import outbox
from outbox.errors import ClaimError
from outbox.sessions.session import flush_all

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

# --- rollback, close, reuse


@pytest.mark.parametrize("flushed", [True, False])
def test_a_rollback_takes_the_entries_along(database, ob, flushed):
    with database.session() as session:
        enqueue(ob, session, "gone")
        if flushed:
            flush_all(session)
        session.rollback()
        enqueue(ob, session, "kept")
        session.commit()

    assert parents(database) == ["kept"]


@pytest.mark.parametrize("end", ["close", "reset", "rollback", "invalidate"])
@pytest.mark.parametrize("in_transaction", [True, False])
def test_a_session_that_is_used_again_has_nothing_left_over(database, ob, end, in_transaction):
    session = database.session()
    if in_transaction:
        session.connection()
    enqueue(ob, session, "gone")

    getattr(session, end)()
    enqueue(ob, session, "kept")
    session.commit()
    session.close()

    assert parents(database) == ["kept"]


def test_a_failed_flush_takes_the_entries_of_its_transaction_along(database, ob):
    with database.begin() as session:
        session.add(colliding_order())

    with database.session() as session:
        enqueue(ob, session, "gone")
        session.add(colliding_order())
        with pytest.raises(sa.exc.IntegrityError):
            session.commit()
        session.rollback()
        enqueue(ob, session, "kept")
        session.commit()

    assert parents(database) == ["kept"]


def test_two_flushes_write_what_was_enqueued_before_each(database, ob):
    with database.session() as session:
        for parent in ("first", "second"):
            enqueue(ob, session, parent)
            session.add(Order(customer="ada", amount=2000))
            session.flush()
        with statements_of(database.engine) as sent:
            session.commit()

    assert sent == []
    assert parents(database) == ["first", "second"]


def test_an_enqueue_in_an_after_commit_listener_is_refused(database, ob):
    with database.session() as session:
        sa.event.listen(session, "after_commit", lambda committed: enqueue(ob, committed, "invoice:43"))
        enqueue(ob, session, "invoice:42")

        with pytest.raises(outbox.NoTransaction, match="enqueue in an after_commit listener is too late"):
            session.commit()

    assert parents(database) == ["invoice:42"]


def test_a_query_flushes_what_is_pending(database, ob):
    with database.session() as session:
        enqueue(ob, session, "invoice:42")
        session.add(Order(customer="ada", amount=2000))

        session.scalars(sa.select(Order.id)).all()  # SQLAlchemy 2.0 flushes for queries of mapped classes only
        entries = session.connection().scalars(sa.select(ob.configuration.tables.entry.c.parent)).all()

    assert entries == ["invoice:42"]


def test_without_autoflush_the_commit_writes_all_the_same(database, ob):
    with database.session(autoflush=False) as session:
        enqueue(ob, session, "invoice:42")
        session.commit()

    assert parents(database) == ["invoice:42"]


# --- whatever else is done to the session


@pytest.mark.parametrize("forget", ["expunge_all", "expire_all"])
def test_an_entry_outlives_what_makes_the_session_forget_its_objects(database, ob, forget):
    with database.session() as session:
        enqueue(ob, session, "invoice:42")
        getattr(session, forget)()
        session.commit()

    assert parents(database) == ["invoice:42"]


def test_an_entry_outlives_what_the_app_does_to_session_info(database, ob):
    """That dictionary is the app's: frameworks clear it between requests, or when a session is handed on."""
    with database.session() as session:
        enqueue(ob, session, "before")
        session.info.clear()
        with session.begin_nested():
            enqueue(ob, session, "inside")
            session.info.clear()
        session.info.clear()
        session.commit()

    assert parents(database) == ["before", "inside"]


def test_clearing_session_info_does_not_let_a_claim_commit_halfway(database, ob):
    def commit_halfway(session):
        with ob.idempotent(session, "retry-1", scope="ada", content=b""):
            session.add(Order(customer="ada", amount=2000))
            session.info.clear()
            session.commit()

    with database.session() as session, pytest.raises(ClaimError):
        commit_halfway(session)

    assert database.counts()["orders"] == 0


def test_an_entry_outlives_the_new_objects_that_were_to_be_flushed_with_it(database, ob):
    with database.session() as session:
        order = Order(customer="ada", amount=2000)
        session.add(order)
        enqueue(ob, session, "invoice:42")
        session.expunge(order)
        session.commit()

    assert database.orders == []
    assert parents(database) == ["invoice:42"]


def test_an_order_that_is_changed_and_deleted_does_not_disturb_the_entry(database, ob):
    with database.begin() as session:
        order = Order(customer="ada", amount=1)
        session.add(order)
        enqueue(ob, session, "first")
        session.flush()
        order.amount = 2
        enqueue(ob, session, "second")
        session.flush()
        session.delete(order)
        enqueue(ob, session, "third")

    assert database.orders == []
    assert parents(database) == ["first", "second", "third"]


def test_nothing_of_the_outbox_stays_among_the_sessions_objects(database, ob):
    with database.session() as session:
        order = Order(customer="ada", amount=1)
        session.add(order)
        enqueue(ob, session, "invoice:42")
        session.flush()

        assert list(session) == [order]


def test_entries_outlive_cleared_mappers(database, tmp_path):
    """Some tests of imperative mappings clear all of them: what the outbox does rests on none."""
    code = """
import sys, sqlalchemy as sa, outbox
from sqlalchemy.orm import Session, clear_mappers
ob = outbox.Outbox(outbox.Keyring.public(), env="test")
clear_mappers()
with Session(sa.create_engine(sys.argv[1])) as session, session.begin():
    ob.enqueue(session, "crm.upsert", {}, parent="invoice:42")
"""
    url = database.url.render_as_string(hide_password=False)
    run_python("-c", code, url, check=True)

    assert parents(database) == ["invoice:42"]


def test_a_session_that_begins_nothing_by_itself_is_refused_with_advice(database, ob):
    with database.session(autobegin=False) as session:
        with pytest.raises(outbox.NoTransaction, match="autobegin=False"):
            enqueue(ob, session, "too early")
        with session.begin():
            enqueue(ob, session, "invoice:42")

    assert parents(database) == ["invoice:42"]


@pytest.mark.parametrize("forget", [forget_all, expire_all])
def test_status_and_cancel_know_what_the_session_has_enqueued(database, ob, forget):
    with database.begin() as session:
        entry = ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")
        forget(session)
        (before,) = ob.status(session, "invoice:42")
        late = ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:43")
        forget(session)

        assert ob.cancel(session, entry.id)
        assert ob.cancel(session, late.id)
    assert before.state == "pending"


# --- An entry lives and dies with the caller's savepoints.


@pytest.mark.parametrize("flushed", [True, False])
def test_what_is_enqueued_around_a_savepoint_survives_its_rollback(database, ob, flushed):
    with database.begin() as session:
        enqueue(ob, session, "before")
        if flushed:
            flush_all(session)
        savepoint = session.begin_nested()
        enqueue(ob, session, "inside")
        if flushed:
            flush_all(session)
        savepoint.rollback()
        enqueue(ob, session, "after")

    assert parents(database) == ["after", "before"]


@pytest.mark.parametrize("flushed", [True, False])
@pytest.mark.parametrize(
    ("rolled_back", "kept"),
    [("inner", ["between", "outermost"]), ("outer", ["outermost"]), ("neither", ["between", "innermost", "outermost"])],
)
def test_of_two_nested_savepoints_each_takes_its_own(database, ob, flushed, rolled_back, kept):
    with database.begin() as session:
        enqueue(ob, session, "outermost")
        outer = session.begin_nested()
        enqueue(ob, session, "between")
        inner = session.begin_nested()
        enqueue(ob, session, "innermost")
        if flushed:
            flush_all(session)
        if rolled_back != "outer":
            inner.rollback() if rolled_back == "inner" else inner.commit()
        outer.rollback() if rolled_back == "outer" else outer.commit()

    assert parents(database) == kept


def test_a_flush_that_fails_in_a_savepoint_leaves_the_entries_before_it(database, ob):
    with database.begin() as session:
        session.add(colliding_order())

    with database.begin() as session:
        enqueue(ob, session, "before")
        savepoint = session.begin_nested()
        enqueue(ob, session, "inside")
        session.add(colliding_order())
        with pytest.raises(sa.exc.IntegrityError):
            session.flush()
        savepoint.rollback()
        enqueue(ob, session, "after")

    assert parents(database) == ["after", "before"]


def take_the_new_object_out(session):
    session.expunge(*session.new)


@pytest.mark.parametrize("forget", [forget_all, expire_all, take_the_new_object_out])
@pytest.mark.parametrize("autoflush", [True, False])
def test_an_entry_outlives_a_savepoint_that_is_begun_after_it(database, ob, forget, autoflush):
    with database.session(autoflush=autoflush) as session:
        session.add(Order(customer="ada", amount=1))
        enqueue(ob, session, "before")
        forget(session)
        savepoint = session.begin_nested()
        session.add(Order(customer="ada", amount=2))
        session.flush()
        savepoint.rollback()
        session.commit()

    assert parents(database) == ["before"]


@pytest.mark.parametrize("end", ["rollback", "close"])
def test_an_entry_that_a_rollback_took_back_is_written_again(database, ob, end):
    """Enqueued outside the savepoint as it is begun, and written in it: that is too late for what precedes it."""
    with database.begin() as session:
        listen(session, "after_transaction_create", lambda session: enqueue(ob, session, "invoice:42"))
        savepoint = session.begin_nested()
        session.add(Order(customer="ada", amount=2))
        session.flush()
        getattr(savepoint, end)()

    assert database.orders == []
    assert parents(database) == ["invoice:42"]


def test_a_released_savepoint_keeps_what_a_later_rollback_cannot_undo(database, ob):
    with database.begin() as session:
        listen(session, "after_transaction_create", lambda session: enqueue(ob, session, "invoice:42"))
        for end in ("commit", "rollback"):
            savepoint = session.begin_nested()
            session.add(Order(customer="ada", amount=2))
            session.flush()
            getattr(savepoint, end)()

    assert len(database.orders) == 1
    assert parents(database) == ["invoice:42"]


def test_a_savepoint_that_cannot_be_begun_leaves_the_session_as_it_was(database, ob):
    with database.begin() as session:
        enqueue(ob, session, "invoice:41")

    with database.begin() as session:
        enqueue(ob, session, "invoice:41")
        with pytest.raises(outbox.DuplicateEntry):
            session.begin_nested()
        assert not session.in_nested_transaction()
        enqueue(ob, session, "invoice:42")

    assert parents(database) == ["invoice:41", "invoice:42"]


# --- Listeners of a session may enqueue: in a flush, in a commit, beside the caller or alone.


@pytest.mark.parametrize("moment", ["before_flush", "after_flush", "after_flush_postexec", "before_commit"])
@pytest.mark.parametrize("others", [[], ["from the caller"]], ids=["alone", "beside the caller"])
def test_a_listener_may_enqueue(database, ob, moment, others):
    with database.session() as session:
        listen(session, moment, lambda session: enqueue(ob, session, "from the listener"))
        session.add(Order(customer="ada", amount=2000))
        for parent in others:
            enqueue(ob, session, parent)
        session.commit()

    assert parents(database) == [*others, "from the listener"]


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
