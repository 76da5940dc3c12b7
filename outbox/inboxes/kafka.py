"""Apache Kafka: a `confluent_kafka.Message`, or what has its methods."""

from typing import Any, Protocol

from outbox.errors import InvalidValue
from outbox.inboxes.identity import MessageIdentity, event_id_in, joined, place_name

NO_TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""The UUID of zeros, as text: what a broker answers that knows no topic ids (KIP-516)."""


class KafkaMessage(Protocol):
    """What is asked of a message: confluent_kafka's methods."""

    def headers(self) -> Any: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...
    def leader_epoch(self) -> int | None: ...


def by_event_id(message: KafkaMessage, *, scope: str, header: str) -> MessageIdentity:
    """The producer's id, from the named header. It stays the same in a retry topic, a dead-letter topic, a mirror or a resend.

    scope: who gave the ids, for example the producer's name. Not the topic.
    Raises `InvalidValue` unless the message has exactly one such header.
    """
    return {"scope": scope, "message_id": event_id_in(message.headers() or (), header)}


def by_offset(message: KafkaMessage, *, cluster: str, topic_id: str) -> MessageIdentity:
    """The message's position in the log, for producers that give no id. The same event at another position is another message.

    The id includes the leader's epoch: after an unclean election Kafka gives the same offset to another message.
    cluster, topic_id: the broker's own ids as text, from `AdminClient.describe_cluster()` and `.describe_topics()`. A topic
        that was deleted and created again counts from 0, and must not be mistaken for the old one. Read the ids again at each
        assignment of partitions: a running consumer does not notice a new topic.
    Raises `InvalidValue` for a message without a position, and for a cluster or topic without an id.
    """
    way_out = "take it from AdminClient.describe_cluster(), describe_topics()"
    if topic_id == NO_TOPIC_ID:
        raise InvalidValue("topic_id", topic_id, "is not an id: the broker reports none, so use by_event_id")
    place = ("kafka", place_name("cluster", cluster, way_out), place_name("topic_id", topic_id, way_out))
    partition, offset = message.partition(), message.offset()
    if partition is None or offset is None or partition < 0 or offset < 0:
        raise InvalidValue("offset", offset, "is not a position in a log: pass messages of a consumer")
    epoch = message.leader_epoch()
    return {"scope": joined(*place), "message_id": f"{partition}:{offset}" + ("" if epoch is None else f":{epoch}")}
