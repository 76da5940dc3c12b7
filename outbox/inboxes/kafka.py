"""Apache Kafka: a `confluent_kafka.Message`, or what has its methods."""

from collections.abc import Sequence
from typing import Any, Protocol

from outbox.errors import InvalidValue
from outbox.inboxes.identity import MessageIdentity, event_id


class KafkaMessage(Protocol):
    """What is asked of a message: confluent_kafka's methods."""

    def headers(self) -> Any: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...


def by_event_id(message: KafkaMessage, *, scope: str, header: str) -> MessageIdentity:
    """The producer's id, in the header named: the same in a retry topic, a dead-letter topic, a mirror, a second sending.

    scope: whose ids these are, e.g. the producer's name; not the topic. Raises `InvalidValue` for a message that has not
    exactly one such header.
    """
    headers: Sequence[tuple[str, object]] = message.headers() or ()
    found = [value for name, value in headers if name == header]
    if len(found) > 1:
        raise InvalidValue("header", header, f"stands {len(found)} times in the message: which is its event id?")
    way_out = "the producer must send it"
    return {"scope": scope, "message_id": event_id(next(iter(found), None), f"header {header!r}", way_out)}


def by_offset(message: KafkaMessage, *, cluster: str, topic_id: str) -> MessageIdentity:
    """Its place in the log, for producers that give no id. The same event elsewhere (sent again, in a retry topic, in a
    mirror) is another message.

    cluster, topic_id: the broker's own ids, for a topic that was deleted and made again counts from 0 and must not be taken
    for the old one: `AdminClient.describe_cluster()`, `.describe_topics()`. Raises `InvalidValue` for a message that was never
    in a log.
    """
    partition, offset = message.partition(), message.offset()
    if partition is None or offset is None or partition < 0 or offset < 0:
        raise InvalidValue("offset", offset, "is no place in a log: take messages from a consumer")
    return {"scope": f"kafka:{cluster}:{topic_id}", "message_id": f"{partition}:{offset}"}
