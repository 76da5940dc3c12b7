"""The transaction of one request: what it costs in round trips, what `reject` goes back to, and how it leaves its connection."""

from collections.abc import Callable
from contextlib import closing, nullcontext, suppress

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import CHARGE, PAYLOAD, Database, Order, colliding_order, statements_of

import outbox
from outbox.http import Policy, RequestTransaction
from outbox.http.answers import plain_answer
from outbox.requests.savepoints import request_savepoint

pytestmark = pytest.mark.as_app

BODY = b'{"amount": 2000}'
CREATED = outbox.Response(201, b'{"order": 1}', {"Content-Type": "application/json"})
NOTHING = {"orders": 0, "records": 0, "entries": 0, "queue": 0}
ALL = {"orders": 1, "records": 1, "entries": 1, "queue": 1}
MADE_READY = 6  # psycopg prepares what it has executed five times


def begin(session: Session, ob: outbox.Outbox, key: str = "retry-001", body: bytes = BODY) -> RequestTransaction:
    return RequestTransaction(session, Policy(outbox=ob), key, "acct_1", body)


def work(session: Session, ob: outbox.Outbox) -> Order:
    order = Order(customer="ada", amount=2000)
    session.add(order)
    ob.enqueue(session, CHARGE, PAYLOAD)
    return order


def place(session: Session, ob: outbox.Outbox, key: str = "retry-001") -> None:
    """A request, from its beginning to its end."""
    request = begin(session, ob, key)
    work(session, ob)
    request.finish(CREATED)


def earlier_order(database: Database, session: Session) -> Order:
    """One that was there before the request; the session has read it, in a transaction that is still open."""
    database.execute(sa.insert(Order).values(customer="earlier", amount=1))
    return session.scalars(sa.select(Order)).one()


def verbs(sent: list[str]) -> list[str]:
    return [statement.split()[0] for statement in sent]


class Boom(Exception): ...


# --- what it costs


