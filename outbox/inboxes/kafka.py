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

    scope: whose ids these are, e.g. the producer's name; not the topic. Raises `InvalidValue` for a message that has not
    exactly one such header.
    """
    return {"scope": scope, "message_id": event_id_in(message.headers() or (), header)}


def by_offset(message: KafkaMessage, *, cluster: str, topic_id: str) -> MessageIdentity:
    """Its place in the log, for producers that give no id. The same event elsewhere (sent again, in a retry topic, in a
    mirror) is another message.

    The leader's epoch is in the id: after an unclean election the same offset is given to another message.
    cluster, topic_id: the broker's own ids as text, for a topic that was deleted and made again counts from 0 and must not be
    mistaken for the old one: `AdminClient.describe_cluster()`, `.describe_topics()`. Ask again at each assignment of
    partitions: a running consumer does not notice that a topic was made again. Raises `InvalidValue` for a message that was
    never in a log, and for a cluster or topic without an id.
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
