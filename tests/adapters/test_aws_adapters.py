"""The adapters for AWS with moto, over HTTP: what a queue and a topic get. moto imitates AWS; no test here uses AWS itself."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from support import faulty_aws
from support.deliveries import ORDER, batch_sent, delivery
from support.faulty_aws import SESSION, refused

from dispatchers import Deferred, Delivered, Outcome, Rejected, Unknown
from dispatchers.adapters import EventBridgeAdapter, SnsFifoAdapter, SqsFifoAdapter
from dispatchers.testing import faulty_http
from outbox import inboxes

QUEUE = "https://sqs.eu-central-1.amazonaws.com/123456789012/orders.fifo"
BODY = json.dumps(ORDER).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


class Queue:
    """A queue of one test's own."""

    def __init__(self, server: str, *, fifo: bool = True) -> None:
        self._client = SESSION.client("sqs", endpoint_url=server)
        settings = {"QueueName": f"{uuid4()}.fifo", "Attributes": {"FifoQueue": "true"}}
        made = self._client.create_queue(**settings if fifo else {"QueueName": str(uuid4())})
        self.url = made["QueueUrl"]
        names = ["QueueArn"]
        self.arn = self._client.get_queue_attributes(QueueUrl=self.url, AttributeNames=names)["Attributes"]["QueueArn"]

    def receive(self) -> list[Any]:
        """All messages; of a group that has several, one at a time."""
        received: list[Any] = []
        while True:
            answer = self._client.receive_message(
                QueueUrl=self.url,
                MaxNumberOfMessages=10,
                MessageAttributeNames=["All"],
                MessageSystemAttributeNames=["All"],
            )
            if not (messages := answer.get("Messages", [])):
                return received
            received += messages
            for message in messages:
                self._client.delete_message(QueueUrl=self.url, ReceiptHandle=message["ReceiptHandle"])


@pytest.fixture
def queue(server: str) -> Queue:
    return Queue(server)


def keys_of(messages: list[Any]) -> list[str]:
    return [inboxes.from_sqs(each, scope="shop", attribute="event_id")["message_id"] for each in messages]


# --- SQS


def test_a_message_has_the_child_key_where_an_inbox_finds_it(server: str, queue: Queue) -> None:
    adapter = SqsFifoAdapter(queue=queue.url, boto3_session=SESSION, endpoint_url=server)

    (outcome,) = batch_sent(adapter, delivery("ck1_a", headers={"traceparent": "00-1"}, ordering_key="customer:ada"))

    (message,) = queue.receive()
    system = message["Attributes"]
    assert outcome == Delivered({"message_id": message["MessageId"], "sequence_number": system["SequenceNumber"]})
    assert keys_of([message]) == ["ck1_a"]
    assert (message["Body"].encode(), system["MessageDeduplicationId"]) == (BODY, "ck1_a")
    assert system["MessageGroupId"] == "customer:ada"
    assert message["MessageAttributes"]["traceparent"]["StringValue"] == "00-1"


def test_a_second_send_under_a_key_is_no_second_message(server: str, queue: Queue) -> None:
    def adapter() -> SqsFifoAdapter:
        return SqsFifoAdapter(queue=queue.url, boto3_session=SESSION, endpoint_url=server)

    outcomes = batch_sent(adapter(), delivery("ck1_a"), delivery("ck1_b")) + batch_sent(adapter(), delivery("ck1_a"))

    assert [type(outcome) for outcome in outcomes] == [Delivered] * 3
    assert sorted(keys_of(queue.receive())) == ["ck1_a", "ck1_b"]


@pytest.mark.parametrize("ordering_key", ["customer:ada lovelace", "kundin:änne", "k" * 129])
def test_an_ordering_key_that_is_no_group_id_is_hashed(server: str, queue: Queue, ordering_key: str) -> None:
    adapter = SqsFifoAdapter(queue=queue.url, boto3_session=SESSION, endpoint_url=server)

    batch_sent(adapter, *(delivery(key, ordering_key=ordering_key) for key in ("ck1_a", "ck1_b")))

    (group,) = {message["Attributes"]["MessageGroupId"] for message in queue.receive()}
    assert len(group) == 64
    assert group.isalnum()


