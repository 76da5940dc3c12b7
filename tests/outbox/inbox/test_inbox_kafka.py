"""The inbox with confluent-kafka, on the mock cluster inside librdkafka, which speaks the protocol over loopback: executes the
recipe of docs/inbox-recipes.md."""

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_INVALID,
    Consumer,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
    Uuid,
)
from support.consumer import ORDER, Billing, Crash, through_a_relay, until
from support.database import Database
from support.recipes import Pauses, recipe_of

import outbox
from outbox import inboxes

SECONDS = 0.2  # how long one poll waits; a step of `until`
CLUSTER = {"bootstrap.servers": "ignored: the mock cluster puts its own here", "test.mock.num.brokers": 1}


class Cluster:
    """A broker for the module's tests."""

    def __init__(self) -> None:
        self.producer = Producer(CLUSTER)
        about = self.producer.list_topics(timeout=10)
        self.id: str = about.cluster_id
        self.servers = ",".join(f"{broker.host}:{broker.port}" for broker in about.brokers.values())


class Topic:
    """A topic and its dead-letter topic, of one test's own."""

    def __init__(self, cluster: Cluster) -> None:
        self.name = f"orders-{uuid4().hex[:8]}"
        self.dead = f"{self.name}-dead"
        self.servers = cluster.servers
        self.producer = cluster.producer
        for name in (self.name, self.dead):
            self._create(name)

    def send(self, event_id: str | None = "evt_1") -> None:
        headers = [("event_id", event_id.encode())] if event_id else []
        self._put(self.name, json.dumps(ORDER).encode(), headers)

    def redrive(self) -> int:
        """Put back what the dead-letter topic holds: under new offsets, with the old headers. Returns how many."""
        parked = self.read(self.dead)
        for message in parked:
            self._put(self.name, message.value(), message.headers() or [])
        return len(parked)

    def read(self, name: str) -> list[Message]:
        """All of a topic."""
        consumer = self.new_consumer({"group.id": "reader", "enable.auto.commit": False})
        partitions = consumer.list_topics(name, timeout=10).topics[name].partitions
        places = [TopicPartition(name, partition, OFFSET_BEGINNING) for partition in partitions]
        consumer.assign(places)
        end = sum(consumer.get_watermark_offsets(place, timeout=10)[1] for place in places)
        read: list[Message] = []
        until(lambda: len(read) == end, lambda: read.extend(consumer.consume(1, SECONDS)))
        consumer.close()
        return read

    def new_consumer(self, settings: dict[str, Any]) -> Consumer:
        return Consumer({"bootstrap.servers": self.servers, **settings})

    def _create(self, name: str) -> None:
        """A producer that asks for a topic has it made: before a consumer can learn that there is none."""
        until(lambda: self.producer.list_topics(name, timeout=10).topics[name].error is None, lambda: None)

    def _put(self, name: str, value: Any, headers: Any) -> None:
        self.producer.produce(name, value, partition=0, headers=headers)
        assert self.producer.flush(10) == 0


class Process:
    """Runs the recipe. A new one takes up at the group's committed offset, as after a crash or a rebalance."""

    def __init__(self, topic: Topic, billing: Billing) -> None:
        self.topic = topic
        self.recipe = recipe_of("Kafka, with confluent-kafka", billing.handle)
        self.pauses = self.recipe.time = Pauses(lambda: None)
        self.consumer = topic.new_consumer(self.recipe.SETTINGS)
        self.consumer.assign([TopicPartition(topic.name, 0)])
        self.producer = topic.producer

    def step(self) -> None:
        self.recipe.step(self.consumer, self.producer)

    @property
    def committed(self) -> int:
        (place,) = self.consumer.committed([TopicPartition(self.topic.name, 0)], timeout=10)
        return place.offset


def identify(message: Message) -> inboxes.MessageIdentity:
    return inboxes.from_kafka(message, scope="shop")


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def topic(cluster: Cluster) -> Topic:
    return Topic(cluster)


@pytest.fixture
def billing(postgresql: Database, ob: outbox.Outbox) -> Billing:
    return Billing(postgresql, ob)


@pytest.fixture
def process(topic: Topic, billing: Billing) -> Iterator[Process]:
    process = Process(topic, billing)
    yield process
    process.consumer.close()


