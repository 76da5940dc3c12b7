"""The kit for the tests of apps: what was enqueued, and what it comes to when it is all sent."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session
from support.cli_runner import command
from support.database import Database
from support.entries import put, states

import outbox
from dispatchers import (
    Breaker,
    CannotTell,
    Deferred,
    Delivered,
    Delivery,
    Dispatcher,
    Finding,
    Limits,
    Operations,
    Outcome,
    Unknown,
)
from dispatchers.adapters import MemoryAdapter
from dispatchers.testing.draining import drain
from outbox.testing import all_enqueued, assert_enqueued, assert_not_enqueued

ASSERTIONS: dict[str, Any] = {"assert_enqueued": assert_enqueued, "assert_not_enqueued": assert_not_enqueued}
CHARGE = "stripe.payment_intents.create"
PAYLOAD = {"amount": 2000, "metadata": {"order": "42", "shop": "1"}}


def failure(call: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        call()
    return str(caught.value)


def test_what_was_enqueued_is_found_before_it_is_flushed(database: Database, ob: outbox.Outbox) -> None:
    with database.session() as session:
        entry = ob.enqueue(session, CHARGE, PAYLOAD, parent="order:42", options={"account": "acct_1"}, ordering_key="a")

        (found,) = assert_enqueued(session, CHARGE, outbox=ob)

    assert (found.id, found.operation, found.payload, found.parent) == (
        entry.id,
        CHARGE,
        PAYLOAD,
        outbox.ParentKey("order:42"),
    )
    assert (found.discriminator, found.destination, found.options, found.ordering_key) == (
        "",
        "stripe:acct_1",
        {"account": "acct_1"},
        "a",
    )


@pytest.mark.parametrize(
    "wanted",
    [
        {"payload": {"amount": 2000}},
        {"payload": {"metadata": {"order": "42"}}},
        {"parent": "order:42"},
        {"discriminator": "first"},
    ],
)
def test_part_of_an_entry_is_enough_to_find_it(database: Database, ob: outbox.Outbox, wanted: dict[str, Any]) -> None:
    with database.session() as session:
        ob.enqueue(session, CHARGE, PAYLOAD, parent="order:42", discriminator="first")

        assert_enqueued(session, CHARGE, outbox=ob, **wanted)


@pytest.mark.parametrize(
    ("wanted", "listed"),
    [
        ({"payload": {"amount": 1}}, " with payload {'amount': 1}"),
        ({"payload": {"tip": 1}}, " with payload {'tip': 1}"),
        (
            {"parent": "order:43"},
            " with parent ParentKey(key='order:43', scope='', source='app')",
        ),
        ({"payload": {"amount": 1}, "discriminator": "b"}, " with payload {'amount': 1} and discriminator 'b'"),
    ],
)
def test_what_is_not_there_fails_and_shows_what_is(
    postgresql: Database, ob: outbox.Outbox, wanted: dict[str, Any], listed: str
) -> None:
    with postgresql.session() as session:
        ob.enqueue(session, CHARGE, {"amount": 2000}, parent="order:42", discriminator="a")

        text = failure(lambda: assert_enqueued(session, CHARGE, outbox=ob, **wanted))

    assert text == (
        f"0 entries are 'stripe.payment_intents.create'{listed}, not 1; enqueued are:"
        "\n    stripe.payment_intents.create {\"amount\": 2000} of parent 'order:42', discriminator 'a'"
    )


def test_one_too_many_fails(database: Database, ob: outbox.Outbox) -> None:
    with database.session() as session:
        for line in ("1", "2"):
            ob.enqueue(session, "email.send", {}, parent="order:42", discriminator=line)

        assert len(assert_enqueued(session, "email.send", count=2, outbox=ob)) == 2
        assert failure(lambda: assert_enqueued(session, "email.send", outbox=ob)).startswith(
            "2 entries are 'email.send', not 1; enqueued are:"
        )


def test_what_must_not_be_there_fails_if_it_is(database: Database, ob: outbox.Outbox) -> None:
    with database.session() as session:
        assert_not_enqueued(session, outbox=ob)
        assert failure(lambda: assert_enqueued(session, CHARGE, outbox=ob)).endswith("not 1; enqueued is: nothing")

        ob.enqueue(session, CHARGE, PAYLOAD, parent="order:42")

        assert_not_enqueued(session, "email.send", outbox=ob)
        assert_not_enqueued(session, CHARGE, {"amount": 1}, outbox=ob)
        assert failure(lambda: assert_not_enqueued(session, outbox=ob)).startswith("1 entries are anything, not 0;")


def test_the_configured_outbox_is_asked_by_default(
    postgresql: Database, monkeypatch: pytest.MonkeyPatch, ob: outbox.Outbox
) -> None:
    from outbox.default_outbox import default

    monkeypatch.setattr(default, "_configured", {"": ob.configuration})
    with postgresql.session() as session:
        outbox.enqueue(session, CHARGE, PAYLOAD, parent="order:42")

        assert [entry.operation for entry in all_enqueued(session)] == [CHARGE]


def test_an_async_session_is_awaited(postgresql: Database, ob: outbox.Outbox) -> None:
    async def main() -> None:
        async with postgresql.async_session() as session:
            ob.enqueue(session, CHARGE, PAYLOAD, parent="order:42")
            assert len(await assert_enqueued(session, CHARGE, outbox=ob)) == 1
            await assert_not_enqueued(session, "email.send", outbox=ob)
            assert len(await all_enqueued(session, outbox=ob)) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("asserting", "says"),
    [
        (
            assert_enqueued,
            "assert_enqueued has no condition 'parant'; its conditions are parent, discriminator, outbox, count",
        ),
        (
            assert_not_enqueued,
            "assert_not_enqueued has no condition 'parant'; its conditions are parent, discriminator, outbox",
        ),
    ],
    ids=["enqueued", "not-enqueued"],
)
def test_a_condition_that_does_not_exist_is_refused(
    sqlite: Database, ob: outbox.Outbox, asserting: Callable[..., Any], says: str
) -> None:
    """Ignored, it would let the test pass for another entry."""
    with sqlite.session() as session, pytest.raises(TypeError) as refused:
        asserting(session, "crm.upsert", parant="order:1", outbox=ob)

    assert str(refused.value) == says


def test_what_must_not_be_enqueued_may_be_named_by_its_discriminator(sqlite: Database, ob: outbox.Outbox) -> None:
    with sqlite.session() as session:
        ob.enqueue(session, "mail.send", {}, parent="order:1", discriminator="ada")

        assert_not_enqueued(session, "mail.send", discriminator="bob", outbox=ob)
        with pytest.raises(AssertionError, match=r"1 entries are 'mail\.send' with discriminator 'ada', not 0"):
            assert_not_enqueued(session, "mail.send", discriminator="ada", outbox=ob)


# --- drain


def drained(database: Database, ob: outbox.Outbox, *, ahead: bool = False, **settings: Any) -> int:
    async def main() -> int:
        working = Dispatcher(database.dispatchers_engine, outbox=ob, **settings)
        try:
            return await drain(working, ahead=ahead)
        finally:
            await working.close()

    return asyncio.run(main())


def test_draining_sends_what_callbacks_enqueue_too(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "crm.upsert")
    effects = Operations()

    @effects.on_settled("crm.upsert")
    def follow(session: Session, settlement: Any) -> None:
        ob.enqueue(session, "mail.send", {"to": "ada"}, parent=settlement.entry.parent)

    mail = MemoryAdapter()

    assert drained(database, ob, include=[effects], adapters={"crm": MemoryAdapter(), "mail": mail}) == 2

    assert [delivery.operation for delivery in mail.deliveries] == ["mail.send"]


def _deferring(times: int) -> Operations:
    effects = Operations()
    left = [times]

    @effects.operation("crm.upsert", window=timedelta(days=1))
    async def upsert(delivery: Delivery) -> Outcome:
        left[0] -= 1
        return Delivered() if left[0] < 0 else Deferred("busy", after=timedelta(hours=1))

    return effects


def test_what_is_due_later_stays_where_no_drain_asks_for_it(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "crm.upsert")
    put(database, ob, "crm.upsert", due=timedelta(days=3))

    drained(database, ob, include=[_deferring(1)])

    assert states(database) == {"retry": 1, "pending": 1}


def test_draining_ahead_waits_for_nothing(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "crm.upsert")
    put(database, ob, "crm.upsert", due=timedelta(days=3))

    drained(database, ob, include=[_deferring(3)], ahead=True)

    assert states(database) == {"delivered": 2}


@pytest.mark.parametrize(
    ("answers", "limits"),
    [
        ([Deferred("429", after=timedelta(hours=2), cooldown=True)], Limits()),
        ([Unknown("no answer")] * 12, Limits(breaker=Breaker(failures=3))),
        ([], Limits(rate=0.1, burst=1)),
    ],
    ids=["a cooldown", "an open breaker", "a rate"],
)
def test_draining_ahead_waits_for_no_destination(
    database: Database, ob: outbox.Outbox, answers: list[Outcome], limits: Limits
) -> None:
    put(database, ob, "crm.upsert", count=3)

    drained(database, ob, adapters={"crm": MemoryAdapter(answers)}, limits={"crm": limits}, ahead=True)

    assert states(database) == {"delivered": 3}


def test_draining_ahead_looks_again_when_no_sender_can_be_at_work(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "crm.upsert")
    adapter = MemoryAdapter([Unknown("a stored 500", final=True)], window=timedelta(days=1), find=True)

    drained(database, ob, adapters={"crm": adapter}, ahead=True)

    assert states(database) == {"delivered": 1}
    assert len({delivery.key for delivery in adapter.deliveries}) == len(adapter.deliveries) == 2


def test_draining_ahead_ends_at_what_is_uncertain_without_another_lookup(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "crm.upsert")
    lookup: list[Delivery] = []

    def find(delivery: Delivery) -> Finding:
        lookup.append(delivery)
        return CannotTell("no access")

    adapter = MemoryAdapter([Unknown("a stored 500", final=True)], window=timedelta(days=1), find=find)

    drained(database, ob, adapters={"crm": adapter}, ahead=True)

    assert states(database) == {"uncertain": 1}
    assert 1 <= len(lookup) < 3


def test_draining_ahead_leaves_what_an_operator_has_paused(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "crm.upsert")
    command("pause", "--reason", "asked", "crm", database=database)

    assert drained(database, ob, adapters={"crm": MemoryAdapter()}, ahead=True) == 0

    assert states(database) == {"pending": 1}


def test_in_a_drain_ahead_the_time_that_passes_counts_for_the_limits(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "crm.upsert")
    adapter = MemoryAdapter([Deferred("busy", after=timedelta(days=2))] * 5)

    drained(database, ob, adapters={"crm": adapter}, ahead=True)

    assert states(database) == {"failed": 1}
    assert len(adapter.deliveries) == 3  # at once, after two days, and once more as three days end


def test_what_never_ends_is_an_error(database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispatchers.testing.draining.MAX_ROUNDS", 10)
    put(database, ob, "nobody.serves")

    text = failure(lambda: drained(database, ob, include=[_deferring(0)], ahead=True))

    assert text == (
        "entries still become due after 10 rounds: an adapter always defers them, or no adapter serves or reads them; one of"
        " them waits because: no adapter of this dispatcher serves it"
    )
    assert states(database) == {"pending": 1}


@pytest.mark.parametrize("assertion", ASSERTIONS)
@pytest.mark.parametrize("awaits_more", [False, True])
def test_an_assertion_that_is_not_awaited_fails_the_test(
    sqlite: Database, ob: outbox.Outbox, assertion: str, awaits_more: bool
) -> None:
    async def green_by_mistake() -> None:
        async with sqlite.async_session() as session:
            ASSERTIONS[assertion](session, "crm.upsert", outbox=ob)
            if awaits_more:
                await session.rollback()

    with (
        pytest.warns(
            RuntimeWarning, match=rf"{assertion} was not awaited: with an AsyncSession write `await {assertion}"
        ),
        pytest.raises(asyncio.CancelledError),
    ):
        asyncio.run(green_by_mistake())


def test_a_failing_assertion_shows_no_line_of_ours(sqlite: Database, ob: outbox.Outbox) -> None:
    with sqlite.session() as session, pytest.raises(AssertionError) as failed:
        assert_enqueued(session, "crm.upsert", outbox=ob)

    shown = [entry for entry in failed.traceback if not entry.ishidden(failed)]
    assert [entry.path for entry in shown] == [Path(__file__)]
