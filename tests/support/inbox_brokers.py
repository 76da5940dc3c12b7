"""A queue, topic or stream of each broker, with a process that runs the broker's recipe of docs/inbox-recipes.md.

All have the same verbs, so that one test proves a sentence with each broker:

    send            the producer sends an event
    step            the process handles what is there, or waits a moment for it
    restart         the process is dead, and another one takes its place
    is_done         every message is acknowledged
    parked          how many messages are in the dead-letter queue
    redrive         what an operator does with those
    max_deliveries  so often a message may fail
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import boto3
import nats
import pika
import pytest
import redis
from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, Producer, TopicPartition
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from nats.errors import NoServersError
from nats.js.api import ConsumerConfig
from pika.exceptions import AMQPConnectionError

from outbox.inboxes import MessageIdentity
from support.apps.crashing_consumer import BROKER, SETTINGS
from support.consumer import ORDER, until
from support.recipes import Pauses, recipe_of
from support.redis_servers import running_servers
from support.streams import URL, Stream

BODY = json.dumps(ORDER)
Handle = Callable[..., None]


class Sqs:
    """A queue of moto's server. A message that is received and left is visible again at once."""

    max_deliveries = 3

    def __init__(self, server: str, handle: Handle) -> None:
        self.server = server
        self.client = boto3.client("sqs", endpoint_url=server, **SETTINGS)
        self.client.meta.events.register("before-parameter-build.sqs.ReceiveMessage", _do_not_wait)
        self.dead = self.client.create_queue(QueueName="orders-dead")["QueueUrl"]
        self.url = self.client.create_queue(QueueName="orders", Attributes={"VisibilityTimeout": "0"})["QueueUrl"]
        self.limit_deliveries(self.max_deliveries)
        self.recipe = recipe_of(BROKER, handle)
        self.recipe.VISIBILITY_SECONDS = 1
        self.recipe.time = Pauses(lambda: None)

    @classmethod
    @contextmanager
    def serving(cls) -> Iterator[str]:
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()

    def limit_deliveries(self, most: int) -> None:
        dead = self._attribute(self.dead, "QueueArn")
        policy = json.dumps({"deadLetterTargetArn": dead, "maxReceiveCount": most})
        self.client.set_queue_attributes(QueueUrl=self.url, Attributes={"RedrivePolicy": policy})

    def send(self, event_id: str | None = "evt_1") -> None:
        attributes = {"event_id": {"DataType": "String", "StringValue": event_id}} if event_id else {}
        self.client.send_message(QueueUrl=self.url, MessageBody=BODY, MessageAttributes=attributes)

    def receive(self, url: str | None = None) -> list[Any]:
        """What another consumer gets."""
        received = self.client.receive_message(
            QueueUrl=url or self.url, MaxNumberOfMessages=10, MessageAttributeNames=["event_id"]
        )
        messages: list[Any] = received.get("Messages", [])
        return messages

    def step(self) -> None:
        self.recipe.run_once(self.client, self.url)

    def restart(self) -> None: ...

    @property
    def is_done(self) -> bool:
        return self._count(self.url) == 0

    @property
    def parked(self) -> int:
        return self._count(self.dead)

    def redrive(self) -> None:
        """What `StartMessageMoveTask` does, which the server here lacks: to SQS they are new messages."""
        for message in self.receive(self.dead):
            attributes = message.get("MessageAttributes", {})
            self.client.send_message(QueueUrl=self.url, MessageBody=message["Body"], MessageAttributes=attributes)
            self.client.delete_message(QueueUrl=self.dead, ReceiptHandle=message["ReceiptHandle"])

    def close(self) -> None:
        for url in (self.url, self.dead):
            self.client.delete_queue(QueueUrl=url)
        self.client.close()

    def _count(self, url: str) -> int:
        return int(self._attribute(url, "ApproximateNumberOfMessages"))

    def _attribute(self, url: str, name: str) -> str:
        answer: str = self.client.get_queue_attributes(QueueUrl=url, AttributeNames=[name])["Attributes"][name]
        return answer


def _do_not_wait(params: dict[str, Any], **named: object) -> None:
    params["WaitTimeSeconds"] = 0


class KafkaCluster:
    """The mock cluster inside librdkafka, which speaks the protocol over loopback."""

    def __init__(self) -> None:
        self.producer = Producer(
            {"bootstrap.servers": "the mock cluster puts its own here", "test.mock.num.brokers": 1}
        )
        about = self.producer.list_topics(timeout=10)
        self.id: str = about.cluster_id
        self.servers = ",".join(f"{broker.host}:{broker.port}" for broker in about.brokers.values())


