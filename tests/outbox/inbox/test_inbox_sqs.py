"""The inbox with boto3, over HTTP, against a server that speaks the API of SQS: executes the recipe of
docs/inbox-recipes.md."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from support.apps.crashing_consumer import BROKER, SETTINGS
from support.consumer import ORDER, Billing, Crash, through_a_relay, until
from support.database import Database
from support.python_processes import PIPE, PythonProcess
from support.recipes import Pauses, recipe_of

import outbox
from outbox import inboxes

MAX_DELIVERIES = 3
KILLED = -signal.SIGKILL


class Queue:
    """A queue with a dead-letter queue. A message that is received and left is visible again at once."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.dead = client.create_queue(QueueName="orders-dead")["QueueUrl"]
        self.url = client.create_queue(QueueName="orders", Attributes={"VisibilityTimeout": "0"})["QueueUrl"]
        self.limit_deliveries(MAX_DELIVERIES)

    def limit_deliveries(self, most: int) -> None:
        policy = json.dumps({"deadLetterTargetArn": self._arn(self.dead), "maxReceiveCount": most})
        self.client.set_queue_attributes(QueueUrl=self.url, Attributes={"RedrivePolicy": policy})

    def send(self, event_id: str | None = "evt_1") -> None:
        attributes = {"event_id": {"DataType": "String", "StringValue": event_id}} if event_id else {}
        self.client.send_message(QueueUrl=self.url, MessageBody=json.dumps(ORDER), MessageAttributes=attributes)

    def receive(self, url: str | None = None) -> list[Any]:
        received = self.client.receive_message(
            QueueUrl=url or self.url,
            MaxNumberOfMessages=10,
            MessageAttributeNames=["event_id"],
            MessageSystemAttributeNames=["ApproximateReceiveCount"],
        )
        messages: list[Any] = received.get("Messages", [])
        return messages

    def acknowledge(self, message: Any, url: str | None = None) -> None:
        self.client.delete_message(QueueUrl=url or self.url, ReceiptHandle=message["ReceiptHandle"])

    def redrive(self) -> None:
        """What `StartMessageMoveTask` does, which the server here lacks: to SQS they are new messages."""
        for message in self.receive(self.dead):
            attributes = message.get("MessageAttributes", {})
            self.client.send_message(QueueUrl=self.url, MessageBody=message["Body"], MessageAttributes=attributes)
            self.acknowledge(message, self.dead)

    def count(self, url: str) -> int:
        name = "ApproximateNumberOfMessages"
        return int(self.client.get_queue_attributes(QueueUrl=url, AttributeNames=[name])["Attributes"][name])

    @property
    def left(self) -> int:
        return self.count(self.url)

    def _arn(self, url: str) -> str:
        arn: str = self.client.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        return arn


