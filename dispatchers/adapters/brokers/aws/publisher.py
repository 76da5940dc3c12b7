"""The common part of the adapters for AWS: entries of one place are published in batches, and each has its own outcome."""

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

from dispatchers.adapters.brokers.aws.answers import outcome_of_error
from dispatchers.adapters.brokers.aws.client import AwsClient
from dispatchers.adapters.brokers.batch import BatchAdapter, messages_of, parts_of
from dispatchers.adapters.places import EVENT_ID, Places
from dispatchers.delivery import Answered, Delivery, Outcome, Rejected
from dispatchers.time_limits import RetryPolicy

MAX_ITEMS: Final = 10  # of one request
MAX_ID_CHARS: Final = 128  # of a MessageGroupId, a MessageDeduplicationId and an EventGroupId
WINDOW: Final = timedelta(minutes=5)  # "deduplication interval" in the developer guides of SQS, SNS and EventBridge
TIMEOUT: Final = timedelta(seconds=20)


class Item(NamedTuple):
    """One entry of a request. size: in bytes, as the service counts it."""

    fields: dict[str, Any]
    size: int


Numbered: TypeAlias = tuple[int, Item]
"""An item, with the place of its delivery in the batch."""


class AwsPublisher(BatchAdapter):
    """An adapter for one service of AWS. A subclass says how the service takes entries.

    setting: what the service calls a place. operation: the client's method. max_bytes: of one request.
    """

    _setting: ClassVar[str]
    _operation: ClassVar[str]
    _max_bytes: ClassVar[int]

    def __init__(
        self, client: AwsClient, place: str | Mapping[str, str], *, timeout: timedelta, retry: RetryPolicy
    ) -> None:
        self.timeout = timeout
        self.retry = retry
        self._client = client
        self._place = place
        self._places = Places(self._setting, place)

    @abstractmethod
    def _item(self, delivery: Delivery) -> Item:
        """The entry as the service takes it. Raises `Unsendable`."""

    @abstractmethod
    def _request(self, place: str, entries: Sequence[dict[str, Any]]) -> Mapping[str, Any]:
        """The parameters of a request to a place with these entries."""

    @abstractmethod
    def _outcomes(self, answer: Mapping[str, Any], count: int) -> Sequence[Outcome]:
        """The outcomes of the entries of a request, in their order."""

    async def send_batch(self, deliveries: Sequence[Delivery], answered: Answered) -> None:
        """Send the requests side by side, as many of them as there are threads."""
        to_places = dict[str, list[Numbered]]()
        for number, (place, item) in messages_of(deliveries, self._placed, answered):
            to_places.setdefault(place, []).append((number, item))
        async with asyncio.TaskGroup() as requests:
            for place, items in to_places.items():
                for part in parts_of(
                    items, max_items=MAX_ITEMS, max_size=self._max_bytes, size=lambda each: each[1].size
                ):
                    requests.create_task(self._publish(place, part, deliveries[0].deadline, answered))

    async def aclose(self) -> None:
        """Close the connections. You may use the adapter again afterwards."""
        self._client.close()

    def _placed(self, delivery: Delivery) -> tuple[str, Item]:
        return self._places.of(delivery), self._item(delivery)

    async def _publish(self, place: str, items: Sequence[Numbered], deadline: float, answered: Answered) -> None:
        request = self._request(place, [item.fields for _, item in items])
        try:
            answer = await self._client.call(self._operation, deadline, request)
            outcomes = self._outcomes(answer, len(items))
        except Exception as error:  # botocore raises not only its own errors for an unusual answer
            outcome = outcome_of_error(error)
            if isinstance(outcome, Rejected) and len(items) > 1:  # one of them, but which: nothing was executed yet
                for each in items:
                    await self._publish(place, [each], deadline, answered)
                return
            outcomes = [outcome] * len(items)
        for (number, _), outcome in zip(items, outcomes, strict=True):
            answered(number, outcome)


def group_of(delivery: Delivery) -> str:
    """The message group: the ordering key, or else the entry's id. The same for each attempt, because a queue may deduplicate
    in each group alone.
    """
    if delivery.ordering_key is None:
        return str(delivery.id)
    if len(delivery.ordering_key) <= MAX_ID_CHARS and all("!" <= char <= "~" for char in delivery.ordering_key):
        return delivery.ordering_key
    return sha256(delivery.ordering_key.encode()).hexdigest()


def attributes_of(delivery: Delivery) -> dict[str, dict[str, str]]:
    """The attributes of a message: the child key and the headers of the trace."""
    texts = {EVENT_ID: delivery.key, "content-type": "application/json", **delivery.headers}
    return {name: {"DataType": "String", "StringValue": text} for name, text in texts.items() if text}


def size_of(body: bytes, attributes: Mapping[str, Mapping[str, str]]) -> int:
    """The size of a message as SQS and SNS count it."""
    named = ((name, *attribute.values()) for name, attribute in attributes.items())
    return len(body) + sum(len(text.encode()) for texts in named for text in texts)
