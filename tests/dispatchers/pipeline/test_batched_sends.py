"""Adapters that send several entries with one call: each entry ends with its own outcome, whatever the call does."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from support.database import Database
from support.entries import HOUR, age, dispatcher, put, reasons, run_once, settlement_row, state, states
from support.routing import Sender, routes

import outbox
from dispatchers import Deferred, Delivered, Delivery, Outcome, Rejected, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.delivery import Answered
from dispatchers.pipeline import attempt
from dispatchers.pipeline.routing import batch_sender_of
from dispatchers.testing.failpoints import failpoint
from dispatchers.transitions import ClaimedEntry
from outbox.errors import ConfigurationError


class Broker(MemoryAdapter):
    """Sends in batches. behave: is called with each batch; without it all are delivered."""

    def __init__(self, behave: Callable[[Sequence[Delivery], Answered], Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._behave = behave or deliver_all
        self.batches: list[list[Delivery]] = []

    async def send(self, delivery: Delivery) -> Outcome:
        self.batches.append([delivery])
        return Delivered("alone")

    async def send_batch(self, deliveries: Sequence[Delivery], answered: Answered) -> None:
        self.batches.append(list(deliveries))
        await self._behave(deliveries, answered)


async def deliver_all(deliveries: Sequence[Delivery], answered: Answered) -> None:
    for number in range(len(deliveries)):
        answered(number, Delivered(number))


def test_entries_that_are_claimed_together_are_sent_with_one_call(postgresql: Database, ob: outbox.Outbox) -> None:
    ids = put(postgresql, ob, count=5)
    broker = Broker()

    assert run_once(postgresql, ob, adapters={"crm": broker}) == 5

    (sent,) = broker.batches
    assert {delivery.id for delivery in sent} == set(ids)
    assert len({delivery.key for delivery in sent}) == 5
    assert len({delivery.deadline for delivery in sent}) == 1
    assert states(postgresql) == {"delivered": 5}
    results = {delivery.id: str(number) for number, delivery in enumerate(sent)}
    assert {id: settlement_row(postgresql, id).result for id in ids} == results


def test_each_entry_of_a_batch_has_its_own_outcome_in_any_order(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=4)
    outcomes = [Delivered(), Rejected("no"), Deferred("busy"), Unknown("lost")]

    async def behave(deliveries: Sequence[Delivery], answered: Answered) -> None:
        for number in (2, 0, 3, 1):
            answered(number, outcomes[number])

    broker = Broker(behave, window=HOUR)
    run_once(postgresql, ob, adapters={"crm": broker})

    found = [state(postgresql, delivery.id) for delivery in broker.batches[0]]
    assert found == ["delivered", "failed", "retry", "retry"]


def test_an_outcome_is_settled_while_the_call_still_waits_for_others(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=2)

    async def main() -> int:
        first_is_answered, end = asyncio.Event(), asyncio.Event()

        async def behave(deliveries: Sequence[Delivery], answered: Answered) -> None:
            answered(0, Delivered())
            first_is_answered.set()
            await end.wait()
            answered(1, Delivered())

        sending = asyncio.create_task(dispatcher(postgresql.engine, ob, adapters={"crm": Broker(behave)}).run_once())
        await first_is_answered.wait()
        while not (seen := await asyncio.to_thread(states, postgresql))["delivered"]:  # noqa: ASYNC110  # in the database
            await asyncio.sleep(0.01)
        end.set()
        await sending
        return seen["delivered"]

    assert asyncio.run(asyncio.wait_for(main(), 30)) == 1
    assert states(postgresql) == {"delivered": 2}


async def _raise(deliveries: Sequence[Delivery], answered: Answered) -> None:
    answered(1, Delivered())
    raise ConnectionError("lost")


async def _return(deliveries: Sequence[Delivery], answered: Answered) -> None:
    answered(1, Delivered())


async def _hang(deliveries: Sequence[Delivery], answered: Answered) -> None:
    answered(1, Delivered())
    await asyncio.Event().wait()


async def _cancel_itself(deliveries: Sequence[Delivery], answered: Answered) -> None:
    answered(1, Delivered())
    raise asyncio.CancelledError


async def _name_no_delivery(deliveries: Sequence[Delivery], answered: Answered) -> None:
    answered(1, Delivered())
    answered(3, Delivered())


async def _name_no_number(deliveries: Sequence[Delivery], answered: Any) -> None:
    answered(1, Delivered())
    answered(False, Delivered())


async def _answer_in_a_thread(deliveries: Sequence[Delivery], answered: Answered) -> None:
    answered(1, Delivered())
    await asyncio.to_thread(answered, 0, Delivered())


async def _change_the_places(deliveries: Any, answered: Answered) -> None:
    answered(1, Delivered())
    deliveries.pop()


async def _answer_with_anything(deliveries: Sequence[Delivery], answered: Any) -> None:
    answered(1, Delivered())
    answered(0, "sent")
    answered(2, "sent")


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (_raise, "the adapter raised ConnectionError"),
        (_return, "the adapter returned without its outcome"),
        (_hang, "no answer within 0.2 s"),
        (_cancel_itself, "the adapter cancelled itself"),
        (_name_no_delivery, "the adapter raised IndexError"),
        (_name_no_number, "the adapter raised TypeError"),
        (_answer_in_a_thread, "the adapter raised RuntimeError"),
        (_change_the_places, "the adapter raised AttributeError"),
        (_answer_with_anything, "the adapter answered with a str"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_entries_without_an_outcome_are_in_doubt_and_the_others_are_not(
    behave: Any, reason: str, postgresql: Database, ob: outbox.Outbox
) -> None:
    put(postgresql, ob, count=3)
    broker = Broker(behave, window=None, timeout=timedelta(seconds=0.2))

    run_once(postgresql, ob, adapters={"crm": broker})

    (sent,) = broker.batches
    assert [state(postgresql, delivery.id) for delivery in sent] == ["uncertain", "delivered", "uncertain"]
    assert reason in str(reasons(postgresql, sent[0].id) or settlement_row(postgresql, sent[0].id))


def test_a_second_outcome_of_a_delivery_changes_nothing(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=2)
    late: list[Answered] = []

    async def behave(deliveries: Sequence[Delivery], answered: Answered) -> None:
        await deliver_all(deliveries, answered)
        answered(0, Rejected("a second one"))
        late.append(answered)

    run_once(postgresql, ob, adapters={"crm": Broker(behave)})
    late[0](1, Rejected("after the end"))

    assert run_once(postgresql, ob, adapters={"crm": Broker()}) == 0
    assert states(postgresql) == {"delivered": 2}


def test_a_stopped_process_leaves_only_what_has_no_outcome_in_doubt(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    put(postgresql, ob, count=3)

    async def main() -> None:
        stopping, sent = asyncio.Event(), asyncio.Event()

        async def behave(deliveries: Sequence[Delivery], answered: Answered) -> None:
            answered(1, Delivered())
            sent.set()
            await asyncio.Event().wait()

        adapters = {"crm": Broker(behave, window=None)}
        working = dispatcher(postgresql.engine, ob, adapters=adapters, grace=timedelta(seconds=0.1))
        pump = asyncio.create_task(working.pump(stopping))
        await sent.wait()
        stopping.set()
        await pump
        await working.close()

    with caplog.at_level(logging.WARNING, "outbox.dispatcher"):
        asyncio.run(asyncio.wait_for(main(), 30))

    assert "2 sends in flight cancelled" in caplog.text
    assert states(postgresql)["delivered"] == 1
    age(postgresql, HOUR)
    run_once(postgresql, ob, adapters={"crm": Broker(window=None)})
    assert states(postgresql) == {"delivered": 1, "uncertain": 2}


def test_more_entries_than_permits_are_sent_as_outcomes_arrive(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=30)
    most = in_flight = 0

    async def behave(deliveries: Sequence[Delivery], answered: Answered) -> None:
        nonlocal most, in_flight
        in_flight += len(deliveries)
        most = max(most, in_flight)
        for number in range(len(deliveries)):
            await asyncio.sleep(0)
            in_flight -= 1
            answered(number, Delivered())

    run_once(postgresql, ob, adapters={"crm": Broker(behave, window=HOUR)}, concurrency=4)

    assert 2 <= most <= 4
    assert states(postgresql) == {"delivered": 30}


@pytest.mark.parametrize(("error", "its_state"), [(None, "retry"), (RuntimeError("a bug"), "sending")])
def test_an_entry_that_cannot_be_sent_ends_no_other_of_its_batch(
    error: Exception | None,
    its_state: str,
    postgresql: Database,
    ob: outbox.Outbox,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = put(postgresql, ob, count=3)
    broker, make = Broker(), attempt.delivery_of

    def failing(entry: ClaimedEntry, *rest: Any) -> Delivery | None:
        if entry.id != ids[1]:
            return make(entry, *rest)
        if error is not None:
            raise error
        return None

    monkeypatch.setattr(attempt, "delivery_of", failing)
    run_once(postgresql, ob, adapters={"crm": broker})

    assert [state(postgresql, id) for id in ids] == ["delivered", its_state, "delivered"]


@pytest.mark.parametrize(("point", "received"), [("send.before", 0), ("send.after", 3)])
def test_the_points_around_a_send_are_reached_by_a_batch(
    point: str, received: int, postgresql: Database, ob: outbox.Outbox
) -> None:
    put(postgresql, ob, count=3)
    seen: list[int] = []
    broker = Broker()

    with failpoint(point, lambda: seen.append(sum(map(len, broker.batches)))):
        run_once(postgresql, ob, adapters={"crm": broker})

    assert seen == [received]


# --- which method is called


def test_a_subclass_that_replaces_only_send_is_not_bypassed() -> None:
    class Noted(Broker):
        async def send(self, delivery: Delivery) -> Outcome:
            return await super().send(delivery)

    class NotedInBatches(Noted):
        async def send_batch(self, deliveries: Sequence[Delivery], answered: Answered) -> None:
            await super().send_batch(deliveries, answered)

    class Further(NotedInBatches):
        pass

    patched = Broker()
    vars(patched)["send"] = deliver_all

    assert batch_sender_of(Noted()) is None
    assert batch_sender_of(patched) is None
    assert batch_sender_of(MemoryAdapter()) is None
    assert batch_sender_of(Sender()) is None
    for each in (Broker(), NotedInBatches(), Further()):
        assert batch_sender_of(each) == each.send_batch


def test_a_send_batch_that_is_not_async_is_refused() -> None:
    class Blocking(Sender):
        def send_batch(self, deliveries: Sequence[Delivery], answered: Answered) -> None: ...

    with pytest.raises(ConfigurationError, match="its send_batch must be an `async def`"):
        routes(mail=Blocking())