class Kafka:
    """A topic and its dead-letter topic. A new process begins at the group's committed offset, as after a rebalance."""

    def __init__(self, cluster: KafkaCluster, handle: Handle) -> None:
        self.cluster = cluster
        self.producer = cluster.producer
        self.name = f"orders-{uuid4().hex[:8]}"
        self.dead = f"{self.name}-dead"
        for name in (self.name, self.dead):  # a producer that asks for a topic has it made
            until(
                lambda name=name: self.producer.list_topics(name, timeout=10).topics[name].error is None, lambda: None
            )
        self.recipe = recipe_of("Kafka, with confluent-kafka", handle)
        self.recipe.time = Pauses(lambda: None)
        self.max_deliveries: int = self.recipe.MAX_ATTEMPTS
        self.sent = 0
        self.consumer = self._new_consumer()

    @classmethod
    @contextmanager
    def serving(cls) -> Iterator[KafkaCluster]:
        yield KafkaCluster()

    def send(self, event_id: str | None = "evt_1") -> None:
        self._put(BODY.encode(), [("event_id", event_id.encode())] if event_id else [])

    def step(self) -> None:
        self.recipe.step(self.consumer, self.producer)

    def restart(self) -> None:
        self.consumer.close()
        self.consumer = self._new_consumer()

    @property
    def is_done(self) -> bool:
        return self.committed == self.sent

    @property
    def committed(self) -> int:
        """The group's offset; less than 0: none."""
        (place,) = self.consumer.committed([TopicPartition(self.name, 0)], timeout=10)
        return place.offset

    @property
    def parked(self) -> int:
        return len(self.read(self.dead))

    def redrive(self) -> None:
        """Under new offsets, with the old headers."""
        for message in self.read(self.dead):
            self._put(message.value(), message.headers() or [])

    def read(self, name: str) -> list[Message]:
        """All of a topic."""
        consumer = Consumer({"bootstrap.servers": self.cluster.servers, "group.id": "reader"})
        partitions = consumer.list_topics(name, timeout=10).topics[name].partitions
        places = [TopicPartition(name, partition, OFFSET_BEGINNING) for partition in partitions]
        consumer.assign(places)
        end = sum(consumer.get_watermark_offsets(place, timeout=10)[1] for place in places)
        read: list[Message] = []
        until(lambda: len(read) == end, lambda: read.extend(consumer.consume(1, 0.2)))
        consumer.close()
        return read

    def close(self) -> None:
        self.consumer.close()

    def _new_consumer(self) -> Consumer:
        consumer = Consumer({"bootstrap.servers": self.cluster.servers, **self.recipe.SETTINGS})
        consumer.assign([TopicPartition(self.name, 0)])
        return consumer

    def _put(self, value: Any, headers: Any) -> None:
        self.sent += 1
        self.producer.produce(self.name, value, partition=0, headers=headers)
        assert self.producer.flush(10) == 0


class RabbitMq:
    """A quorum queue, on a server at localhost, that dead-letters a message after so many deliveries."""

    max_deliveries = 3
    step_seconds = 0.1
    parameters = pika.ConnectionParameters("127.0.0.1", 5672, heartbeat=0, socket_timeout=10)

    def __init__(self, connection: Any, handle: Handle) -> None:
        self.connection = connection
        self.channel = connection.channel()
        self.channel.confirm_delivery()
        self.name = f"outbox-test-{uuid4().hex[:8]}"
        self.dead = f"{self.name}-dead"
        self.channel.queue_declare(self.dead, durable=True, arguments={"x-queue-type": "quorum"})
        arguments = {
            "x-queue-type": "quorum",
            "x-delivery-limit": self.max_deliveries - 1,  # RabbitMQ counts the returns, not the deliveries
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self.dead,
        }
        self.channel.queue_declare(self.name, durable=True, arguments=arguments)
        self.recipe = recipe_of("RabbitMQ, with pika", handle)
        self.recipe.PAUSE_SECONDS = self.step_seconds
        self.consumer = self._new_consumer()

    @classmethod
    @contextmanager
    def serving(cls) -> Iterator[Any]:
        try:
            connection = pika.BlockingConnection(cls.parameters)
        except AMQPConnectionError:
            pytest.skip("no RabbitMQ at 127.0.0.1:5672 (guest/guest): start one, e.g. with `rabbitmq-server -detached`")
        yield connection
        connection.close()

    def send(self, event_id: str | None = "evt_1") -> None:
        properties = pika.BasicProperties(message_id=event_id, delivery_mode=2)
        self.channel.basic_publish("", self.name, BODY.encode(), properties)

    def step(self) -> None:
        self.consumer.process_data_events(time_limit=self.step_seconds)

    def restart(self) -> None:
        self.consumer.close()
        self.consumer = self._new_consumer()

    @property
    def is_done(self) -> bool:
        """Nothing comes to another consumer, either: what was delivered before was acknowledged. Ends the process."""
        self.consumer.close()
        self.connection.process_data_events(time_limit=self.step_seconds)
        method, _, _ = self.channel.basic_get(self.name, auto_ack=True)
        return method is None

    @property
    def parked(self) -> int:
        return int(self.channel.queue_declare(self.dead, passive=True).method.message_count)

    def redrive(self) -> None:
        """With its properties; a shovel does the same."""
        method, properties, body = self.channel.basic_get(self.dead)
        assert method is not None
        self.channel.basic_publish("", self.name, body, properties)
        self.channel.basic_ack(method.delivery_tag)

    def close(self) -> None:
        if self.consumer.is_open:
            self.consumer.close()
        for name in (self.name, self.dead):
            self.channel.queue_delete(name)

    def _new_consumer(self) -> Any:
        consumer = pika.BlockingConnection(self.parameters)
        self.recipe.subscribe(consumer, self.name)
        return consumer


