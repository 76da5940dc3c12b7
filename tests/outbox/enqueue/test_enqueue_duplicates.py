"""One effect that is enqueued twice is one entry: refused or kept, across sessions, transactions and rotations."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy.orm import Session
from support.database import CHARGE, PAYLOAD, Order

import outbox

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb, pytest.mark.in_portable_mode]

TEXT = (
    "'stripe.payment_intents.create' of parent 'invoice:42' (scope 'acct_1', source 'app') with discriminator 'line:7'"
    " was enqueued before: give another discriminator for another effect, or if_exists='ignore' to keep the first"
)
PARENT = outbox.ParentKey("invoice:42", scope="acct_1")
OLD, NEW = bytes(range(32)), bytes(range(32, 64))


def enqueue(ob, session, *, amount=2000, if_exists="raise", discriminator="line:7"):
    return ob.enqueue(
        session, CHARGE, {"amount": amount}, parent=PARENT, discriminator=discriminator, if_exists=if_exists
    )


def flush(session):
    """A flush that has something to write."""
    session.add(Order(customer="ada", amount=2000))
    session.flush()


def stored(database):
    return [entry.payload for entry in database.entries]


def test_a_second_enqueue_in_one_session_is_refused_at_once_by_name(database, ob):
    with database.session() as session:
        first = enqueue(ob, session)
        with pytest.raises(outbox.DuplicateEntry) as caught:
            enqueue(ob, session, amount=1)
        session.commit()

    assert str(caught.value) == TEXT
    assert caught.value.entry_id == first.id
    assert stored(database) == [b'{"amount":2000}']


@pytest.mark.parametrize("others", [0, 3])
def test_a_second_enqueue_after_the_first_was_written_fails_at_the_flush(database, ob, others):
    with database.begin() as session:
        first = enqueue(ob, session)

    with database.session() as session:
        session.add(Order(customer="ada", amount=2000))
        enqueue(ob, session, amount=1)
        for number in range(others):
            enqueue(ob, session, discriminator=f"other {number}")
        with pytest.raises(outbox.DuplicateEntry) as caught:
            session.flush()
        session.rollback()

    assert str(caught.value) == TEXT
    assert caught.value.entry_id == first.id
    assert stored(database) == [b'{"amount":2000}']
    assert len(database.queue) == 1
    assert database.orders == []


def test_a_duplicate_leaves_the_transaction_alive(database, ob):
    with database.begin() as session:
        enqueue(ob, session)

    with database.begin() as session:
        enqueue(ob, session)
        with pytest.raises(outbox.DuplicateEntry):
            flush(session)

    assert len(database.orders) == 1
    assert len(database.entries) == len(database.queue) == 1


def test_ignore_keeps_the_first_of_two_pending_ones(database, ob):
    with database.begin() as session:
        first = enqueue(ob, session, amount=1)
        second = enqueue(ob, session, amount=2, if_exists="ignore")

    assert second == first
    assert stored(database) == [b'{"amount":1}']


@pytest.mark.parametrize("others", [0, 3])
def test_ignore_keeps_the_first_of_two_transactions(database, ob, others):
    with database.begin() as session:
        first = enqueue(ob, session, amount=1)

    with database.begin() as session:
        second = enqueue(ob, session, amount=2, if_exists="ignore")
        for number in range(others):
            enqueue(ob, session, amount=3, discriminator=f"other {number}")

    assert second == first
    assert sorted(stored(database)) == [b'{"amount":1}'] + [b'{"amount":3}'] * others
    assert len(database.queue) == 1 + others


def test_an_entry_that_was_rolled_back_may_be_enqueued_again(database, ob):
    with database.session() as session:
        enqueue(ob, session, amount=1)
        session.rollback()
        enqueue(ob, session, amount=2)
        session.commit()

    assert stored(database) == [b'{"amount":2}']


@pytest.mark.parametrize(
    "changed",
    [
        {"operation": "email.send"},
        {"discriminator": "line:8"},
        {"parent": outbox.ParentKey("invoice:42", scope="acct_2")},
        {"parent": outbox.ParentKey("invoice:43", scope="acct_1")},
        {"parent": outbox.ParentKey("invoice:42", scope="acct_1", source="http")},
    ],
)
def test_another_field_is_another_effect(sqlite, ob, changed):
    fields = {"operation": CHARGE, "parent": PARENT, "discriminator": "line:7"}

    with sqlite.begin() as session:
        ob.enqueue(session, payload=PAYLOAD, **fields)
        ob.enqueue(session, payload=PAYLOAD, **fields | changed)

    assert len(sqlite.entries) == 2


def test_another_environment_is_another_effect(sqlite, ob):
    staging = outbox.Outbox(outbox.Keyring({"k1": OLD}), env="staging")

    with sqlite.begin() as session:
        enqueue(ob, session)
        enqueue(staging, session)

    assert sorted(entry.env for entry in sqlite.entries) == ["staging", "test"]


@pytest.mark.parametrize("others", [0, 3])
def test_a_rotation_between_two_enqueues_keeps_one_entry_and_its_key(database, others):
    before = outbox.Outbox(outbox.Keyring({"k1": OLD}), env="test")
    after = outbox.Outbox(outbox.Keyring({"k1": OLD, "k2": NEW}, current="k2"), env="test")

    with database.begin() as session:
        first = enqueue(before, session)
    with database.begin() as session:
        second = enqueue(after, session, if_exists="ignore")
        new = [enqueue(after, session, if_exists="ignore", discriminator=f"new {n}") for n in range(others)]
        again = enqueue(after, session, if_exists="ignore")

    keys = {row.id: outbox.keys.encode_native(row.tag) for row in database.entries}
    assert second == again == first
    assert keys == {entry.id: entry.child_key for entry in (first, *new)}
    assert {row.kid for row in database.entries if row.id == first.id} == {"k1"}
    assert len(database.queue) == 1 + others


def test_a_rotation_does_not_hide_a_duplicate(database):
    before = outbox.Outbox(outbox.Keyring({"k1": OLD}), env="test")
    after = outbox.Outbox(outbox.Keyring({"k1": OLD, "k2": NEW}, current="k2"), env="test")
    with database.begin() as session:
        enqueue(before, session)

    with database.session() as session:
        enqueue(after, session)
        with pytest.raises(outbox.DuplicateEntry):
            session.commit()

    assert len(database.entries) == 1


def test_transactions_with_equal_entries_in_opposite_order_do_not_deadlock(postgresql, ob):
    """Unsorted, each would hold what the other waits for: PostgreSQL would kill one of them after a second (40P01)."""
    rounds, entries_per_round = 5, 200
    barrier = threading.Barrier(2)

    def enqueue_all(names):
        for round_ in range(rounds):
            barrier.wait(60)
            with postgresql.begin() as session:
                for name in names:
                    enqueue(ob, session, discriminator=f"{round_}/{name}", if_exists="ignore")

    names = list(range(entries_per_round))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(enqueue_all, [names, names[::-1]]))

    assert len(postgresql.entries) == len(postgresql.queue) == rounds * entries_per_round


# --- which one it was, among others that are new


def refused(ob, session, *discriminators):
    """Enqueue them together, flush, and return the id that is refused."""
    for discriminator in discriminators:
        enqueue(ob, session, discriminator=discriminator)
    with pytest.raises(outbox.DuplicateEntry) as caught:
        flush(session)
    return caught.value.entry_id


@pytest.mark.parametrize("number", range(4))
def test_the_duplicate_is_named_when_this_transaction_wrote_the_first(database, ob, number):
    names = [f"line:{each}" for each in range(4)]
    with database.session() as session:
        first = enqueue(ob, session, discriminator=names[number])
        flush(session)

        assert refused(ob, session, *names) == first.id


def test_the_duplicate_is_named_when_a_savepoint_has_written_the_first(database, ob):
    with database.session() as session:
        with session.begin_nested():
            first = enqueue(ob, session, discriminator="kept")
        savepoint = session.begin_nested()
        enqueue(ob, session, discriminator="undone")
        flush(session)
        savepoint.rollback()

        assert refused(ob, session, "undone", "kept", "new") == first.id


def test_the_duplicate_is_named_when_another_session_has_written_the_first(database, ob):
    with database.engine.connect() as connection, connection.begin():
        with Session(connection) as session:
            first = enqueue(ob, session, discriminator="first")
            flush(session)
        with Session(connection) as session:
            assert refused(ob, session, "a", "first", "z") == first.id


def test_several_duplicates_from_here_and_elsewhere_are_kept_as_they_were(database, ob):
    with database.begin() as session:
        enqueue(ob, session, amount=1, discriminator="elsewhere")
    with database.begin() as session:
        enqueue(ob, session, amount=2, discriminator="here")
        flush(session)
        for name in ("elsewhere", "here", "new"):
            enqueue(ob, session, amount=3, discriminator=name, if_exists="ignore")

    assert sorted(stored(database)) == [b'{"amount":1}', b'{"amount":2}', b'{"amount":3}']
