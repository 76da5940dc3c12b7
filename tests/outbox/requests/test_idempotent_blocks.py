"""How a claim's block may end: with an answer, or with nothing kept and the key free."""

import pytest
import sqlalchemy as sa
from support.database import ALL, CHARGE, PAYLOAD, REQUEST, Order, colliding_order

import outbox

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

LOST = (
    "the transaction of the claim on key 'retry-001' was rolled back, closed or committed inside its block, and cannot be"
    " committed any more: roll the session back after the block and run the request again"
)
COMMITTED = (
    "the session was committed inside the outbox.idempotent block of key 'retry-001': the record, the rows and the"
    " entries must commit together, so commit after the block"
)


class Boom(Exception):
    pass


def work(session, ob):
    session.add(Order(customer="ada", amount=1))
    ob.enqueue(session, CHARGE, PAYLOAD)


def swallow(kind, call, *arguments):
    with pytest.raises(kind):
        call(*arguments)


# Each handler spoils its block in one way. The second value is what comes out of the block.


def raise_at_once(session, claim, ob):
    work(session, ob)
    raise Boom


def raise_after_a_flush(session, claim, ob):
    work(session, ob)
    session.flush()
    raise Boom


def raise_after_the_answer(session, claim, ob):
    work(session, ob)
    claim.respond(201)
    raise Boom


def work_after_a_rejection(session, claim, ob):
    claim.reject(402)
    work(session, ob)


def raise_in_a_savepoint(session, claim, ob):
    work(session, ob)
    with session.begin_nested():
        session.add(Order(customer="ada", amount=2))
        raise Boom


def raise_with_a_savepoint_left_open(session, claim, ob):
    work(session, ob)
    session.begin_nested()
    session.add(Order(customer="ada", amount=2))
    session.flush()
    raise Boom


def give_no_answer(session, claim, ob):
    work(session, ob)


def answer_badly(session, claim, ob):
    work(session, ob)
    claim.respond(99)


def answer_twice(session, claim, ob):
    work(session, ob)
    claim.respond(201)
    claim.respond(200)


def commit(session, claim, ob):
    work(session, ob)
    session.commit()


def commit_after_the_answer(session, claim, ob):
    work(session, ob)
    claim.respond(201)
    session.commit()


def roll_back(session, claim, ob):
    work(session, ob)
    session.rollback()
    claim.respond(201)


def roll_back_after_the_answer(session, claim, ob):
    work(session, ob)
    claim.respond(201)
    session.rollback()


def roll_back_and_write(session, claim, ob):
    session.rollback()
    session.add(Order(customer="ada", amount=1))
    session.flush()
    claim.respond(201)


def roll_back_and_enqueue(session, claim, ob):
    session.rollback()
    ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")
    claim.respond(201)


def close_the_session(session, claim, ob):
    work(session, ob)
    session.close()
    claim.respond(201)


def fail_a_flush(session, claim, ob):
    work(session, ob)
    session.add(colliding_order())
    session.flush()


def fail_a_flush_and_answer(session, claim, ob):
    work(session, ob)
    session.add(colliding_order())
    swallow(sa.exc.IntegrityError, session.flush)
    claim.respond(409)


def fail_a_flush_and_reject(session, claim, ob):
    work(session, ob)
    session.add(colliding_order())
    swallow(sa.exc.IntegrityError, session.flush)
    claim.reject(409)


def fail_the_last_flush(session, claim, ob):
    work(session, ob)
    session.add(colliding_order())
    claim.respond(201)


def enqueue_a_duplicate(session, claim, ob):
    work(session, ob)
    ob.enqueue(session, CHARGE, PAYLOAD, parent="enqueued before")
    claim.respond(201)


def open_another_claim(session, claim, ob):
    work(session, ob)
    claim.respond(201)
    with ob.idempotent(session, "retry-002", scope="acct_1", content=REQUEST):
        pass


