"""EventBridge: puts each entry as one event on a bus. EventBridge deduplicates nothing.

    orders = EventBridgeAdapter(bus="shop", source="com.example.shop", at_least_once=True)
    Dispatcher(..., adapters={"orders": orders})

    outbox.enqueue(session, "orders.placed", {"number": "C-1"}, parent="order:C-1")     # the detail type is `orders.placed`

The event's detail is `{"metadata": {"event_id": ...}, "data": ...}`: the child key, where
`outbox.inboxes.from_eventbridge` finds it, and the payload. After a lost answer an entry is `uncertain`, unless the
adapter has `at_least_once=True`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from dispatchers.adapters.brokers.aws.answers import outcome_of_failure, remembered
from dispatchers.adapters.brokers.aws.client import AwsClient
from dispatchers.adapters.brokers.aws.publisher import TIMEOUT, AwsPublisher, Item
from dispatchers.adapters.places import EVENT_ID, Unsendable
from dispatchers.delivery import Delivered, Delivery, Outcome, Unknown
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy
from outbox.errors import ConfigurationError

MAX_BYTES: Final = 1_000_000  # of an event and of a request: API reference, PutEvents
MAX_DETAIL_TYPE_CHARS: Final = 128
OUR_FAULT: Final = re.compile(r"Invalid|Malformed|Validation")


class EventBridgeAdapter(AwsPublisher):
    """Puts events on buses, up to ten in a request. It needs `boto3`.

    bus: the name or the ARN of the bus, or a mapping from operations to buses. An entry's `options={"bus": ...}` replaces it.
    source: of all events. The detail type is the operation.
    at_least_once: whether to put the event again after a lost answer. It may then be there twice, and the consumer's inbox must
        recognise it. False, the default: the entry is `uncertain`.
    timeout: how long one send may take. A request leaves within its first quarter or not at all.
    boto3_session: a `boto3.Session`. By default boto3 finds the region and the credentials as it always does.
    endpoint_url: as for `boto3.client`.
    max_threads: how many requests run at the same time.

    boto3's own retries are off, and the proxies of the environment are ignored. EventBridge keeps no order.
    """

    _setting = "bus"
    _operation = "put_events"
    _max_bytes = MAX_BYTES

    def __init__(
        self,
        *,
        bus: str | Mapping[str, str],
        source: str,
        at_least_once: bool = False,
        timeout: timedelta = TIMEOUT,
        retry: RetryPolicy = DEFAULT_RETRY,
        boto3_session: Any = None,
        endpoint_url: str | None = None,
        max_threads: int = 10,
    ) -> None:
        if not isinstance(source, str) or not source or source.startswith("aws."):
            raise ConfigurationError(f"source={source!r} must be a text that does not begin with 'aws.'")
        client = AwsClient(
            "events", timeout=timeout, boto3_session=boto3_session, endpoint_url=endpoint_url, max_threads=max_threads
        )
        super().__init__(client, bus, timeout=timeout, retry=retry)
        self.at_least_once = at_least_once
        self._source = source

    def __repr__(self) -> str:
        return f"EventBridgeAdapter({self._place!r}, source={self._source!r})"

    def _item(self, delivery: Delivery) -> Item:
        if len(delivery.operation) > MAX_DETAIL_TYPE_CHARS:
            raise Unsendable(
                f"the operation cannot be a detail type: it is longer than {MAX_DETAIL_TYPE_CHARS} characters"
            )
        metadata = json.dumps({**delivery.headers, EVENT_ID: delivery.key})
        detail = f'{{"metadata": {metadata}, "data": {delivery.payload_json.decode()}}}'
        fields = {"Source": self._source, "DetailType": delivery.operation, "Detail": detail}
        return Item(fields, sum(len(text.encode()) for text in fields.values()))

    def _request(self, place: str, entries: Sequence[dict[str, Any]]) -> Mapping[str, Any]:
        return {"Entries": [{**each, "EventBusName": place} for each in entries]}

    def _outcomes(self, answer: Mapping[str, Any], count: int) -> Sequence[Outcome]:
        """The answer has an entry for each of the request, in its order."""
        found = answer.get("Entries") or []
        if len(found) != count:
            return [Unknown("the answer does not list the entries of the request")] * count
        return [_outcome(each) for each in found]


def _outcome(entry: Mapping[str, Any]) -> Outcome:
    if entry.get("EventId"):
        return Delivered(remembered(entry, event_id="EventId"))
    code = entry.get("ErrorCode")
    return outcome_of_failure(code, is_our_fault=OUR_FAULT.match(str(code)) is not None)