def test_a_batch_has_at_most_ten_messages_and_a_mebibyte() -> None:
    with faulty_aws.faulty_aws(faulty_aws.sqs_entries) as remote:
        remote.behave(faulty_aws.sqs_taken())
        adapter = SqsFifoAdapter(queue=QUEUE, boto3_session=SESSION, endpoint_url=remote.http.url)
        large = "x" * 400_000

        batch_sent(adapter, *(delivery(f"ck1_{number}") for number in range(23)))
        small_batches = [len(json.loads(request.body)["Entries"]) for request in remote.http.requests]
        batch_sent(adapter, *(delivery(f"ck1_{number}", large) for number in range(5)))
        large_batches = [len(json.loads(request.body)["Entries"]) for request in remote.http.requests[3:]]

    assert sorted(small_batches) == [3, 10, 10]
    assert sorted(large_batches) == [1, 2, 2]


def test_a_refused_batch_is_sent_message_by_message() -> None:
    """One entry was wrong, and the answer does not name it: the others must not fail with it."""
    with faulty_aws.faulty_aws(faulty_aws.sqs_entries) as remote:
        remote.behave(refused(400, "InvalidParameterValue"))
        adapter = SqsFifoAdapter(queue=QUEUE, boto3_session=SESSION, endpoint_url=remote.http.url)

        outcomes = batch_sent(adapter, *(delivery(f"ck1_{number}") for number in range(3)))

        batches = [len(json.loads(request.body)["Entries"]) for request in remote.http.requests]
    assert batches == [3, 1, 1, 1]
    assert outcomes == [Rejected("HTTP 400 InvalidParameterValue")] * 3


def test_what_waits_too_long_for_a_thread_is_not_sent() -> None:
    """Its dispatcher has given it up then, and may have sent it elsewhere."""
    with faulty_aws.faulty_aws(faulty_aws.sqs_entries) as remote:
        remote.behave(faulty_aws.sqs_taken())
        adapter = SqsFifoAdapter(queue=QUEUE, boto3_session=SESSION, endpoint_url=remote.http.url)

        async def late() -> Outcome:
            return await adapter.send(delivery()._replace(deadline=asyncio.get_running_loop().time() + 14))

        outcome = asyncio.run(late())

        assert isinstance(outcome, Deferred)
        assert remote.requests == []


# --- SNS


def test_a_topic_passes_key_and_group_on_to_a_queue(server: str, queue: Queue) -> None:
    client = SESSION.client("sns", endpoint_url=server)
    topic = client.create_topic(Name="orders.fifo", Attributes={"FifoTopic": "true"})["TopicArn"]
    raw = {"RawMessageDelivery": "true"}
    client.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=queue.arn, Attributes=raw)
    adapter = SnsFifoAdapter(topic=topic, boto3_session=SESSION, endpoint_url=server)

    outcomes = batch_sent(adapter, *(delivery(key, ordering_key="customer:ada") for key in ("ck1_a", "ck1_b")))

    messages = queue.receive()
    assert [type(outcome) for outcome in outcomes] == [Delivered] * 2
    assert keys_of(messages) == ["ck1_a", "ck1_b"]
    assert {message["Attributes"]["MessageGroupId"] for message in messages} == {"customer:ada"}


# --- EventBridge


@pytest.fixture
def standard(server: str) -> Queue:
    return Queue(server, fifo=False)