def test_a_claim_in_a_new_session_takes_two_round_trips_more_than_no_claim(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    with statements_of(postgresql.engine) as sent, postgresql.session() as session:
        place(session, ob)

    assert verbs(sent) == ["SELECT", "SAVEPOINT", "WITH", "INSERT"]
    assert postgresql.counts() == ALL


def test_a_session_that_holds_something_keeps_its_own_kind_of_savepoint(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    with postgresql.session() as session:
        earlier = earlier_order(postgresql, session)
        with statements_of(postgresql.engine) as sent:
            request = begin(session, ob)
            earlier.amount = 2
            session.flush()
            request.claim.reject(402)
            assert earlier.amount == 1  # read again, as a rollback of a Session's own has it
            request.finish(plain_answer(request.claim.require_response()))

    assert verbs(sent) == ["SELECT", "SAVEPOINT", "UPDATE", "ROLLBACK", "SAVEPOINT", "SELECT", "RELEASE", "INSERT"]


def test_a_session_that_holds_something_earlier_keeps_its_kind_too(postgresql: Database, ob: outbox.Outbox) -> None:
    with postgresql.session() as session:
        earlier = earlier_order(postgresql, session)
        session.commit()
        request = begin(session, ob)
        earlier.amount = 2
        session.flush()
        request.claim.reject(402)
        request.finish(plain_answer(request.claim.require_response()))

        assert list(session) == [earlier]
        assert earlier.amount == 1


# --- back to the savepoint


def flush(session: Session, ob: outbox.Outbox) -> None:
    work(session, ob)
    session.flush()


def leave_pending(session: Session, ob: outbox.Outbox) -> None:
    work(session, ob)


def leave_a_savepoint_open(session: Session, ob: outbox.Outbox) -> None:
    flush(session, ob)
    session.begin_nested()
    session.add(Order(customer="bob", amount=1))
    session.begin_nested()
    ob.enqueue(session, "crm.upsert", PAYLOAD)


def fail_a_statement(session: Session, ob: outbox.Outbox) -> None:
    flush(session, ob)
    with pytest.raises(sa.exc.DBAPIError):
        session.execute(sa.text("SELECT no_such_column"))


each_work = pytest.mark.parametrize("do", [flush, leave_pending, leave_a_savepoint_open, fail_a_statement])


@pytest.mark.every_value
@each_work
def test_a_rejection_undoes_whatever_the_handler_did(
    database: Database, ob: outbox.Outbox, do: Callable[[Session, outbox.Outbox], None]
) -> None:
    with database.session() as session:
        request = begin(session, ob)
        do(session, ob)
        request.claim.reject(402, {"error": "declined"})
        request.finish(plain_answer(request.claim.require_response()))

    assert database.counts() == NOTHING | {"records": 1}


@pytest.mark.every_value
@each_work
def test_a_caller_who_survives_an_exception_and_commits_keeps_nothing(
    database: Database, ob: outbox.Outbox, do: Callable[[Session, outbox.Outbox], None]
) -> None:
    with database.session() as session:
        block = ob.idempotent(session, "retry-001", scope="acct_1", content=BODY)
        block.savepoint_of = request_savepoint
        with suppress(Boom), block:
            do(session, ob)
            raise Boom
        session.commit()

    assert database.counts() == NOTHING


@pytest.mark.parametrize("nested", [False, True])
def test_a_rejection_undoes_what_the_session_wrote_to_another_database(
    postgresql: Database, sqlite: Database, ob: outbox.Outbox, nested: bool
) -> None:
    elsewhere = {"bind_arguments": {"bind": sqlite.engine}}
    with postgresql.session() as session:
        request = begin(session, ob)
        with session.begin_nested() if nested else nullcontext():
            session.execute(sa.insert(Order).values(customer="ada", amount=1), **elsewhere)
        session.execute(sa.insert(Order).values(customer="ada", amount=2), **elsewhere)
        request.claim.reject(402)
        request.finish(plain_answer(request.claim.require_response()))

    assert postgresql.counts() == NOTHING | {"records": 1}
    assert sqlite.orders == []


def test_what_the_session_wrote_elsewhere_commits_with_the_answer(
    postgresql: Database, sqlite: Database, ob: outbox.Outbox
) -> None:
    with postgresql.session() as session:
        request = begin(session, ob)
        session.execute(sa.insert(Order).values(customer="ada", amount=1), bind_arguments={"bind": sqlite.engine})
        request.finish(CREATED)

    assert len(sqlite.orders) == 1


def test_what_a_rejected_handler_has_made_can_still_be_read(database: Database, ob: outbox.Outbox) -> None:
    with database.session() as session:
        request = begin(session, ob)
        order = work(session, ob)
        session.flush()
        request.claim.reject(402)

        assert (order.customer, list(session)) == ("ada", [])


def test_a_rejected_request_writes_nothing_more(database: Database, ob: outbox.Outbox) -> None:
    with database.session() as session:
        request = begin(session, ob)
        request.claim.reject(402)
        session.add(Order(customer="ada", amount=1))

        with pytest.raises(outbox.AlreadyAnswered, match=r"a write after claim\.reject\(\)"):
            request.finish(plain_answer(request.claim.require_response()))

    assert database.counts() == NOTHING


def test_a_key_stays_locked_from_a_rejection_to_its_commit(postgresql: Database, ob: outbox.Outbox) -> None:
    with postgresql.session() as session:
        request = begin(session, ob)
        flush(session, ob)
        request.claim.reject(402)
        with postgresql.session() as other, pytest.raises(outbox.KeyInFlight):
            begin(other, ob)
        request.finish(plain_answer(request.claim.require_response()))

    with postgresql.session() as other:
        replay = begin(other, ob).replay
    assert replay is not None
    assert replay.status == 402


# --- a last flush that fails


def in_use(session: Session) -> Session:
    """A session as another part of the app, which found out who asks, leaves it."""
    session.execute(sa.text("SELECT 1"))
    return session


each_session = pytest.mark.parametrize("prepare", [lambda session: session, in_use], ids=["new", "in use"])


@each_session
@pytest.mark.parametrize("level", ["REPEATABLE READ", "READ COMMITTED"], ids=["conflict", "lock timeout"])
def test_a_request_whose_last_flush_the_database_ends_must_be_sent_again(
    postgresql: Database, ob: outbox.Outbox, level: str, prepare: Callable[[Session], Session]
) -> None:
    """As an ORM app has it, whose handler changes rows and flushes nothing."""
    postgresql.execute(sa.insert(Order).values(customer="bob", amount=1))
    engine = postgresql.engine.execution_options(isolation_level=level)
    with (
        Session(engine) as session,
        postgresql.engine.connect() as other,
        closing(begin(prepare(session), ob)) as request,
    ):
        session.execute(sa.text("SET LOCAL lock_timeout = 100"))
        work(session, ob)
        session.scalars(sa.select(Order).where(Order.customer == "bob")).one().amount = 2
        other.execute(sa.update(Order).where(Order.customer == "bob").values(amount=3))
        if level == "REPEATABLE READ":
            other.commit()
        with pytest.raises(outbox.RequestUndone, match="send the request again"):
            request.finish(CREATED)

    assert postgresql.counts() == NOTHING | {"orders": 1}


@each_session
def test_an_error_of_a_last_flush_reaches_the_app_as_it_is(
    database: Database, ob: outbox.Outbox, prepare: Callable[[Session], Session]
) -> None:
    with database.session() as session, closing(begin(prepare(session), ob)) as request:
        session.add_all([colliding_order(), colliding_order()])
        with pytest.raises(sa.exc.IntegrityError):
            request.finish(CREATED)

    assert database.counts() == NOTHING


# --- the connection afterwards


def replay_it(session: Session, ob: outbox.Outbox) -> None:
    request = begin(session, ob)
    assert request.replay is not None
    request.close()


def mismatch(session: Session, ob: outbox.Outbox) -> None:
    with pytest.raises(outbox.RequestMismatch):
        begin(session, ob, body=b"{}")


@pytest.mark.parametrize("retry", [replay_it, mismatch])
def test_a_retry_leaves_what_its_connection_has_prepared(
    postgresql: Database, ob: outbox.Outbox, retry: Callable[[Session, outbox.Outbox], None]
) -> None:
    engine = postgresql.new_engine(pool_size=1, max_overflow=0)
    for number in range(MADE_READY):
        with Session(engine) as session:
            place(session, ob, f"retry-00{number}")

    with Session(engine) as session:
        retry(session, ob)

    with engine.connect() as connection:
        prepared = connection.exec_driver_sql("SELECT statement FROM pg_prepared_statements").scalars().all()
    assert [statement for statement in prepared if "outbox_claim_key" in statement]


def test_what_the_app_wrote_before_the_claim_is_not_committed_by_a_replay(
    database: Database, ob: outbox.Outbox
) -> None:
    with database.session() as session:
        place(session, ob)
    with database.session() as session:
        session.add(Order(customer="bob", amount=1))
        replay_it(session, ob)

    assert database.counts() == ALL
