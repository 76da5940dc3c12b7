"""A callback that ends its transaction by a statement or by the driver: nothing of it commits, and it says so."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session
from support.accepted import Checkout, make_due
from support.database import CHARGE, Database, Order
from support.entries import states

import outbox
from dispatchers import Completed
from dispatchers.errors import CallbackError
from dispatchers.store.app_code import own_transaction

pytestmark = [pytest.mark.on_mariadb, pytest.mark.every_value]

Trick = Callable[[Session], object]


def sends(statement: str) -> Trick:
    def send(session: Session) -> None:
        session.connection().exec_driver_sql(statement)

    send.__name__ = statement
    return send


def sends_a_rollback_by_the_drivers_cursor(session: Session) -> None:
    cursor = session.connection().connection.cursor()
    cursor.execute("ROLLBACK")
    cursor.close()


def rolls_back_by_the_driver(session: Session) -> None:
    session.connection().connection.rollback()


def rolls_back_by_the_driver_and_begins_again(session: Session) -> None:
    """As if nothing had happened; on PostgreSQL's drivers the next statement begins one anyway."""
    raw = session.connection().connection
    raw.rollback()
    cursor = raw.cursor()
    cursor.execute("BEGIN")
    cursor.close()


def rolls_back_and_commits_each_statement(session: Session) -> None:
    raw: Any = session.connection().connection
    raw.rollback()
    driver = raw.dbapi_connection
    if session.get_bind().dialect.name == "mariadb":
        driver.autocommit(True)
    elif session.get_bind().dialect.name == "postgresql":
        driver.autocommit = True


REFUSED = ["ROLLBACK", "/* all */ rollback;", "COMMIT", "-- so\nBEGIN"]
TRICKS = [
    sends_a_rollback_by_the_drivers_cursor,
    rolls_back_by_the_driver,
    rolls_back_by_the_driver_and_begins_again,
    rolls_back_and_commits_each_statement,
]


@pytest.fixture(params=["sync", "async"])
def checkout(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Checkout:
    return Checkout(database, ob, is_async=request.param == "async")


def complete_by(checkout: Checkout, trick: Trick) -> None:
    """A completion that writes before and after `trick`, which only its first call plays."""

    def complete(session: Session, completed: Completed) -> None:
        session.add(Order(customer="before", amount=1))
        session.flush()
        if len(checkout.seen) == 1:
            trick(session)
        session.add(Order(customer="after", amount=1))
        session.flush()
        completed.respond(201)

    checkout.on_completed(complete)
    checkout.accept()


def run_twice_with(checkout: Checkout, alone: bool, **settings: Any) -> None:
    """alone: without the settling of an entry."""
    if alone:
        checkout.cancel(CHARGE)

    checkout.run_once(**settings)

    assert (checkout.customers, checkout.record.state, len(checkout.seen)) == ([], "accepted", 1)
    assert states(checkout.database) == ({"cancelled": 1} if alone else {"retry": 1})
    if not alone:
        make_due(checkout.database)
    checkout.run_once(**settings)
    assert (checkout.customers, checkout.record.state) == (["before", "after"], "succeeded")


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: trick.__name__)
def test_nothing_commits_of_a_completion_that_ends_its_transaction(
    checkout: Checkout, caplog: pytest.LogCaptureFixture, trick: Trick, alone: bool
) -> None:
    complete_by(checkout, trick)

    run_twice_with(checkout, alone)

    assert "CallbackError: a callback has ended its transaction itself" in caplog.text


def commits_by_its_connection(session: Session) -> None:
    session.connection().commit()


def commits_by_its_connection_whatever_that_raises(session: Session) -> None:
    with suppress(CallbackError):
        session.connection().commit()


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    "trick",
    [commits_by_its_connection, commits_by_its_connection_whatever_that_raises],
    ids=lambda trick: trick.__name__,
)
def test_nothing_commits_of_a_completion_that_commits_its_connection(
    checkout: Checkout, trick: Trick, alone: bool
) -> None:
    complete_by(checkout, trick)

    run_twice_with(checkout, alone)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("statement", REFUSED)
def test_a_completion_is_refused_the_statements_that_end_its_transaction(
    checkout: Checkout, caplog: pytest.LogCaptureFixture, statement: str, alone: bool
) -> None:
    complete_by(checkout, sends(statement))

    run_twice_with(checkout, alone)

    assert "CallbackError: a callback must not send" in caplog.text


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("trick", [sends("COMMIT"), *TRICKS], ids=lambda trick: trick.__name__)
def test_nothing_commits_of_one_that_ends_its_transaction_on_asyncpg(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, trick: Trick, alone: bool
) -> None:
    checkout = Checkout(postgresql, ob, is_async=True)
    engine = create_async_engine(postgresql.url.set(drivername="postgresql+asyncpg"), poolclass=sa.NullPool)
    complete_by(checkout, trick)

    run_twice_with(checkout, alone, target=engine)

    assert "CallbackError: a callback " in caplog.text


def test_a_refused_statement_has_ended_nothing(checkout: Checkout) -> None:
    def try_it(session: Session) -> None:
        with suppress(CallbackError):
            session.execute(sa.text("ROLLBACK"))

    complete_by(checkout, try_it)
    checkout.cancel(CHARGE)

    checkout.run_once()

    assert (checkout.customers, checkout.record.state) == (["before", "after"], "succeeded")


def test_nothing_is_added_to_what_the_driver_has_committed(
    checkout: Checkout, caplog: pytest.LogCaptureFixture
) -> None:
    complete_by(checkout, lambda session: session.connection().connection.commit())
    checkout.cancel(CHARGE)

    checkout.run_once()

    assert (checkout.customers, checkout.record.state) == (["before"], "accepted")
    assert "CallbackError: a callback has ended its transaction itself" in caplog.text


@pytest.mark.parametrize("statement", ["CREATE TABLE own (id INT)", "SELECT 1; COMMIT", "SET @@SESSION.autocommit = 1"])
def test_what_commits_on_mariadb_without_its_name_is_noticed(
    mariadb: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, statement: str
) -> None:
    checkout = Checkout(mariadb, ob)
    complete_by(checkout, sends(statement))
    checkout.cancel(CHARGE)

    checkout.run_once()

    assert checkout.record.state == "accepted"
    assert "after" not in checkout.customers


@pytest.mark.parametrize(
    "statement",
    [
        "ROLLBACK TO SAVEPOINT a",
        "rollback work to a",
        "SAVEPOINT a",
        "RELEASE SAVEPOINT a",
        "SELECT 'COMMIT'",
        "UPDATE ending SET x = 1",
        "-- COMMIT\nSELECT 1",
        "BEGIN NOT ATOMIC SELECT 1; END",
        "SET LOCAL lock_timeout = 1",
    ],
)
def test_statements_that_end_no_transaction_are_sent(statement: str) -> None:
    assert not own_transaction.ends_transaction(statement)
