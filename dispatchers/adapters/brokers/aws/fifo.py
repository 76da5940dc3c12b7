"""The common part of SQS FIFO queues and SNS FIFO topics: the deduplication id, the message group and the answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, Final

from dispatchers.adapters.brokers.aws.answers import outcome_of_failure, remembered
from dispatchers.adapters.brokers.aws.client import AwsClient
from dispatchers.adapters.brokers.aws.publisher import (
    WINDOW,
    AwsPublisher,
    AwsService,
    Item,
    attributes_of,
    group_of,
    size_of,
)
from dispatchers.adapters.places import Places, Unsendable
from dispatchers.delivery import Delivered, Delivery, KeyFormat, Outcome, Unknown
from outbox.errors import ConfigurationError

FIFO: Final = ".fifo"  # the name of every FIFO queue and topic ends so, and of no other


@dataclass(frozen=True, slots=True, kw_only=True)
class FifoService:
    """What differs between SQS and SNS. setting: their word for the place of a message. body_field: their word for the body.
    The others: see `AwsService`.
    """

    setting: str
    body_field: str
    operation: str
    max_bytes: int
    request: Callable[[str, Sequence[dict[str, Any]]], Mapping[str, Any]]


class FifoAdapter(AwsPublisher):
    """An adapter for FIFO queues or topics."""

    key_format = KeyFormat(max_chars=128)

    def __init__(
        self,
        fifo: FifoService,
        client: AwsClient,
        place: str | Mapping[str, str],
        *,
        key_attribute: str,
        window: timedelta,
    ) -> None:
        service = AwsService(
            operation=fifo.operation,
            max_bytes=fifo.max_bytes,
            item=self._item,
            request=fifo.request,
            outcomes=_outcomes,
        )
        super().__init__(service, client, Places(fifo.setting, place))
        for each in [place] if isinstance(place, str) else place.values():
            if not each.endswith(FIFO):
                raise ConfigurationError(
                    f"{fifo.setting}={each!r} must be a FIFO queue or topic, whose name ends in {FIFO}"
                )
        if not isinstance(key_attribute, str) or not key_attribute:
            raise ConfigurationError(f"key_attribute={key_attribute!r} must be the name of a message attribute")
        if not isinstance(window, timedelta) or window > WINDOW:
            raise ConfigurationError(
                f"window={window!r} must be a timedelta of at most {WINDOW}: AWS remembers no longer"
            )
        self.window = window
        self.pinned = f"{fifo.setting} {_digest(place)}"  # each place remembers its own ids
        self._fifo = fifo
        self._key_attribute = key_attribute
        self._place = place

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._place!r}, window={self.window!r})"

    def _item(self, delivery: Delivery) -> Item:
        chosen = delivery.options.get(self._fifo.setting)
        if isinstance(chosen, str) and not chosen.endswith(FIFO):
            raise Unsendable(
                f"the option {self._fifo.setting!r} must name a FIFO queue or topic, whose name ends in {FIFO}"
            )
        attributes = attributes_of(delivery, self._key_attribute)
        fields = {
            self._fifo.body_field: delivery.payload_json.decode(),
            "MessageAttributes": attributes,
            "MessageDeduplicationId": delivery.key,
            "MessageGroupId": group_of(delivery),
        }
        return Item(fields, size_of(delivery.payload_json, attributes))


def _outcomes(answer: Mapping[str, Any], count: int) -> Sequence[Outcome]:
    found: dict[Any, Outcome] = {}
    for failed in answer.get("Failed") or ():
        code, is_our_fault = failed.get("Code"), failed.get("SenderFault") is True
        found[failed.get("Id")] = outcome_of_failure(code, is_our_fault=is_our_fault)
    for taken in answer.get("Successful") or ():
        found[taken.get("Id")] = Delivered(remembered(taken, message_id="MessageId", sequence_number="SequenceNumber"))
    return [found.get(str(number), Unknown("the answer does not list the entry")) for number in range(count)]


def _digest(place: str | Mapping[str, str]) -> str:
    text = place if isinstance(place, str) else repr(sorted(place.items()))
    return sha256(text.encode()).hexdigest()[:16]
