"""Collects the sends of one turn of the event loop, so that an adapter publishes them in one request.

The dispatcher runs each send in a task of its own. Of an ordering group only the first entry is in flight. So a batch never
has two entries of one group, and a failed entry stops the rest of its group without a rule here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

Waiting = tuple[Item, asyncio.Future[Answer]]


@dataclass(frozen=True, kw_only=True)
class BatchLimits(Generic[Item]):
    """items_max: how many items one batch has. size: the size of an item. size_max: the largest sum of sizes in one batch."""

    items_max: int
    size: Callable[[Item], int] = lambda item: 0
    size_max: int = 0


class Batches(Generic[Item, Answer]):
    """Publishes items in batches. Each `send` returns the answer to its own item.

    publish: publishes one batch, and returns one answer for each item, in their order. If it raises, every send of the batch
        raises the same exception. It is cancelled when the last send of its batch is cancelled.
    """

    def __init__(
        self, publish: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]], limits: BatchLimits[Item]
    ) -> None:
        self._publish = publish
        self._limits = limits
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[Waiting[Item, Answer]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(self, item: Item) -> Answer:
        """The answer to this item. If it is cancelled before its batch begins, the item is not published."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # futures and tasks end with their event loop
            self._loop, self._waiting, self._tasks = loop, [], set()
        if not self._waiting:
            loop.call_soon(self._begin, loop)
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((item, answer))
        return await answer

    async def aclose(self) -> None:
        """Cancel the batches that are being published: their sends end as cancelled."""
        if self._loop is asyncio.get_running_loop():
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting, self._waiting = self._waiting, []
        for batch in self._cut([each for each in waiting if not each[1].done()]):
            task = loop.create_task(self._run(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            _end_with_the_last_of(batch, task)

    def _cut(self, waiting: Sequence[Waiting[Item, Answer]]) -> Iterator[list[Waiting[Item, Answer]]]:
        """An item that alone is larger than the limit has a batch of its own: the broker's answer to it is the truth."""
        limits, batch, size = self._limits, list[Waiting[Item, Answer]](), 0
        for each in waiting:
            its = limits.size(each[0])
            if batch and (len(batch) == limits.items_max or size + its > limits.size_max > 0):
                yield batch
                batch, size = [], 0
            batch.append(each)
            size += its
        if batch:
            yield batch

    async def _run(self, batch: Sequence[Waiting[Item, Answer]]) -> None:
        try:
            answers = await self._publish([item for item, _ in batch])
            for (_, waiting), answer in zip(batch, answers, strict=True):
                if not waiting.done():
                    waiting.set_result(answer)
        except Exception as error:
            for _, waiting in batch:
                if not waiting.done():
                    waiting.set_exception(error)
        finally:
            for _, waiting in batch:
                waiting.cancel()  # no effect on those that have an answer


def _end_with_the_last_of(batch: Sequence[Waiting[Item, Answer]], task: asyncio.Task[None]) -> None:
    left = len(batch)

    def one_ended(_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            task.cancel()  # no effect if it has answered them all

    for _, waiting in batch:
        waiting.add_done_callback(one_ended)