class Consumer:
    """A process that runs the recipe. It waits neither for messages nor in its pauses; those are the moments for `meanwhile`."""

    def __init__(self, queue: Queue, billing: Billing, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.queue = queue
        self.recipe = recipe_of(BROKER, billing.handle)
        self.pauses = self.recipe.time = Pauses(meanwhile)

    def run_once(self) -> None:
        self.recipe.run_once(self.queue.client, self.queue.url)


def identify(message: Any) -> inboxes.MessageIdentity:
    return inboxes.from_sqs(message, scope="shop", attribute="event_id")


def do_not_wait(params: dict[str, Any], **named: object) -> None:
    params["WaitTimeSeconds"] = 0


@contextmanager
def crashing_consumer(*arguments: str) -> Iterator[Callable[[int], int]]:
    """The process of crashing_consumer.py: kills a consumer at a moment, and returns how it ended."""
    tests = Path(__file__).parents[2]
    with PythonProcess(
        tests / "support" / "apps" / "crashing_consumer.py",
        *arguments,
        stdin=PIPE,
        stdout=PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ended_at_moment(moment: int) -> int:
            print(moment, file=process.stdin, flush=True)
            return int(process.stdout.readline())  # type: ignore[union-attr]

        yield ended_at_moment


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def queue(server: str) -> Iterator[Queue]:
    client = boto3.client("sqs", endpoint_url=server, **SETTINGS)
    client.meta.events.register("before-parameter-build.sqs.ReceiveMessage", do_not_wait)
    queue = Queue(client)
    yield queue
    for url in (queue.url, queue.dead):
        client.delete_queue(QueueUrl=url)
    client.close()


@pytest.fixture
def billing(postgresql: Database, ob: outbox.Outbox) -> Billing:
    return Billing(postgresql, ob)


@pytest.fixture
def consumer(queue: Queue, billing: Billing) -> Consumer:
    return Consumer(queue, billing)


def test_a_message_is_handled_and_deleted(consumer: Consumer, queue: Queue, billing: Billing) -> None:
    queue.send()

    consumer.run_once()

    assert billing.orders == ["evt_1"]
    assert queue.left == 0


@pytest.mark.parametrize("died", ["at work", "after the commit"])
def test_what_a_dead_consumer_left_is_handled_once(
    consumer: Consumer, queue: Queue, billing: Billing, died: str
) -> None:
    queue.send()
    billing.dies_at_work, billing.dies_after_its_commit = died == "at work", died != "at work"
    with pytest.raises(Crash):
        consumer.run_once()

    consumer.run_once()

    assert billing.orders == ["evt_1"]
    assert billing.duplicates == ([] if died == "at work" else ["evt_1"])
    assert queue.left == 0


def test_an_event_that_the_producer_sends_twice_is_handled_once(
    consumer: Consumer, queue: Queue, billing: Billing
) -> None:
    queue.send()
    queue.send()

    consumer.run_once()

    assert billing.orders == billing.duplicates == ["evt_1"]


def test_a_message_in_flight_elsewhere_is_kept_until_it_is_committed(queue: Queue, billing: Billing) -> None:
    elsewhere = ExitStack()
    consumer = Consumer(queue, billing, meanwhile=elsewhere.close)
    queue.send()
    elsewhere.enter_context(billing.elsewhere({"scope": "shop", "message_id": "evt_1"}))

    consumer.run_once()

    assert consumer.pauses.count == 1
    assert billing.orders == billing.duplicates == ["evt_1"]
    assert queue.left == 0


def test_an_outage_of_the_database_counts_as_no_delivery(queue: Queue, postgresql: Database, ob: outbox.Outbox) -> None:
    """It is longer than the messages are kept at a time; and one of them fails once, after it, so that SQS reports its count."""
    queue.send("evt_1")
    queue.send("evt_2")
    received: list[Any] = []
    with through_a_relay(postgresql, ob) as (billing, between):

        def meanwhile() -> None:
            time.sleep(0.6)
            received.extend(queue.receive())
            if consumer.pauses.count == 5:
                between.accept()

        consumer = Consumer(queue, billing, meanwhile)
        consumer.recipe.VISIBILITY_SECONDS = 2
        billing.poison = {"evt_2"}
        between.refuse()
        consumer.run_once()
        orders = billing.orders

    assert consumer.pauses.count == 5
    assert received == []
    assert orders == ["evt_1"]
    until(lambda: received, lambda: (time.sleep(0.1), received.extend(queue.receive())))
    (failed,) = received
    assert identify(failed)["message_id"] == "evt_2"
    assert failed["Attributes"]["ApproximateReceiveCount"] == "2"  # the consumer's, and this one


def test_a_message_that_fails_comes_again_and_its_work_is_done_once(
    consumer: Consumer, queue: Queue, billing: Billing
) -> None:
    """Those after it in the batch are handled meanwhile."""
    billing.poison = {"evt_1"}
    queue.send("evt_1")
    queue.send("evt_2")
    consumer.run_once()
    assert billing.orders == ["evt_2"]
    assert queue.left == 1
    billing.poison.clear()

    consumer.run_once()

    assert billing.orders == ["evt_1", "evt_2"]
    assert queue.left == 0


def test_a_poison_message_is_dead_lettered_and_a_redrive_handled_once(
    consumer: Consumer, queue: Queue, billing: Billing
) -> None:
    billing.poison = {"evt_1"}
    queue.send()
    for _ in range(MAX_DELIVERIES + 1):
        consumer.run_once()
    assert billing.nothing_is_stored
    assert (queue.left, queue.count(queue.dead)) == (0, 1)

    billing.poison.clear()
    queue.redrive()
    consumer.run_once()

    assert billing.orders == ["evt_1"]
    assert (queue.left, queue.count(queue.dead)) == (0, 0)


def test_a_redrive_of_what_was_handled_is_a_duplicate_by_its_event_id(
    consumer: Consumer, queue: Queue, billing: Billing
) -> None:
    """Committed each time, deleted never: the message went to the dead-letter queue although it was handled."""
    queue.send()
    for _ in range(MAX_DELIVERIES):
        (message,) = queue.receive()
        billing.handle(identify(message))
    assert queue.receive() == []

    queue.redrive()
    consumer.run_once()

    assert billing.orders == ["evt_1"]
    assert queue.left == 0


def test_by_sqs_own_id_a_redelivery_is_a_duplicate_and_a_redrive_is_not(queue: Queue, billing: Billing) -> None:
    queue.send(event_id=None)
    identities = [inboxes.from_sqs_message_id(queue.receive()[0], queue=queue.url) for _ in range(MAX_DELIVERIES)]
    assert queue.receive() == []
    queue.redrive()
    (redriven,) = queue.receive()

    assert identities == [identities[0]] * MAX_DELIVERIES
    assert identities[0]["scope"] == f"sqs:{queue.url}"
    assert inboxes.from_sqs_message_id(redriven, queue=queue.url) != identities[0]


def test_a_consumer_killed_at_any_moment_leaves_work_that_is_done_once(
    server: str, queue: Queue, consumer: Consumer, billing: Billing, postgresql: Database
) -> None:
    queue.limit_deliveries(1000)  # until the database has noticed that a consumer is dead, its message is in flight
    left: list[tuple[int, int]] = []
    command = [str(postgresql.url.render_as_string(hide_password=False)), server, queue.url]
    with crashing_consumer(*command) as ended_at_moment:
        moment, ended = 0, KILLED
        while ended == KILLED:
            moment += 1
            queue.send(f"evt_{moment}")
            ended = ended_at_moment(moment)
            left.append((billing.orders.count(f"evt_{moment}"), queue.left))
            until(lambda: not queue.left, consumer.run_once, max_seconds=60)
            assert billing.orders.count(f"evt_{moment}") == 1

    # nothing done; done and not acknowledged; done and acknowledged: in this order, each of them at some moment
    assert [key for key, _ in groupby(left)] == [(0, 1), (1, 1), (1, 0)]
    assert len(left) > 15
    assert len(postgresql.queue) == moment


def test_a_message_without_the_attribute_is_refused(queue: Queue) -> None:
    queue.send(event_id=None)
    (message,) = queue.receive()

    with pytest.raises(outbox.InvalidValue) as caught:
        identify(message)

    assert str(caught.value) == (
        "message attribute 'event_id' None: is missing or empty: the producer must send it, and receive_message must name"
        " it in MessageAttributeNames"
    )


@pytest.mark.parametrize(
    ("message", "queue", "text"),
    [
        ({"MessageId": "1"}, "", "queue '': must be a str that is not empty: the ARN of the queue"),
        ({}, "arn", "MessageId None: is missing or empty: pass a message as receive_message returns it"),
    ],
)
def test_sqs_own_id_needs_a_queue_and_a_message(message: Any, queue: str, text: str) -> None:
    with pytest.raises(outbox.InvalidValue) as caught:
        inboxes.from_sqs_message_id(message, queue=queue)

    assert str(caught.value) == text
