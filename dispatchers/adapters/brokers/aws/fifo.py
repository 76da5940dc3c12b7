"""The common part of SQS FIFO queues and SNS FIFO topics: the deduplication id, the message group and the answer."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any, ClassVar, Final

from dispatchers.adapters.brokers.aws.answers import outcome_of_failure, remembered
from dispatchers.adapters.brokers.aws.client import AwsClient
from dispatchers.adapters.brokers.aws.publisher import WINDOW, AwsPublisher, Item, attributes_of, group_of, size_of
from dispatchers.adapters.places import Unsendable
from dispatchers.delivery import Delivered, Delivery, KeyFormat, Outcome, Unknown
from dispatchers.time_limits import RetryPolicy
from outbox.errors import ConfigurationError

FIFO: Final = ".fifo"  # the name of every FIFO queue and topic ends so, and of no other


class FifoAdapter(AwsPublisher):
    """An adapter for FIFO queues or topics. body_field: what the service calls the body of a message."""

    key_format = KeyFormat(max_chars=128)
    _body_field: ClassVar[str]

    def __init__(
        self,
        client: AwsClient,
        place: str | Mapping[str, str],
        *,
        window: timedelta,
        timeout: timedelta,
        retry: RetryPolicy,
    ) -> None:
        super().__init__(client, place, timeout=timeout, retry=retry)
        for each in [place] if isinstance(place, str) else place.values():
            if not each.endswith(FIFO):
                raise ConfigurationError(
                    f"{self._setting}={each!r} must be a FIFO queue or topic, whose name ends in {FIFO}"
                )
        if not isinstance(window, timedelta) or window > WINDOW:
            raise ConfigurationError(
                f"window={window!r} must be a timedelta of at most {WINDOW}: AWS remembers no longer"
            )
        self.window = window
        self.pinned = f"{self._setting} {_digest(place)}"  # each place remembers its own ids

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._place!r}, window={self.window!r})"

    def _item(self, delivery: Delivery) -> Item:
        chosen = delivery.options.get(self._setting)
        if isinstance(chosen, str) and not chosen.endswith(FIFO):
            raise Unsendable(f"the option {self._setting!r} must name a FIFO queue or topic, whose name ends in {FIFO}")
        attributes = attributes_of(delivery)
        fields = {
            self._body_field: delivery.payload_json.decode(),
            "MessageAttributes": attributes,
            "MessageDeduplicationId": delivery.key,
            "MessageGroupId": group_of(delivery),
        }
        return Item(fields, size_of(delivery.payload_json, attributes))

    def _outcomes(self, answer: Mapping[str, Any], count: int) -> Sequence[Outcome]:
        found: dict[Any, Outcome] = {}
        for failed in answer.get("Failed") or ():
            code, is_our_fault = failed.get("Code"), failed.get("SenderFault") is True
            found[failed.get("Id")] = outcome_of_failure(code, is_our_fault=is_our_fault)
        for taken in answer.get("Successful") or ():
            found[taken.get("Id")] = Delivered(
                remembered(taken, message_id="MessageId", sequence_number="SequenceNumber")
            )
        return [found.get(str(number), Unknown("the answer does not list the entry")) for number in range(count)]


def numbered(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries with their places in the request, by which the answer names them."""
    return [{"Id": str(number), **each} for number, each in enumerate(entries)]


def _digest(place: str | Mapping[str, str]) -> str:
    text = place if isinstance(place, str) else repr(sorted(place.items()))
    return sha256(text.encode()).hexdigest()[:16]
