"""The inbox with pika, on a RabbitMQ at localhost: executes the recipe of docs/inbox-recipes.md. Skipped where none listens."""

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pika
import pytest
from pika.exceptions import AMQPConnectionError
from support.consumer import ORDER, Billing, Crash, through_a_relay, until
from support.database import Database
from support.recipes import recipe_of

import outbox
from outbox import inboxes

PARAMETERS = pika.ConnectionParameters("127.0.0.1", 5672, heartbeat=0, socket_timeout=10)
MAX_DELIVERIES = 3
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
            "x-delivery-limit": MAX_DELIVERIES - 1,  # RabbitMQ counts the returns, not the deliveries
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self.dead,
        }
        self.channel.queue_declare(self.name, durable=True, arguments=arguments)

    def send(self, event_id: str | None = "evt_1") -> None:
        properties = pika.BasicProperties(message_id=event_id, delivery_mode=2)
        self.channel.basic_publish("", self.name, json.dumps(ORDER).encode(), properties)

    def redrive(self) -> None:
        """Put back what was dead-lettered, with its properties; a shovel does the same."""
        method, properties, body = self.channel.basic_get(self.dead)
        assert method is not None
        self.channel.basic_publish("", self.name, body, properties)
        self.channel.basic_ack(method.delivery_tag)

    def count(self, name: str) -> int:
        return int(self.channel.queue_declare(name, passive=True).method.message_count)

    def is_empty(self) -> bool:
        """Nothing comes to another consumer, either: what was delivered before was acknowledged."""
        self.connection.process_data_events(time_limit=SECONDS)
        method, _, _ = self.channel.basic_get(self.name, auto_ack=True)
        return method is None

    def delete(self) -> None:
        for name in (self.name, self.dead):
            self.channel.queue_delete(name)


class Consumer:
    """A process that runs the recipe.

    delivery_counts: of each message that it saw, RabbitMQ's count of the deliveries before.
    """

    def __init__(self, queue: Queue, billing: Billing) -> None:
        self.delivery_counts: list[int] = []
        self.recipe = recipe_of("RabbitMQ, with pika", billing.handle)
        self.recipe.PAUSE_SECONDS = SECONDS
        self._on_message = self.recipe.on_message
        self.recipe.on_message = self.on_message
        self.connection = pika.BlockingConnection(PARAMETERS)
        self.recipe.subscribe(self.connection, queue.name)

    def on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self.delivery_counts.append((properties.headers or {}).get("x-delivery-count", 0))
        self._on_message(channel, method, properties, body)

    def step(self) -> None:
        self.connection.process_data_events(time_limit=SECONDS)

    def close(self) -> None:
        if self.connection.is_open:
            self.connection.close()


def identify(properties: Any) -> inboxes.MessageIdentity:
    return inboxes.from_rabbitmq(properties, scope="shop")


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

    until(lambda: billing.orders == ["evt_1"], consumer.step)

    consumer.close()
    assert queue.is_empty()


@pytest.mark.parametrize("died", ["at work", "after the commit"])
def test_what_a_dead_consumer_left_is_handled_once(
    queue: Queue, consumer: Consumer, billing: Billing, died: str
) -> None:
    queue.send()
    billing.dies_at_work, billing.dies_after_its_commit = died == "at work", died != "at work"
    with pytest.raises(Crash):
        until(lambda: False, consumer.step)
    consumer.close()
    successor = Consumer(queue, billing)

    until(lambda: billing.attempts == 2, successor.step)

    successor.close()
    assert billing.orders == ["evt_1"]
    assert billing.duplicates == ([] if died == "at work" else ["evt_1"])
    assert queue.is_empty()


def test_an_event_that_is_published_twice_is_handled_once(queue: Queue, consumer: Consumer, billing: Billing) -> None:
    queue.send()
    queue.send()

    until(lambda: billing.duplicates, consumer.step)

    consumer.close()
    assert billing.orders == billing.duplicates == ["evt_1"]
    assert queue.is_empty()


def test_a_message_in_flight_elsewhere_is_kept_at_no_cost(queue: Queue, consumer: Consumer, billing: Billing) -> None:
    queue.send()
    with billing.elsewhere({"scope": "shop", "message_id": "evt_1"}):
        until(lambda: billing.attempts > 2 * MAX_DELIVERIES, consumer.step)

    until(lambda: billing.duplicates, consumer.step)

    assert set(consumer.delivery_counts) == {0}
    assert billing.orders == billing.duplicates == ["evt_1"]


def test_an_outage_of_the_database_counts_as_no_delivery(queue: Queue, postgresql: Database, ob: outbox.Outbox) -> None:
    with through_a_relay(postgresql, ob) as (billing, between):
        consumer = Consumer(queue, billing)
        between.refuse()
        queue.send()
        queue.send("evt_2")
        until(lambda: billing.attempts > 2 * MAX_DELIVERIES, consumer.step)
        between.accept()

        until(lambda: billing.orders == ["evt_1", "evt_2"], consumer.step)

        consumer.close()
    assert set(consumer.delivery_counts) == {0}
    assert queue.is_empty()
    assert queue.count(queue.dead) == 0


def test_a_message_that_fails_comes_again_and_its_work_is_done_once(
    queue: Queue, consumer: Consumer, billing: Billing
) -> None:
    billing.poison = {"evt_1"}
    queue.send()
    until(lambda: billing.attempts == MAX_DELIVERIES - 1, consumer.step)
    assert billing.nothing_is_stored
    billing.poison.clear()

    until(lambda: billing.orders, consumer.step)

    assert consumer.delivery_counts == list(range(MAX_DELIVERIES))
    assert billing.orders == ["evt_1"]


def test_a_poison_message_is_dead_lettered_and_a_redrive_handled_once(
    queue: Queue, consumer: Consumer, billing: Billing
) -> None:
    billing.poison = {"evt_1"}
    queue.send()
    until(lambda: queue.count(queue.dead) == 1, consumer.step)
    assert billing.attempts == MAX_DELIVERIES
    assert billing.nothing_is_stored

    billing.poison.clear()
    queue.redrive()
    until(lambda: billing.orders, consumer.step)

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
    until(lambda: billing.orders, consumer.step)

    queue.redrive()
    until(lambda: billing.duplicates, consumer.step)

    assert billing.orders == billing.duplicates == ["evt_1"]


def test_a_message_without_an_id_is_refused(queue: Queue) -> None:
    queue.send(event_id=None)
    until(lambda: queue.count(queue.name) == 1, lambda: queue.connection.process_data_events(time_limit=SECONDS))
    _, properties, _ = queue.channel.basic_get(queue.name, auto_ack=True)

    with pytest.raises(outbox.InvalidValue) as caught:
        identify(properties)

    assert str(caught.value) == "property message_id None: is missing or empty: the producer must set it"
