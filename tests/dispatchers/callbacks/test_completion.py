"""The completion of an accepted request: when it comes, what it is handed, what it leaves, and what follows if it fails."""

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.accepted import Checkout, make_due
from support.database import CHARGE, TABLES, Database, Order
from support.entries import put_one, queue_row, states

import outbox
from dispatchers import Completed, Delivered, KeyConflict, Rejected, Settlement
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import resolve

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

DAY = timedelta(days=1)


@pytest.fixture(params=["sync", "async"])
def checkout(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Checkout:
    """The app with its completion on a Session, and on an AsyncSession."""
    return Checkout(database, ob, is_async=request.param == "async")


# --- when


def test_the_last_entrys_settling_gives_the_request_its_final_response(checkout: Checkout) -> None:
    checkout.on_completed()
    accepted = checkout.accept(CHARGE, "mail.receipt")

    assert checkout.run_once() == 2

    record = checkout.record
    assert (record.state, record.status, accepted.status) == ("succeeded", 201, 202)
    assert checkout.customers == ["retry-001"]
    answer = checkout.accept()
    assert (answer.status, answer.json()) == (201, {CHARGE: "delivered", "mail.receipt": "delivered"})
    status = checkout.status()
    assert status is not None
    assert (status.state, status.response, status.retry_after) == ("succeeded", answer, None)


@pytest.mark.parametrize("limit", [256 * 1024, 1000], ids=["equal settings", "other settings"])
def test_a_request_waits_for_the_entries_of_another_outbox(database: Database, ob: outbox.Outbox, limit: int) -> None:
    """For example of the default outbox, and of one that a module has made from the same settings."""
    checkout = Checkout(database, ob)
    checkout.on_completed()
    other = outbox.Outbox(ob.configuration.keyring, env="test", max_payload_bytes=limit)
    with database.begin() as session, ob.idempotent(session, "k", scope="a", content={}) as claim:
        ob.enqueue(session, CHARGE, {})
        other.enqueue(session, "mail.receipt", {}, parent="invoice:42")
        claim.accept("checkout", headers={"Location": "/1"})

    assert checkout.run_once(adapters={"stripe": MemoryAdapter()}) == 1
    assert (checkout.record.state, checkout.seen) == ("accepted", [])

    assert checkout.run_once() == 1
    assert [len(completed.entries) for completed in checkout.seen] == [2]


def test_it_gets_the_end_and_result_of_each_effect(checkout: Checkout) -> None:
    checkout.on_completed()
    checkout.accept(CHARGE, "mail.receipt")
    stripe = MemoryAdapter(answer=lambda delivery: Delivered({"charge": "ch_1"}))
    mail = MemoryAdapter(answer=lambda delivery: Rejected("no such address"))

    checkout.run_once(adapters={"stripe": stripe, "mail": mail})

    (completed,) = checkout.seen
    assert completed.id == checkout.record.id
    assert (completed.completion, completed.parent.key, completed.parent.scope) == ("checkout", "retry-001", "acct_1")
    assert sorted((entry.operation, entry.state, entry.result) for entry in completed.entries) == [
        ("mail.receipt", "failed", None),
        (CHARGE, "delivered", {"charge": "ch_1"}),
    ]


def test_a_final_response_from_400_on_is_a_failure_that_is_kept(checkout: Checkout) -> None:
    checkout.on_completed()
    checkout.accept()

    checkout.run_once(MemoryAdapter(answer=lambda delivery: Rejected("declined")))

    assert (checkout.record.state, checkout.record.status) == ("failed", 402)
    assert checkout.accept().json() == {CHARGE: "failed"}


def test_an_uncertain_entry_keeps_the_request_open_until_it_is_resolved(checkout: Checkout) -> None:
    checkout.on_completed()
    checkout.accept()

    checkout.run_once(MemoryAdapter(answer=lambda delivery: KeyConflict("of another request")))
    assert states(checkout.database) == {"uncertain": 1}
    checkout.run_once()
    assert (checkout.record.state, checkout.seen) == ("accepted", [])
    (entry,) = checkout.database.entries
    with checkout.database.dispatchers_engine.begin() as connection:
        resolve(connection, TABLES, entry.id, "happened", actor="ada", reason="seen in the service's books")
    assert checkout.run_once() == 1

    assert checkout.record.state == "succeeded"
    assert checkout.accept().json() == {CHARGE: "delivered"}


def test_what_the_last_entrys_callback_enqueues_keeps_the_request_open(checkout: Checkout) -> None:
    def charged(session: Session, settlement: Settlement) -> None:
        checkout.ob.enqueue(session, "mail.receipt", {})

    checkout.effects.on_settled(CHARGE)(charged)  # sync, beside a completion that may be async
    checkout.on_completed()
    checkout.accept()

    checkout.run_once(adapters={"stripe": MemoryAdapter()})
    assert (checkout.record.state, states(checkout.database)) == ("accepted", {"delivered": 1, "pending": 1})
    checkout.run_once()

    assert checkout.accept().json() == {CHARGE: "delivered", "mail.receipt": "delivered"}
    assert len(checkout.seen) == 1


def test_what_the_completion_enqueues_is_of_the_request_but_not_waited_for(checkout: Checkout) -> None:
    def complete(session: Session, completed: Completed) -> None:
        checkout.ob.enqueue(session, "mail.receipt", {})
        completed.respond(200)

    checkout.on_completed(complete)
    checkout.accept()
    checkout.run_once()
    assert checkout.record.state == "succeeded"
    checkout.run_once()

    assert states(checkout.database) == {"delivered": 2}
    (receipt,) = (entry for entry in checkout.database.entries if entry.operation == "mail.receipt")
    assert (receipt.record_id, receipt.parent_id) == (checkout.record.id, checkout.record.id)
    assert len(checkout.seen) == 1


def test_the_retry_window_counts_from_the_final_response(checkout: Checkout) -> None:
    checkout.on_completed()
    checkout.accept()
    before = checkout.record
    checkout.database.age_records(3 * DAY)

    checkout.run_once()

    record = checkout.record
    assert abs(record.replay_until - record.answered_at - DAY) < timedelta(seconds=1)
    assert abs((record.keep_until - record.answered_at) - (before.keep_until - before.created_at)) < timedelta(
        seconds=1
    )
    assert checkout.accept().status == 201


# --- what has no settling to come with


def test_a_request_whose_last_entry_the_app_cancels_is_completed(checkout: Checkout) -> None:
    checkout.on_completed()
    checkout.accept()
    assert checkout.cancel(CHARGE)
    assert checkout.record.state == "accepted"

    assert checkout.run_once() == 0

    assert checkout.record.state == "succeeded"
    assert checkout.accept().json() == {CHARGE: "cancelled"}


def test_a_request_that_another_release_settled_is_completed_by_this_one(
    checkout: Checkout, caplog: pytest.LogCaptureFixture
) -> None:
    checkout.accept()
    assert checkout.run_once(include=[]) == 1, "it knows no completion, and settles in the batch"
    assert checkout.record.state == "accepted"

    checkout.effects.on_completed("refund")(lambda session, completed: pytest.fail("another's"))
    checkout.run_once()
    assert f"request {checkout.record.id} waits: this process has no on_completed('checkout') registered" in caplog.text
    checkout.on_completed()
    checkout.run_once()

    assert checkout.record.state == "succeeded"


def test_more_open_requests_than_a_page_holds_do_not_hide_a_later_one(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.store.records.queries.MAX_ACCEPTED", 2)
    monkeypatch.setattr("dispatchers.pipeline.app_transactions.MAX_ACCEPTED", 2)
    checkout = Checkout(database, ob)
    checkout.on_completed()
    for number in range(5):
        checkout.accept("crm.upsert", key=f"open-{number}")
    checkout.accept(CHARGE, key="last")
    checkout.cancel(CHARGE)

    checkout.run_once(adapters={"mail": MemoryAdapter()})

    assert checkout.customers == ["last"]


# --- registering


def test_a_completion_that_is_registered_twice_is_refused(checkout: Checkout) -> None:
    checkout.on_completed()

    with pytest.raises(outbox.ConfigurationError, match=r"on_completed\('checkout'\) is registered twice"):
        checkout.on_completed()


def test_a_malformed_name_of_a_completion_is_refused(checkout: Checkout) -> None:
    with pytest.raises(outbox.InvalidValue, match="completion 'Check out': must be lower-case words"):
        checkout.effects.on_completed("Check out")


def test_a_completions_name_is_no_prefix(checkout: Checkout) -> None:
    checkout.effects.on_completed("checkout.eu")(lambda session, completed: pytest.fail("another's"))
    checkout.effects.on_completed("check")(lambda session, completed: pytest.fail("another's"))
    checkout.accept()

    checkout.run_once()

    assert checkout.record.state == "accepted"


# --- what it costs the others


def test_entries_of_requests_answered_at_once_settle_in_the_batch(database: Database, ob: outbox.Outbox) -> None:
    checkout = Checkout(database, ob)
    checkout.on_completed()
    with database.begin() as session, ob.idempotent(session, "k", scope="acct_1", content={}) as claim:
        first = ob.enqueue(session, CHARGE, {}).id
        claim.respond(201)
    second = put_one(database, ob, "crm.upsert")
    working = checkout.dispatcher()
    alone: list[object] = []
    working._loops._collector.with_callbacks.start = lambda *arguments: alone.append(arguments)  # type: ignore[method-assign]

    assert asyncio.run(working.run_once()) == 2
    assert not alone
    assert queue_row(database, first) is None
    assert queue_row(database, second) is None


# --- A completion that fails: the request stays open, nothing is sent again, and the completion is tried again.


CARD = "4242424242424242"


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
