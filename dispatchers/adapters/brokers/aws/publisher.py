"""What the adapters for AWS share: entries of one place are published in batches, and each entry has an outcome of its own."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any, ClassVar, Final, NamedTuple

from dispatchers.adapters.brokers.aws.answers import outcome_of_error
from dispatchers.adapters.brokers.aws.client import AwsClient
from dispatchers.adapters.brokers.batch import Batches, BatchLimits
from dispatchers.adapters.places import Places, PlacesAdapter, Unsendable
from dispatchers.delivery import Delivery, Outcome, Rejected

ID_CHARS_MAX: Final = 128  # of a MessageGroupId, a MessageDeduplicationId and an EventGroupId
WINDOW: Final = timedelta(minutes=5)  # "deduplication interval" in the developer guides of SQS, SNS and EventBridge
TIMEOUT: Final = timedelta(seconds=20)


class Item(NamedTuple):
    """One entry of a request. size: in bytes, as the service counts it."""

    fields: dict[str, Any]
    size: int
    deadline: float


class AwsPublisher(PlacesAdapter):
    """An adapter for one service of AWS.

    operation: the client's method. items_max, bytes_max: of one request.
    """

    operation: ClassVar[str]
    items_max: ClassVar[int] = 10
    bytes_max: ClassVar[int]

    def __init__(self, client: AwsClient, places: Places) -> None:
        self._client = client
        self._places = places
        self._batches: dict[str, Batches[Item, Outcome]] = {}

    async def send(self, delivery: Delivery) -> Outcome:
        try:
            place = self._places.of(delivery)
            item = self.item(delivery)
        except Unsendable as problem:
            return Rejected(str(problem))
        return await self._batches_to(place).send(item)

    async def aclose(self) -> None:
        """Close the connections. You may use the adapter again afterwards."""
        for batches in self._batches.values():
            await batches.aclose()
        self._batches = {}
        self._client.close()

    @abstractmethod
    def item(self, delivery: Delivery) -> Item:
        """The entry as the service takes it. Raises `Unsendable`."""

    @abstractmethod
    def request(self, place: str, entries: Sequence[dict[str, Any]]) -> Mapping[str, Any]:
        """The parameters of the request."""

    @abstractmethod
    def outcomes(self, answer: Mapping[str, Any], count: int) -> Sequence[Outcome]:
        """The outcomes of the request's entries, in their order."""

    def _batches_to(self, place: str) -> Batches[Item, Outcome]:
        if place not in self._batches:

            async def publish(items: Sequence[Item]) -> Sequence[Outcome]:
                return await self._publish(place, items)

            limits = BatchLimits[Item](items_max=self.items_max, size=lambda item: item.size, size_max=self.bytes_max)
            self._batches[place] = Batches(publish, limits)
        return self._batches[place]

    async def _publish(self, place: str, items: Sequence[Item]) -> Sequence[Outcome]:
        request = self.request(place, [item.fields for item in items])
        try:
            answer = await self._client.call(self.operation, min(item.deadline for item in items), request)
        except Exception as error:  # botocore raises not only its own errors for an unusual answer
            outcome = outcome_of_error(error)
            if isinstance(outcome, Rejected) and len(items) > 1:  # one of them, but which: nothing was executed yet
                return [(await self._publish(place, [item]))[0] for item in items]
            return [outcome] * len(items)
        return self.outcomes(answer, len(items))


def group_of(delivery: Delivery) -> str:
    """The message group: the ordering key, or else the entry's id. The same for each attempt, because a queue may deduplicate
    in each group alone.
    """
    if delivery.ordering_key is None:
        return str(delivery.id)
    if len(delivery.ordering_key) <= ID_CHARS_MAX and all("!" <= char <= "~" for char in delivery.ordering_key):
        return delivery.ordering_key
    return sha256(delivery.ordering_key.encode()).hexdigest()


def attributes_of(delivery: Delivery, key_attribute: str) -> dict[str, dict[str, str]]:
    """The attributes of a message: the child key and the headers of the trace."""
    texts = {key_attribute: delivery.key, "content-type": "application/json", **delivery.headers}
    return {name: {"DataType": "String", "StringValue": text} for name, text in texts.items() if text}


def size_of(body: bytes, attributes: Mapping[str, Mapping[str, str]]) -> int:
    """The size of a message as SQS and SNS count it."""
    named = ((name, *attribute.values()) for name, attribute in attributes.items())
    return len(body) + sum(len(text.encode()) for texts in named for text in texts)
