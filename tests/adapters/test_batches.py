"""What the brokers' adapters share: the messages of a batch, its parts, and a send as a batch of one."""

import asyncio
import logging
from collections.abc import Sequence

import pytest
from support.deliveries import delivery

from dispatchers import Deferred, Delivered, Delivery, Outcome, Rejected
from dispatchers.adapters.brokers.batch import BatchAdapter, messages_of, parts_of
from dispatchers.adapters.places import Unsendable
from dispatchers.delivery import Answered


def test_a_batch_is_cut_by_the_number_and_the_size_of_its_items() -> None:
    parts = parts_of([1, 1, 1, 1, 5, 4, 1, 99, 2], max_items=3, max_size=10, size=lambda item: item)

    assert [list(part) for part in parts] == [[1, 1, 1], [1, 5, 4], [1], [99], [2]]


def test_a_delivery_without_a_message_ends_and_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def make(delivery: Delivery) -> str:
        if delivery.operation == "never":
            raise Unsendable("it is too long")
        if delivery.operation == "malformed":
            raise ValueError("secret")
        return delivery.operation.upper()

    outcomes: dict[int, Outcome] = {}
    deliveries = [delivery(operation=operation) for operation in ("a", "never", "malformed", "b")]
    with caplog.at_level(logging.ERROR):
        messages = messages_of(deliveries, make, outcomes.__setitem__)

    assert messages == [(0, "A"), (3, "B")]
    assert outcomes == {
        1: Rejected("it is too long"),
        2: Deferred("nothing was sent, no message can be made of it: ValueError"),
    }
    assert f"entry {deliveries[2].id} (malformed): nothing was sent" in caplog.text


def test_an_entry_that_is_sent_alone_is_a_batch_of_one() -> None:
    class Broker(BatchAdapter):
        async def send_batch(self, deliveries: Sequence[Delivery], answered: Answered) -> None:
            answered(0, Delivered([each.operation for each in deliveries]))

    assert asyncio.run(Broker().send(delivery(operation="a"))) == Delivered(["a"])