def test_a_message_is_handled_and_its_offset_committed(topic: Topic, process: Process, billing: Billing) -> None:
    topic.send()

    until(lambda: process.committed == 1, process.step)

    assert billing.orders == ["evt_1"]


@pytest.mark.parametrize("died", ["at work", "after the commit"])
def test_what_a_dead_process_left_is_handled_once(topic: Topic, process: Process, billing: Billing, died: str) -> None:
    topic.send()
    billing.dies_at_work, billing.dies_after_its_commit = died == "at work", died != "at work"
    with pytest.raises(Crash):
        until(lambda: False, process.step)
    process.consumer.close()
    successor = Process(topic, billing)

    until(lambda: successor.committed == 1, successor.step)

    successor.consumer.close()
    assert billing.orders == ["evt_1"]
    assert billing.duplicates == ([] if died == "at work" else ["evt_1"])


def test_an_event_that_the_producer_sends_twice_is_handled_once(
    topic: Topic, process: Process, billing: Billing
) -> None:
    topic.send()
    topic.send()

    until(lambda: process.committed == 2, process.step)

    assert billing.orders == billing.duplicates == ["evt_1"]


def test_a_message_in_flight_elsewhere_is_not_passed_over(topic: Topic, process: Process, billing: Billing) -> None:
    """After a rebalance: the partition's former owner has not committed yet."""
    topic.send("evt_1")
    topic.send("evt_2")
    with billing.elsewhere({"scope": "shop", "message_id": "evt_1"}):
        until(lambda: billing.attempts > process.recipe.MAX_ATTEMPTS, process.step)
        assert process.committed < 0  # none
        assert billing.nothing_is_stored

    until(lambda: process.committed == 2, process.step)

    assert billing.orders == ["evt_1", "evt_2"]
    assert billing.duplicates == ["evt_1"]


def test_an_outage_of_the_database_counts_as_no_attempt(topic: Topic, postgresql: Database, ob: outbox.Outbox) -> None:
    with through_a_relay(postgresql, ob) as (billing, between):
        process = Process(topic, billing)
        between.refuse()
        topic.send("evt_1")
        topic.send("evt_2")
        until(lambda: billing.attempts > 2 * process.recipe.MAX_ATTEMPTS, process.step)
        assert process.pauses.count == billing.attempts
        assert process.committed < 0  # none
        between.accept()
        outage = billing.attempts

        until(lambda: process.committed == 2, process.step)

        process.consumer.close()
        assert billing.attempts == outage + 2
        assert billing.orders == ["evt_1", "evt_2"]
    assert topic.read(topic.dead) == []


def test_a_message_that_fails_comes_again_and_its_work_is_done_once(
    topic: Topic, process: Process, billing: Billing
) -> None:
    billing.poison = {"evt_1"}
    topic.send("evt_1")
    topic.send("evt_2")
    until(lambda: billing.attempts == process.recipe.MAX_ATTEMPTS - 1, process.step)
    assert billing.nothing_is_stored
    billing.poison.clear()

    until(lambda: process.committed == 2, process.step)

    assert billing.orders == ["evt_1", "evt_2"]
    assert topic.read(topic.dead) == []


def test_a_poison_message_is_parked_and_handled_once_when_redriven(
    topic: Topic, process: Process, billing: Billing
) -> None:
    billing.poison = {"evt_1"}
    topic.send()
    until(lambda: process.committed == 1, process.step)
    assert billing.attempts == process.recipe.MAX_ATTEMPTS
    assert billing.nothing_is_stored

    billing.poison.clear()
    assert topic.redrive() == 1
    assert topic.redrive() == 1  # by an operator who presses twice
    until(lambda: process.committed == 3, process.step)

    assert billing.orders == billing.duplicates == ["evt_1"]


def test_a_message_that_cannot_be_parked_is_not_acknowledged(topic: Topic, process: Process, billing: Billing) -> None:
    process.producer = Producer({"bootstrap.servers": "127.0.0.1:1", "message.timeout.ms": 100, "log_level": 0})
    billing.poison = {"evt_1"}
    topic.send()

    with pytest.raises(KafkaException, match="_MSG_TIMED_OUT"):
        until(lambda: False, process.step)

    assert process.committed < 0  # none