@pytest.fixture
def bus(server: str, standard: Queue) -> str:
    """A bus of one test's own, whose orders go to the queue."""
    client, name = SESSION.client("events", endpoint_url=server), f"shop-{uuid4().hex[:8]}"
    client.create_event_bus(Name=name)
    client.put_rule(Name="orders", EventBusName=name, EventPattern=json.dumps({"detail-type": ["orders.placed"]}))
    client.put_targets(Rule="orders", EventBusName=name, Targets=[{"Id": "queue", "Arn": standard.arn}])
    return name


def test_an_event_has_the_child_key_where_an_inbox_finds_it(server: str, standard: Queue, bus: str) -> None:
    adapter = EventBridgeAdapter(bus=bus, source="com.example.shop", boto3_session=SESSION, endpoint_url=server)

    (outcome,) = batch_sent(adapter, delivery("ck1_a", headers={"traceparent": "00-1"}))

    (event,) = [json.loads(message["Body"]) for message in standard.receive()]
    assert outcome == Delivered({"event_id": event["id"]})
    assert (event["source"], event["detail-type"]) == ("com.example.shop", "orders.placed")
    assert event["detail"]["data"] == json.loads(BODY)
    assert event["detail"]["metadata"]["traceparent"] == "00-1"
    assert inboxes.from_eventbridge(event, scope="shop") == {"scope": "shop", "message_id": "ck1_a"}


def test_eventbridge_deduplicates_nothing(server: str, standard: Queue, bus: str) -> None:
    """What `window=None` declares: the second send is a second event."""
    adapter = EventBridgeAdapter(bus=bus, source="com.example.shop", boto3_session=SESSION, endpoint_url=server)

    outcomes = batch_sent(adapter, delivery("ck1_a")) + batch_sent(adapter, delivery("ck1_a"))

    keys = [json.loads(each["Body"])["detail"]["metadata"]["event_id"] for each in standard.receive()]
    assert adapter.window is None
    assert [type(outcome) for outcome in outcomes] == [Delivered] * 2
    assert keys == ["ck1_a", "ck1_a"]


@pytest.mark.parametrize("body", [b"[1, 2]", b'"text"', b"null", b'{"metadata": 7}'])
def test_any_payload_becomes_the_data_of_an_event(server: str, standard: Queue, bus: str, body: bytes) -> None:
    """EventBridge takes only objects as the detail."""
    adapter = EventBridgeAdapter(bus=bus, source="com.example.shop", boto3_session=SESSION, endpoint_url=server)

    batch_sent(adapter, delivery(payload_json=body))

    (message,) = standard.receive()
    assert json.loads(message["Body"])["detail"]["data"] == json.loads(body)


def test_each_event_of_a_batch_has_its_own_outcome() -> None:
    failing = [{"EventId": "e-1"}, {"ErrorCode": "MalformedDetail"}, {"ErrorCode": "InternalFailure"}]
    with faulty_aws.faulty_aws(faulty_aws.event_entries) as remote:
        remote.behave(faulty_http.answer(200, json={"FailedEntryCount": 2, "Entries": failing}))
        adapter = EventBridgeAdapter(bus="shop", source="s", boto3_session=SESSION, endpoint_url=remote.http.url)

        outcomes = batch_sent(adapter, *(delivery(f"ck1_{number}") for number in range(3)))

        assert len(remote.http.requests) == 1
    assert outcomes == [Delivered({"event_id": "e-1"}), Rejected("MalformedDetail"), Unknown("InternalFailure")]


def test_a_request_has_at_most_ten_events() -> None:
    with faulty_aws.faulty_aws(faulty_aws.event_entries) as remote:
        remote.behave(faulty_aws.event_taken())
        adapter = EventBridgeAdapter(bus="shop", source="s", boto3_session=SESSION, endpoint_url=remote.http.url)

        outcomes = batch_sent(adapter, *(delivery(f"ck1_{number}") for number in range(23)))

        batches = [len(json.loads(request.body)["Entries"]) for request in remote.http.requests]
    assert sorted(batches) == [3, 10, 10]
    assert {type(outcome) for outcome in outcomes} == {Delivered}
