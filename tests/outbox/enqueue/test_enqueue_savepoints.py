"""An entry lives and dies with the caller's savepoints."""

import asyncio

import pytest
import sqlalchemy as sa
from support.database import Order, colliding_order
from support.enqueued import enqueue, expire_all, forget_all, listen, parents

import outbox
from outbox.sessions.session import flush_all

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]


def test_an_enqueue_after_a_released_savepoint_is_kept(database, ob):
    with database.session() as session:
        with session.begin_nested():
            enqueue(ob, session, "invoice:41")
        enqueue(ob, session, "invoice:42")
        session.commit()

    assert sorted(parents(database)) == ["invoice:41", "invoice:42"]


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


def test_what_is_enqueued_inside_a_released_savepoint_is_kept(database, ob):
    with database.begin() as session, session.begin_nested():
        enqueue(ob, session, "inside")

    assert parents(database) == ["inside"]


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


def test_a_savepoint_of_an_async_session_takes_its_entries_along(database, ob):
    async def work():
        async with database.async_session() as session:
            enqueue(ob, session, "before")
            savepoint = await session.begin_nested()
            enqueue(ob, session, "inside")
            await savepoint.rollback()
            await session.commit()

    asyncio.run(work())

    assert parents(database) == ["before"]


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