def test_by_offset_a_redelivery_is_a_duplicate_and_an_equal_event_is_not(cluster: Cluster, topic: Topic) -> None:
    def by_offset(message: Message, topic_id: str = "topic-id-1") -> inboxes.MessageIdentity:
        return inboxes.from_kafka_offset(message, cluster=cluster.id, topic_id=topic_id)

    topic.send(event_id=None)
    topic.send(event_id=None)

    first, again = map(by_offset, topic.read(topic.name)), map(by_offset, topic.read(topic.name))

    identities = list(first)
    assert identities == list(again)
    assert identities[0]["scope"] == f"kafka:{cluster.id}:topic-id-1"
    assert [identity["message_id"].split(":")[:2] for identity in identities] == [["0", "0"], ["0", "1"]]
    assert by_offset(topic.read(topic.name)[0], "made-again") != identities[0]


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ([], "header 'event_id' None: is missing or empty: the producer must send it"),
        ([("event_id", b"")], "header 'event_id' '': is missing or empty: the producer must send it"),
        ([("event_id", b"\xff")], r"header 'event_id' b'\xff': is not UTF-8"),
        (
            [("event_id", b"1"), ("event_id", b"2")],
            "header 'event_id': occurs 2 times in the message: an event id must occur once",
        ),
    ],
)
def test_a_message_without_exactly_one_readable_event_id_is_refused(
    cluster: Cluster, topic: Topic, headers: Any, text: str
) -> None:
    cluster.producer.produce(topic.name, b"{}", partition=0, headers=headers)
    cluster.producer.flush(10)
    (message,) = topic.read(topic.name)

    with pytest.raises(outbox.InvalidValue) as caught:
        identify(message)

    assert str(caught.value) == text


class At:
    """A place in a log."""

    def __init__(self, partition: int | None = 0, offset: int | None = 7, leader_epoch: int | None = 3) -> None:
        self.partition = lambda: partition
        self.offset = lambda: offset
        self.leader_epoch = lambda: leader_epoch

    def headers(self) -> None: ...


def test_the_same_offset_of_another_partition_or_leader_is_another_message() -> None:
    places = [At(), At(partition=1), At(leader_epoch=4), At(leader_epoch=None)]

    ids = [inboxes.from_kafka_offset(place, cluster="c", topic_id="t")["message_id"] for place in places]

    assert ids == ["0:7:3", "1:7:3", "0:7:4", "0:7"]


def test_names_of_clusters_and_topics_differ_wherever_their_boundary_is() -> None:
    assert inboxes.from_kafka_offset(At(), cluster="a:b", topic_id="c") != inboxes.from_kafka_offset(
        At(), cluster="a", topic_id="b:c"
    )


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"cluster": ""}, "cluster '': must be a str that is not empty: take it from AdminClient.describe_cluster(),"),
        (
            {"cluster": None},
            "cluster None: must be a str that is not empty: take it from AdminClient.describe_cluster(),",
        ),
        ({"topic_id": ""}, "topic_id '': must be a str that is not empty: take it from"),
        ({"topic_id": None}, "topic_id None: must be a str that is not empty: take it from"),
        (
            {"topic_id": str(Uuid(0, 0))},
            "topic_id 'AAAAAAAAAAAAAAAAAAAAAA': is not an id: the broker reports none, so use from_kafka",
        ),
    ],
)
def test_a_cluster_or_topic_without_an_id_is_refused(changed: Any, text: str) -> None:
    with pytest.raises(outbox.InvalidValue) as caught:
        inboxes.from_kafka_offset(At(), **{"cluster": "c", "topic_id": "t"} | changed)

    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(("partition", "offset"), [(0, None), (None, 0), (0, OFFSET_INVALID), (-1, 0)])
def test_a_message_that_was_never_in_a_log_has_no_place(partition: int | None, offset: int | None) -> None:
    with pytest.raises(outbox.InvalidValue) as caught:
        inboxes.from_kafka_offset(At(partition, offset), cluster="c", topic_id="t")

    assert str(caught.value) == f"offset {offset}: is not a position in a log: pass messages of a consumer"
