"""SNS: publishes each entry as one message of a FIFO topic, under the child key as deduplication id.

    orders = SnsFifoAdapter(topic="arn:aws:sns:eu-central-1:123456789012:orders.fifo")
    Dispatcher(..., adapters={"orders": orders})

The message is like that of `SqsFifoAdapter`. A subscription with raw message delivery passes the attribute `event_id` on to a
queue, where `outbox.inboxes.from_sqs` finds it.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from dispatchers.adapters.brokers.aws.client import AwsClient
from dispatchers.adapters.brokers.aws.fifo import FifoAdapter, numbered
from dispatchers.adapters.brokers.aws.publisher import TIMEOUT, WINDOW
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy

MAX_BYTES: Final = 262_144  # of a message and of a request, by default: API reference, PublishBatch


class SnsFifoAdapter(FifoAdapter):
    """Publishes to FIFO topics, up to ten messages in a request. It needs `boto3`.

    topic: the ARN of the topic, or a mapping from operations to ARNs. An entry's `options={"topic": ...}` replaces it.

    The other settings, and what is said there, are those of `SqsFifoAdapter`.
    """

    _setting = "topic"
    _body_field = "Message"
    _operation = "publish_batch"
    _max_bytes = MAX_BYTES

    def __init__(
        self,
        *,
        topic: str | Mapping[str, str],
        window: timedelta = WINDOW,
        timeout: timedelta = TIMEOUT,
        retry: RetryPolicy = DEFAULT_RETRY,
        boto3_session: Any = None,
        endpoint_url: str | None = None,
        max_threads: int = 10,
    ) -> None:
        client = AwsClient(
            "sns", timeout=timeout, boto3_session=boto3_session, endpoint_url=endpoint_url, max_threads=max_threads
        )
        super().__init__(client, topic, window=window, timeout=timeout, retry=retry)

    def _request(self, place: str, entries: Sequence[dict[str, Any]]) -> Mapping[str, Any]:
        return {"TopicArn": place, "PublishBatchRequestEntries": numbered(entries)}
