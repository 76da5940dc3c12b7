"""SQS: sends each entry as one message of a FIFO queue, under the child key as deduplication id.

    orders = SqsFifoAdapter(queue="https://sqs.eu-central-1.amazonaws.com/123456789012/orders.fifo")
    Dispatcher(..., adapters={"orders": orders})

    outbox.enqueue(session, "orders.placed", {"number": "C-1"}, parent="order:C-1", ordering_key="customer:ada")

The body is the payload's JSON. The message group is the entry's ordering key, or else its id. The child key is also the message
attribute `event_id`, where `outbox.inboxes.from_sqs` finds it.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from dispatchers.adapters.brokers.aws.client import AwsClient
from dispatchers.adapters.brokers.aws.fifo import FifoAdapter, numbered
from dispatchers.adapters.brokers.aws.publisher import TIMEOUT, WINDOW
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy

MAX_BYTES: Final = 1_048_576  # of a message and of a request: API reference, SendMessageBatch


class SqsFifoAdapter(FifoAdapter):
    """Sends to FIFO queues, up to ten messages in a request. It needs `boto3`.

    queue: the URL of the queue, or a mapping from operations to URLs. An entry's `options={"queue": ...}` replaces it.
    window: how long a queue remembers a deduplication id: 5 minutes, also after the message was deleted.
    timeout: how long one send may take. A request leaves within its first quarter or not at all.
    boto3_session: a `boto3.Session`. By default boto3 finds the region and the credentials as it always does.
    endpoint_url: as for `boto3.client`.
    max_threads: how many requests run at the same time.

    SQS reports a duplicate as a success, so no answer is `replayed`. boto3's own retries are off, and the proxies of the
    environment are ignored.
    """

    _setting = "queue"
    _body_field = "MessageBody"
    _operation = "send_message_batch"
    _max_bytes = MAX_BYTES

    def __init__(
        self,
        *,
        queue: str | Mapping[str, str],
        window: timedelta = WINDOW,
        timeout: timedelta = TIMEOUT,
        retry: RetryPolicy = DEFAULT_RETRY,
        boto3_session: Any = None,
        endpoint_url: str | None = None,
        max_threads: int = 10,
    ) -> None:
        client = AwsClient(
            "sqs", timeout=timeout, boto3_session=boto3_session, endpoint_url=endpoint_url, max_threads=max_threads
        )
        super().__init__(client, queue, window=window, timeout=timeout, retry=retry)

    def _request(self, place: str, entries: Sequence[dict[str, Any]]) -> Mapping[str, Any]:
        return {"QueueUrl": place, "Entries": numbered(entries)}
