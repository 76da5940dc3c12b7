"""`should_wait` of docs/inbox-recipes.md: which errors are no message's fault, on PostgreSQL through a relay."""

from collections.abc import Callable

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.consumer import Billing
from support.database import Database
from support.recipes import waiting
from support.relays import Relay, relay

import outbox

DEFERRED = "CREATE TABLE deferred (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)"


def raised_by(act: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        act()
    return caught.value


@pytest.mark.parametrize("moment", ["before", "after the begin", "before the commit"])
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "new"])
def test_a_lost_connection_is_no_fault_of_the_message(postgresql: Database, moment: str, pooled: bool) -> None:
    def handle(database: Database, between: Relay) -> None:
        if moment == "before":
            between.refuse()
        with database.begin() as session:
            session.execute(sa.text("SELECT 1"))
            between.refuse()
            if moment == "after the begin":
                session.execute(sa.text("SELECT 1"))

    with relay(postgresql.url) as (between, url):
        database = Database(url)
        if pooled:
            database.engine.connect().close()
        error = raised_by(lambda: handle(database, between))
        database.dispose()

    assert waiting().should_wait(error)


def test_a_pool_without_a_connection_left_is_no_fault_of_the_message(postgresql: Database) -> None:
    engine = postgresql.new_engine(pool_size=1, max_overflow=0, pool_timeout=0)

    with engine.connect():
        error = raised_by(engine.connect)

    assert waiting().should_wait(error)


def test_a_message_in_flight_elsewhere_is_not_at_fault(postgresql: Database, ob: outbox.Outbox) -> None:
    billing = Billing(postgresql, ob)

    with billing.elsewhere({"scope": "shop", "message_id": "evt_1"}):
        error = raised_by(lambda: billing.handle({"scope": "shop", "message_id": "evt_1"}))

    assert isinstance(error, outbox.KeyInFlight)
    assert waiting().should_wait(error)


@pytest.mark.parametrize(
    "statements",
    [
        ["SET statement_timeout = 1", "SELECT pg_sleep(10)"],
        ["SELECT 1 / 0"],
        [DEFERRED, "INSERT INTO deferred VALUES (1), (1)"],
    ],
    ids=["a time limit", "a failed statement", "a failed commit"],
)
def test_a_statement_that_fails_is_the_messages_fault(postgresql: Database, statements: list[str]) -> None:
    def handle() -> None:
        with Session(postgresql.new_engine(poolclass=sa.NullPool)) as session, session.begin():
            for statement in statements:
                session.execute(sa.text(statement))

    assert not waiting().should_wait(raised_by(handle))


def test_an_error_of_the_handlers_own_is_the_messages_fault() -> None:
    assert not waiting().should_wait(KeyError("number"))
