"""The sends of one turn of the event loop are published in batches."""

import asyncio
from collections.abc import Sequence

import pytest

from dispatchers.adapters.brokers.batch import Batches, BatchLimits


class Broker:
    """Keeps the batches, and answers each item with its double."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    async def publish(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        if 13 in items:
            raise OSError("the connection is lost")
        return [2 * item for item in items]


class Hanging:
    """Never answers."""

    def __init__(self) -> None:
        self.began, self.ended = asyncio.Event(), asyncio.Event()

    async def publish(self, items: Sequence[int]) -> list[int]:
        self.began.set()
        try:
            return await asyncio.Future()
        finally:
            self.ended.set()


def test_the_sends_of_one_turn_are_one_batch_with_an_answer_each() -> None:
    broker = Broker()

    async def run() -> list[int]:
        batches = Batches(broker.publish, BatchLimits(items_max=10))
        return [*await asyncio.gather(*map(batches.send, [1, 2, 3])), await batches.send(4)]

    assert asyncio.run(run()) == [2, 4, 6, 8]
    assert broker.batches == [[1, 2, 3], [4]]


def test_a_batch_has_at_most_its_number_of_items_and_bytes() -> None:
    broker = Broker()
    limits = BatchLimits[int](items_max=3, size=lambda item: item, size_max=10)

    async def run() -> None:
        batches = Batches(broker.publish, limits)
        await asyncio.gather(*map(batches.send, [1, 1, 1, 1, 5, 4, 1, 99, 2]))

    asyncio.run(run())

    assert broker.batches == [[1, 1, 1], [1, 5, 4], [1], [99], [2]]


def test_a_batch_that_fails_fails_for_its_own_sends_only() -> None:
    broker = Broker()

    async def run() -> list[object]:
        batches = Batches(broker.publish, BatchLimits(items_max=2))
        return list(await asyncio.gather(*map(batches.send, [1, 13, 3]), return_exceptions=True))

    first, second, third = asyncio.run(run())

    assert isinstance(first, OSError)
    assert isinstance(second, OSError)
    assert third == 6


def test_a_send_that_is_cancelled_before_its_batch_is_not_published() -> None:
    broker = Broker()

    async def run() -> None:
        batches = Batches(broker.publish, BatchLimits(items_max=10))
        sends = [asyncio.ensure_future(batches.send(item)) for item in (1, 2)]
        asyncio.get_running_loop().call_soon(sends[0].cancel)
        await asyncio.wait(sends)

    asyncio.run(run())

    assert broker.batches == [[2]]


def test_a_batch_ends_with_the_last_of_its_sends() -> None:
    async def run() -> None:
        broker = Hanging()
        batches = Batches(broker.publish, BatchLimits(items_max=10))
        first, last = (asyncio.ensure_future(batches.send(item)) for item in (1, 2))
        await broker.began.wait()
        first.cancel()
        await asyncio.wait([first])
        assert not broker.ended.is_set()
        last.cancel()
        await broker.ended.wait()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_it_can_be_used_in_another_event_loop_after_it_was_closed() -> None:
    broker = Broker()
    batches = Batches(broker.publish, BatchLimits(items_max=10))

    async def run(item: int) -> int:
        answer = await batches.send(item)
        await batches.aclose()
        return answer

    assert [asyncio.run(run(item)) for item in (1, 2)] == [2, 4]


def test_closing_cancels_the_sends_in_flight() -> None:
    async def run() -> None:
        broker = Hanging()
        batches = Batches(broker.publish, BatchLimits(items_max=10))
        sending = asyncio.ensure_future(batches.send(1))
        await broker.began.wait()
        await batches.aclose()
        with pytest.raises(asyncio.CancelledError):
            await sending

    asyncio.run(asyncio.wait_for(run(), 20))