SPOILT = {
    raise_at_once: Boom,
    raise_after_a_flush: Boom,
    raise_after_the_answer: Boom,
    work_after_a_rejection: outbox.AlreadyAnswered,
    raise_in_a_savepoint: Boom,
    raise_with_a_savepoint_left_open: Boom,
    give_no_answer: outbox.NotAnswered,
    answer_badly: outbox.InvalidValue,
    answer_twice: outbox.AlreadyAnswered,
    commit: outbox.ClaimOpen,
    commit_after_the_answer: outbox.ClaimOpen,
    roll_back: outbox.ClaimLost,
    roll_back_after_the_answer: outbox.ClaimLost,
    # inside `async with session.begin()` SQLAlchemy itself refuses what follows a rollback
    roll_back_and_write: (outbox.ClaimLost, sa.exc.InvalidRequestError),
    roll_back_and_enqueue: outbox.ClaimLost,
    close_the_session: outbox.ClaimLost,
    fail_a_flush: sa.exc.IntegrityError,
    fail_a_flush_and_answer: outbox.ClaimLost,
    fail_a_flush_and_reject: outbox.ClaimLost,
    fail_the_last_flush: sa.exc.IntegrityError,
    enqueue_a_duplicate: outbox.DuplicateEntry,
    open_another_claim: outbox.ClaimOpen,
}


@pytest.fixture
def before(database, ob):
    """The rows with which the handlers collide."""
    with database.begin() as session:
        session.add(colliding_order())
        ob.enqueue(session, CHARGE, PAYLOAD, parent="enqueued before")
    return {"orders": 1, "records": 0, "entries": 1, "queue": 1}


@pytest.mark.every_value
@pytest.mark.parametrize(("handler", "error"), SPOILT.items(), ids=[handler.__name__ for handler in SPOILT])
def test_a_spoilt_block_keeps_nothing_even_if_its_caller_commits(client, database, ob, before, handler, error):
    caught = client.commit_despite(lambda session, claim: handler(session, claim, ob))

    assert isinstance(caught, error)
    assert database.counts() == before
    assert client.request().status == 201


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        (commit, COMMITTED),
        (roll_back, LOST),
        (roll_back_after_the_answer, LOST),
        (
            fail_a_flush_and_answer,
            "a statement failed inside the block of key 'retry-001', and the handler continued: nothing of the block is kept. Let"
            " the statement's error leave the block",
        ),
        (
            give_no_answer,
            "the outbox.idempotent block of key 'retry-001' ended without claim.respond(), claim.accept() or claim.reject()",
        ),
        (answer_twice, "respond after an answer: the block of key 'retry-001' already has one"),
        (
            open_another_claim,
            "this session already has an open outbox.idempotent or outbox.inbox block: close it before opening another",
        ),
    ],
)
def test_a_spoilt_block_says_what_was_wrong(client, ob, before, handler, text):
    with pytest.raises(outbox.ClaimError) as caught:
        client.request(lambda session, claim: handler(session, claim, ob))

    assert str(caught.value) == text


def test_a_request_can_be_rejected_after_a_statement_of_it_has_failed(client, database):
    def fail_and_reject(session, claim):
        swallow(sa.exc.DBAPIError, session.execute, sa.text("SELECT no_such_column"))
        claim.reject(409)

    assert client.request(fail_and_reject).status == 409
    assert client.request().status == 409


def test_a_commit_that_was_refused_leaves_the_block_as_it_was(client, database, ob):
    def commit_and_continue(session, claim):
        work(session, ob)
        swallow(outbox.ClaimOpen, session.commit)
        claim.respond(201)

    assert client.request(commit_and_continue).status == 201
    assert database.counts() == ALL


# --- a transaction that is ended without the session


def commit_on_the_connection(session, claim, ob):
    work(session, ob)
    session.flush()
    session.connection().commit()
    claim.respond(201)


def commit_on_the_connection_after_the_answer(session, claim, ob):
    work(session, ob)
    claim.respond(201)
    session.connection().commit()


def commit_on_the_connection_and_enqueue(session, claim, ob):
    session.connection().commit()
    ob.enqueue(session, CHARGE, PAYLOAD)


def commit_on_the_connection_and_read(session, claim, ob):
    session.connection().commit()
    session.connection().execute(sa.text("SELECT 1"))
    claim.respond(201)


def roll_back_on_the_connection(session, claim, ob):
    work(session, ob)
    session.connection().rollback()
    claim.respond(201)


@pytest.mark.every_value
@pytest.mark.filterwarnings("ignore:.*already deassociated from connection:sqlalchemy.exc.SAWarning")
@pytest.mark.parametrize(
    "handler",
    [
        commit_on_the_connection,
        commit_on_the_connection_after_the_answer,
        commit_on_the_connection_and_enqueue,
        commit_on_the_connection_and_read,
        roll_back_on_the_connection,
    ],
)
def test_a_transaction_ended_on_its_connection_stores_no_answer_and_raises(client, database, ob, handler):
    with pytest.raises(outbox.ClaimLost) as caught:
        client.request(lambda session, claim: handler(session, claim, ob))

    assert str(caught.value) == LOST
    assert database.counts()["records"] == 0
