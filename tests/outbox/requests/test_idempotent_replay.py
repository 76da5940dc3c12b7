"""Inside a replay nothing is written, enqueued or answered again, whatever the caller does with the error."""

import pytest
import sqlalchemy as sa
from support.database import ALL, CHARGE, PAYLOAD, REQUEST, Order

import outbox

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

TRACE = (
    "the request with key 'retry-001' was answered before. Check claim.replayed first and return claim.response, or"
    " use outbox.run_idempotent, which does"
)


def enqueue_under_the_claims_key(session, claim, ob):
    ob.enqueue(session, "email.send", PAYLOAD)


def enqueue_under_a_key_of_its_own(session, claim, ob):
    ob.enqueue(session, "email.send", PAYLOAD, parent="invoice:42")


def enqueue_in_another_outbox(session, claim, ob):
    other = outbox.Outbox(ob.configuration.keyring, env="other")
    other.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")


def respond(session, claim, ob):
    claim.respond(200)


def reject(session, claim, ob):
    claim.reject(402)


def add_an_order(session, claim, ob):
    session.add(Order(customer="eve", amount=1))


def add_an_order_and_flush(session, claim, ob):
    session.add(Order(customer="eve", amount=1))
    session.flush()


def change_an_order(session, claim, ob):
    session.scalars(sa.select(Order)).one().amount = 1


def delete_an_order(session, claim, ob):
    session.delete(session.scalars(sa.select(Order)).one())


def insert_in_bulk(session, claim, ob):
    session.execute(sa.insert(Order), [{"customer": "eve", "amount": 1}])


def insert_into_the_table(session, claim, ob):
    session.execute(sa.insert(Order.__table__).values(customer="eve", amount=1))


def update_in_bulk(session, claim, ob):
    session.execute(sa.update(Order).values(amount=1))


def delete_in_bulk(session, claim, ob):
    session.execute(sa.delete(Order))


def save_in_bulk(session, claim, ob):
    session.bulk_save_objects([Order(customer="eve", amount=1)])


def insert_on_the_connection(session, claim, ob):
    session.connection().execute(sa.insert(Order.__table__).values(customer="eve", amount=1))


def add_an_order_after_a_rollback(session, claim, ob):
    session.rollback()
    session.add(Order(customer="eve", amount=1))


def enqueue_after_a_rollback(session, claim, ob):
    session.rollback()
    ob.enqueue(session, "email.send", PAYLOAD, parent="invoice:42")


WORK = {
    enqueue_under_the_claims_key: "enqueue inside a replay: ",
    enqueue_under_a_key_of_its_own: "enqueue inside a replay: ",
    enqueue_in_another_outbox: "enqueue inside a replay: ",
    respond: "respond inside a replay: ",
    reject: "reject inside a replay: ",
    add_an_order: "a write inside a replay: ",
    add_an_order_and_flush: "a write inside a replay: ",
    change_an_order: "a write inside a replay: ",
    delete_an_order: "a write inside a replay: ",
    insert_in_bulk: "a write inside a replay: ",
    insert_into_the_table: "a write inside a replay: ",
    update_in_bulk: "a write inside a replay: ",
    delete_in_bulk: "a write inside a replay: ",
    save_in_bulk: "a write inside a replay: ",
    insert_on_the_connection: "a write inside a replay: ",
    add_an_order_after_a_rollback: "",
    enqueue_after_a_rollback: "",
}


@pytest.mark.parametrize(("work", "text"), WORK.items(), ids=[work.__name__ for work in WORK])
def test_work_inside_a_replay_is_refused(client, database, ob, work, text):
    client.request()

    # after a rollback inside `async with session.begin()`, SQLAlchemy itself refuses the rest
    with pytest.raises((outbox.ClaimError, sa.exc.InvalidRequestError)) as caught:
        client.request(lambda session, claim: work(session, claim, ob), even_in_a_replay=True)

    if text:
        assert isinstance(caught.value, outbox.AlreadyAnswered)
        assert str(caught.value) == text + TRACE
    assert database.counts() == ALL
    assert [(order.customer, order.amount) for order in database.orders] == [("ada", 2000)]


@pytest.mark.parametrize("work", WORK, ids=[work.__name__ for work in WORK])
def test_a_caller_who_survives_the_refusal_and_commits_keeps_nothing_of_it(client, database, ob, work):
    client.request()

    client.commit_despite(lambda session, claim: work(session, claim, ob))

    assert database.counts() == ALL
    assert [(order.customer, order.amount) for order in database.orders] == [("ada", 2000)]


def test_a_commit_inside_a_replay_is_refused(client, database):
    client.request()

    with pytest.raises(outbox.ClaimOpen):
        client.request(lambda session, claim: session.commit(), even_in_a_replay=True)


def test_reading_inside_a_replay_is_free(client, database):
    client.request()
    seen = []

    client.request(
        lambda session, claim: seen.extend(session.scalars(sa.select(Order.customer))), even_in_a_replay=True
    )

    assert seen == ["ada"]


def test_an_attribute_set_to_what_it_was_is_no_write(client, database):
    def set_the_same(session, claim):
        order = session.scalars(sa.select(Order)).one()
        order.amount = order.amount

    client.request()

    assert client.request(set_the_same, even_in_a_replay=True).status == 201


def test_what_the_caller_wrote_before_a_replay_is_kept(database, ob, client):
    client.request()

    with database.begin() as session:
        session.add(Order(customer="before", amount=1))
        ob.enqueue(session, CHARGE, PAYLOAD, parent="before")
        with ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST) as claim:
            assert claim.replayed

    assert "before" in [order.customer for order in database.orders]
    assert "before" in [entry.parent for entry in database.entries]


def test_after_a_replay_the_session_is_as_free_as_before(client, database, ob):
    client.request()

    with database.begin() as session:
        with ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST):
            pass
        session.add(Order(customer="after", amount=1))
        session.flush()
        session.execute(sa.update(Order).where(Order.customer == "after").values(amount=2))
        ob.enqueue(session, CHARGE, PAYLOAD, parent="after")

    assert [order.amount for order in database.orders if order.customer == "after"] == [2]
    assert "after" in [entry.parent for entry in database.entries]