class Nats:
    """A stream of NATS JetStream, on a server at localhost, and the stream that poison goes to."""

    def __init__(self, server: None, handle: Handle) -> None:
        self.recipe = recipe_of("NATS JetStream, with nats-py", handle)
        self.recipe.PAUSE_SECONDS = 0.1
        self.max_deliveries: int = self.recipe.MAX_DELIVERIES
        self.sent = 0
        self._runner = asyncio.Runner()
        self.stream = self.run(self._connected())
        self.js = self.stream.js
        self.redeliver_after(30)
        self.subscription = self.run(self.js.pull_subscribe(self.stream.subject, "billing", stream=self.stream.name))

    @classmethod
    @contextmanager
    def serving(cls) -> Iterator[None]:
        async def connect() -> None:
            async def quiet(error: Exception) -> None: ...  # else a refused connection is logged as an error

            client = await nats.connect(
                URL, allow_reconnect=False, max_reconnect_attempts=1, connect_timeout=5, error_cb=quiet
            )
            await client.jetstream().account_info()
            await client.close()

        try:
            asyncio.run(connect())
        except (NoServersError, OSError):
            pytest.skip("no NATS server with JetStream at 127.0.0.1:4222: start one, e.g. with `nats-server -js`")
        yield

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    def redeliver_after(self, seconds: float) -> None:
        config = ConsumerConfig(durable_name="billing", ack_wait=seconds)
        self.run(self.js.add_consumer(self.stream.name, config))

    def identify_by(self, identify: Callable[[Any], MessageIdentity]) -> None:
        class Inboxes:
            from_nats = staticmethod(lambda message, **named: identify(message))

        self.recipe.inboxes = Inboxes

    def send(self, event_id: str | None = "evt_1") -> None:
        self.sent += 1
        self.run(self.stream.send(**{"Event-Id": event_id} if event_id else {}))

    def step(self) -> None:
        self.run(self.recipe.step(self.js, self.subscription))

    def restart(self) -> None:
        self.redeliver_after(0.5)

    @property
    def is_done(self) -> bool:
        self.run(self.stream.client.flush())
        about = self.run(self.js.consumer_info(self.stream.name, "billing"))
        return bool(about.ack_floor.stream_seq == self.sent)

    @property
    def parked(self) -> int:
        count: int = self.run(self.stream.messages(self.stream.dead))
        return count

    def redrive(self) -> None:
        self.sent += 1
        self.run(self.stream.redrive())

    def close(self) -> None:
        self.run(self.stream.delete())
        self.run(self.stream.client.close())
        self._runner.close()

    async def _connected(self) -> Stream:
        stream = Stream(await nats.connect(URL, allow_reconnect=False, connect_timeout=5))
        await stream.create()
        return stream


class Redis:
    """A stream of a Redis of the tests' own."""

    decodes = False

    def __init__(self, port: int, handle: Handle) -> None:
        self.client: Any = redis.Redis(port=port, decode_responses=self.decodes)
        self.stream = f"orders-{uuid4().hex[:8]}"
        self.recipe = recipe_of("Redis Streams, with redis-py", handle)
        self.recipe.IDLE_SECONDS = 0  # what another process left is there at once
        self.recipe.time = Pauses(lambda: None)
        self.max_deliveries: int = self.recipe.MAX_DELIVERIES
        self.client.xgroup_create(self.stream, self.recipe.GROUP, "0", mkstream=True)

    @classmethod
    @contextmanager
    def serving(cls) -> Iterator[int]:
        with TemporaryDirectory() as folder, running_servers(Path(folder), 1) as (server,):
            yield server.port

    def send(self, event_id: str | None = "evt_1") -> None:
        self.client.xadd(self.stream, ({"event_id": event_id} if event_id else {}) | {"payload": BODY})

    def step(self) -> None:
        self.recipe.step(self.client, self.stream, "one")

    def restart(self) -> None: ...

    @property
    def is_done(self) -> bool:
        (group,) = self.client.xinfo_groups(self.stream)
        return group["lag"] == 0 and not group["pending"]

    @property
    def parked(self) -> int:
        count: int = self.client.xlen(f"{self.stream}-dead")
        return count

    def redrive(self) -> None:
        for _, fields in self.client.xrange(f"{self.stream}-dead"):
            self.client.xadd(self.stream, fields)

    def close(self) -> None:
        self.client.close()


class DecodingRedis(Redis):
    decodes = True
