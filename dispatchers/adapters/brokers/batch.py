"""The common part of adapters that send in batches: `send` as a batch of one, the messages of a batch, and its parts."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from dispatchers.adapters.places import PlacesAdapter, Unsendable
from dispatchers.delivery import Answered, Deferred, Delivery, Outcome, Rejected

Item = TypeVar("Item")
Message = TypeVar("Message")

log = logging.getLogger("outbox.dispatcher")


class BatchAdapter(PlacesAdapter):
    """Sends the entries of a claim with one call. An entry that the dispatcher sends alone is a batch of one."""

    async def send(self, delivery: Delivery) -> Outcome:
        outcomes: list[Outcome] = []
        await self.send_batch([delivery], lambda number, outcome: outcomes.append(outcome))
        return outcomes[0]

    @abstractmethod
    async def send_batch(self, deliveries: Sequence[Delivery], answered: Answered) -> None:
        """Send a batch: see `Adapter.send_batch`."""


def messages_of(
    deliveries: Iterable[Delivery], make: Callable[[Delivery], Message], answered: Answered
) -> list[tuple[int, Message]]:
    """The message of each delivery, with its place in the batch. A delivery without a valid message ends here.

    make: raises `Unsendable` for an entry that can never be sent.
    """
    made = list[tuple[int, Message]]()
    for number, delivery in enumerate(deliveries):
        try:
            made.append((number, make(delivery)))
        except Unsendable as problem:
            answered(number, Rejected(str(problem)))
        except Exception as error:  # of this delivery: the others of the batch must still be sent
            log.exception(
                "entry %s (%s): nothing was sent, because no message can be made of it", delivery.id, delivery.operation
            )
            answered(number, Deferred(f"nothing was sent, no message can be made of it: {type(error).__name__}"))
    return made


def parts_of(
    items: Iterable[Item], *, max_items: int, max_size: int, size: Callable[[Item], int]
) -> Iterator[Sequence[Item]]:
    """The items in parts of at most `max_items` items, and together of at most `max_size` bytes.

    An item that alone is larger has a part of its own: the broker's answer to it is the truth.
    """
    part, total = list[Item](), 0
    for item in items:
        its = size(item)
        if part and (len(part) == max_items or total + its > max_size):
            yield part
            part, total = [], 0
        part.append(item)
        total += its
    if part:
        yield part
