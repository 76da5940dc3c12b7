"""The inbox with pika, on a RabbitMQ at localhost: the recipe of docs/inbox.md. Skipped where none listens."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pika
import pytest
from consuming import Billing, Poison, until
from pika.exceptions import AMQPConnectionError
from support import Database

import outbox
from outbox import inboxes

PARAMETERS = pika.ConnectionParameters("127.0.0.1", 5672, heartbeat=0, socket_timeout=10)
DELIVERIES_MAX = 3
SECONDS = 0.1  # how long one step waits for a message


class Queue:
    """A quorum queue that dead-letters a message after so many deliveries; both of one test's own."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.channel = connection.channel()
        self.channel.confirm_delivery()
        self.name = f"outbox-test-{uuid4().hex[:8]}"
        self.dead = f"{self.name}-dead"
        self.channel.queue_declare(self.dead, durable=True, arguments={"x-queue-type": "quorum"})
        arguments = {
            "x-queue-type": "quorum",
            "x-delivery-limit": DELIVERIES_MAX - 1,  # RabbitMQ counts the returns, not the deliveries
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self.dead,
        }
        self.channel.queue_declare(self.name, durable=True, arguments=arguments)

    def send(self, event_id: str | None = "evt_1", body: bytes = b"{}") -> None:
        properties = pika.BasicProperties(message_id=event_id, delivery_mode=2)
        self.channel.basic_publish("", self.name, body, properties)

    def redrive(self) -> None:
        """Put back what was dead-lettered, with its properties; a shovel does the same."""
        method, properties, body = self.channel.basic_get(self.dead)
        assert method is not None
        self.channel.basic_publish("", self.name, body, properties)
        self.channel.basic_ack(method.delivery_tag)

    def count(self, name: str) -> int:
        return int(self.channel.queue_declare(name, passive=True).method.message_count)

    def delete(self) -> None:
        for name in (self.name, self.dead):
            self.channel.queue_delete(name)


class Consumer:
    """The recipe: handle, commit, acknowledge; hand back what fails, or is in flight elsewhere."""

    def __init__(self, queue: Queue, billing: Billing) -> None:
        self.billing = billing
        self.refused = self.failed = self.acknowledged = 0
        self.connection = pika.BlockingConnection(PARAMETERS)
        self.channel = self.connection.channel()
        self.channel.basic_qos(prefetch_count=1)
        self.channel.basic_consume(queue.name, self.on_message)
        self.dies_before_it_acknowledges = False

    def on_message(self, channel: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        def hand_back() -> None:
            channel.basic_nack(method.delivery_tag, requeue=True)

        try:
            self.billing.handle(identify(properties))
        except outbox.KeyInFlight as error:
            self.refused += 1
            # Not at once: each return counts towards the delivery limit, and the message is no poison.
            self.connection.call_later(error.retry_after.total_seconds(), hand_back)
        except Poison:
            self.failed += 1
            hand_back()
        else:
            if self.dies_before_it_acknowledges:
                self.connection.close()
                return
            channel.basic_ack(method.delivery_tag)
            self.acknowledged += 1

    def step(self) -> None:
        self.connection.process_data_events(time_limit=SECONDS)

    def close(self) -> None:
        if self.connection.is_open:
            self.connection.close()


def identify(properties: Any) -> inboxes.MessageIdentity:
    return inboxes.rabbitmq.by_event_id(properties, scope="shop")


@pytest.fixture(scope="module")
def connection() -> Iterator[Any]:
    try:
        connection = pika.BlockingConnection(PARAMETERS)
    except AMQPConnectionError:
        pytest.skip("no RabbitMQ at 127.0.0.1:5672 (guest/guest): start one, e.g. with `rabbitmq-server -detached`")
    yield connection
    connection.close()


@pytest.fixture
def queue(connection: Any) -> Iterator[Queue]:
    queue = Queue(connection)
    yield queue
    queue.delete()


@pytest.fixture
def billing(postgresql: Database, ob: outbox.Outbox) -> Billing:
    return Billing(postgresql, ob)


@pytest.fixture
def consumer(queue: Queue, billing: Billing) -> Iterator[Consumer]:
    consumer = Consumer(queue, billing)
    yield consumer
    consumer.close()


def test_a_message_is_handled_and_acknowledged(queue: Queue, consumer: Consumer, billing: Billing) -> None:
    queue.send()

    until(lambda: consumer.acknowledged == 1, consumer.step)

    assert billing.orders == ["evt_1"]


def test_what_was_committed_and_not_acknowledged_is_a_duplicate_for_the_next_consumer(
    queue: Queue, consumer: Consumer, billing: Billing
) -> None:
    queue.send()
    consumer.dies_before_it_acknowledges = True
    until(lambda: consumer.connection.is_closed, consumer.step)
    successor = Consumer(queue, billing)

    until(lambda: successor.acknowledged == 1, successor.step)

    successor.close()
    assert billing.orders == billing.duplicates == ["evt_1"]


def test_a_message_in_flight_elsewhere_is_handed_back_and_comes_again(
    queue: Queue, consumer: Consumer, billing: Billing
) -> None:
    queue.send()
    with billing.elsewhere({"scope": "shop", "message_id": "evt_1"}):
        until(lambda: consumer.refused == 1, consumer.step)

    until(lambda: consumer.acknowledged == 1, consumer.step)

    assert queue.count(queue.dead) == 0
    assert billing.orders == billing.duplicates == ["evt_1"]


def test_a_poison_message_ends_in_the_dead_letter_queue_and_is_handled_once_when_redriven(
    queue: Queue, consumer: Consumer, billing: Billing
) -> None:
    billing.poison = {"evt_1"}
    queue.send()
    until(lambda: queue.count(queue.dead) == 1, consumer.step)
    assert consumer.failed == DELIVERIES_MAX
    assert billing.nothing_is_stored

    billing.poison.clear()
    queue.redrive()
    until(lambda: consumer.acknowledged == 1, consumer.step)

    assert billing.orders == ["evt_1"]
    assert billing.duplicates == []


def test_a_redrive_of_what_was_handled_already_is_a_duplicate(
    queue: Queue, consumer: Consumer, billing: Billing
) -> None:
    """Handled under another delivery of the same event, while this one sat in the dead-letter queue."""
    billing.poison = {"evt_1"}
    queue.send()
    until(lambda: queue.count(queue.dead) == 1, consumer.step)
    billing.poison.clear()
    queue.send()
    until(lambda: consumer.acknowledged == 1, consumer.step)

    queue.redrive()
    until(lambda: consumer.acknowledged == 2, consumer.step)

    assert billing.orders == billing.duplicates == ["evt_1"]


def test_a_message_without_an_id_is_refused(queue: Queue) -> None:
    queue.send(event_id=None)
    until(lambda: queue.count(queue.name) == 1, lambda: queue.connection.process_data_events(time_limit=SECONDS))
    _, properties, _ = queue.channel.basic_get(queue.name, auto_ack=True)

    with pytest.raises(outbox.InvalidValue) as caught:
        identify(properties)

    assert str(caught.value) == "property message_id None: is missing or empty: the producer must set it"
