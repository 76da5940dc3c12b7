"""A completion that fails: the request stays open, nothing is sent again, and the completion is tried again."""

import asyncio
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.accepted import Checkout, make_due
from support.database import CHARGE, Database, Order

import outbox
from dispatchers import Completed
from dispatchers.adapters import MemoryAdapter

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

CARD = "4242424242424242"


@pytest.fixture(params=["sync", "async"])
def checkout(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Checkout:
    """The app with its completion on a Session, and on an AsyncSession."""
    return Checkout(database, ob, is_async=request.param == "async")


def raise_with_the_card(session: Session, completed: Completed) -> None:
    raise ZeroDivisionError(CARD)


def answer_twice(session: Session, completed: Completed) -> None:
    completed.respond(201)
    completed.respond(202)


@pytest.mark.parametrize(
    ("fail", "text"),
    [
        (raise_with_the_card, "ZeroDivisionError"),
        (
            lambda session, completed: None,
            "NotAnswered: on_completed('checkout') has ended without completed.respond()",
        ),
        (lambda session, completed: completed.respond(201, {"what": object()}), ""),
        (answer_twice, "respond after an answer: on_completed('checkout') has already responded"),
        (lambda session, completed: session.commit(), "CallbackError: a callback must not commit"),
    ],
    ids=["raises", "does not answer", "answers with what is no JSON", "answers twice", "commits"],
)
def test_a_completion_that_fails_is_tried_again_and_nothing_is_sent_again(
    checkout: Checkout, caplog: pytest.LogCaptureFixture, fail: Callable[[Session, Completed], None], text: str
) -> None:
    healthy = False

    def complete(session: Session, completed: Completed) -> None:
        session.add(Order(customer="ada", amount=2000))
        if healthy:
            completed.respond(201)
        else:
            fail(session, completed)

    checkout.on_completed(complete)
    checkout.accept()
    adapter = MemoryAdapter()

    checkout.run_once(adapter)
    (row,) = checkout.database.queue
    assert (row.state, checkout.record.state, checkout.customers) == ("retry", "accepted", [])
    assert "delivered, but its completion raised " in row.outcome
    assert f"entry {row.id} ({CHARGE}): its completion raised " in caplog.text
    assert text in caplog.text
    assert CARD not in caplog.text
    healthy = True
    make_due(checkout.database)
    assert checkout.run_once(adapter) == 1

    assert (checkout.record.state, checkout.customers) == ("succeeded", ["ada"])
    assert len(adapter.deliveries) == 1


@pytest.mark.parametrize("with_a_callback", [False, True])
def test_without_a_callback_a_refusal_at_the_commit_is_the_completions(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, with_a_callback: bool
) -> None:
    postgresql.execute(sa.text("CREATE TABLE fussy (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    checkout = Checkout(postgresql, ob)

    def complete(session: Session, completed: Completed) -> None:
        session.execute(sa.text("INSERT INTO fussy VALUES (1), (1)"))
        completed.respond(201)

    checkout.on_completed(complete)
    if with_a_callback:
        checkout.effects.on_settled(CHARGE)(lambda session, settlement: None)
    checkout.accept()

    checkout.run_once()

    said = "its callback raised IntegrityError" if with_a_callback else "its completion raised IntegrityError"
    assert said in caplog.text


def test_a_failed_completion_undoes_the_callbacks_work_and_repeats_it(checkout: Checkout) -> None:
    failures = iter([True])

    def complete(session: Session, completed: Completed) -> None:
        if next(failures, False):
            raise ZeroDivisionError
        completed.respond(201)

    checkout.effects.on_settled(CHARGE)(lambda session, settlement: session.add(Order(customer="cb", amount=1)))
    checkout.on_completed(complete)
    checkout.accept()

    checkout.run_once()
    assert checkout.customers == []
    make_due(checkout.database)
    checkout.run_once()

    assert checkout.customers == ["cb"]


def test_a_failed_completion_without_a_settling_is_left_alone_for_a_while(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    checkout = Checkout(database, ob)
    failures = iter([ZeroDivisionError(), ZeroDivisionError()])

    def complete(session: Session, completed: Completed) -> None:
        if error := next(failures, None):
            raise error
        completed.respond(201)

    now = 1000.0
    checkout.on_completed(complete)
    checkout.accept()
    checkout.cancel(CHARGE)

    async def main() -> list[int]:
        nonlocal now
        working = checkout.dispatcher(clock=lambda: now)
        seen = []
        for seconds in (0, 1, 1.5, 3, 1.5, 400):
            now += seconds
            await working.run_once()
            seen.append(len(checkout.seen))
        await working.close()
        return seen

    assert asyncio.run(main()) == [1, 1, 2, 2, 3, 3]
    assert f"request {checkout.record.id}: on_completed('checkout') raised ZeroDivisionError" in caplog.text
    assert checkout.record.state == "succeeded"
