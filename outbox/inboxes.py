"""Converts a broker's message, as its client library returns it, to the arguments of `outbox.inbox`.

    from outbox import inboxes

    identity = inboxes.from_sqs(received, scope="shop")
    with outbox.inbox(session, consumer="billing", **identity) as message:
        ...

`from_kafka`, `from_nats` and so on use the id that the producer gave to the event. A redrive, a republishing and a mirror keep
this id, so prefer it. `from_kafka_offset`, `from_nats_sequence` and `from_sqs_message_id` use the message's position at the
broker. Pure; no client library is imported.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from hashlib import sha256
from typing import Any, Protocol, TypedDict

from outbox.errors import InvalidValue
from outbox.keys import LIMITS
from outbox.times import EPOCH, MICROSECOND

__all__ = [
    "MessageIdentity",
    "from_cloudevents",
    "from_eventbridge",
    "from_kafka",
    "from_kafka_offset",
    "from_nats",
    "from_nats_sequence",
    "from_rabbitmq",
    "from_redis",
    "from_sqs",
    "from_sqs_message_id",
    "from_stripe",
]


class MessageIdentity(TypedDict):
    """The two arguments of `outbox.inbox` that a message decides: unpack it into the call with `**`."""

    scope: str
    message_id: str


# --- CloudEvents


def from_cloudevents(event: Any, *, sender: str) -> MessageIdentity:
    """`source` and `id`, which together are unique for each event. Source: CloudEvents 1.0.2, section "id".

    sender: the authenticated sender: a webhook's caller, or one name for all who may write to a topic. A sender can write any
        `source`. Without `sender`, one sender could use the ids of another sender's events. A source that is too long is
        replaced by its SHA-256. Raises `InvalidValue` for an event without source or id, and for an empty sender.
    """
    _place_name(
        "sender", sender, "who sent the event, as authenticated, or one name for all senders that trust each other"
    )
    source = _event_id(_attribute(event, "source"), "attribute 'source'", "the producer must set it")
    message_id = _event_id(_attribute(event, "id"), "attribute 'id'", "the producer must set it")
    scope = _joined("cloudevents", sender) + f":{source}"
    if len(scope.encode()) > LIMITS["scope"][1]:
        scope = _joined("cloudevents-sha256", sender) + f":{sha256(source.encode()).hexdigest()}"
    return {"scope": scope, "message_id": message_id}


def _attribute(event: Any, name: str) -> object:
    getter = getattr(event, f"get_{name}", None)  # release 2 of the package; an event of release 1 is a mapping
    return getter() if getter else event.get(name)


# --- Amazon EventBridge


def from_eventbridge(event: Mapping[str, Any], *, scope: str) -> MessageIdentity:
    """The producer's id, from `detail.metadata.event_id`. It stays the same if the event is put again.

    scope: who gave the ids, for example the producer's name. Raises `InvalidValue` for an event without this field.
    """
    found: Any = event
    for name in ("detail", "metadata", "event_id"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return {"scope": scope, "message_id": _event_id(found, "detail.metadata.event_id", "the producer must send it")}


# --- Kafka

NO_TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""The UUID of zeros, as text: what a broker answers that knows no topic ids (KIP-516)."""


class KafkaMessage(Protocol):
    """The methods of `confluent_kafka.Message` that are used here."""

    def headers(self) -> Any: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...
    def leader_epoch(self) -> int | None: ...


def from_kafka(message: KafkaMessage, *, scope: str, header: str = "event_id") -> MessageIdentity:
    """The producer's id, from the named header. It stays the same in a retry topic, a dead-letter topic, a mirror or a resend.

    scope: who gave the ids, for example the producer's name. Not the topic.
    Raises `InvalidValue` unless the message has exactly one such header.
    """
    return {"scope": scope, "message_id": _event_id_in(message.headers() or (), header)}


def from_kafka_offset(message: KafkaMessage, *, cluster: str, topic_id: str) -> MessageIdentity:
    """The message's position in the log, for producers that give no id. The same event at another position is another message.

    The id includes the leader's epoch: after an unclean election Kafka gives the same offset to another message.
    cluster, topic_id: the broker's own ids as text, from `AdminClient.describe_cluster()` and `.describe_topics()`. A topic
        that was deleted and created again counts from 0, and must not be mistaken for the old one. Read the ids again at each
        assignment of partitions: a running consumer does not notice a new topic.
    Raises `InvalidValue` for a message without a position, and for a cluster or topic without an id.
    """
    way_out = "take it from AdminClient.describe_cluster(), describe_topics()"
    if topic_id == NO_TOPIC_ID:
        raise InvalidValue("topic_id", topic_id, "is not an id: the broker reports none, so use from_kafka")
    place = ("kafka", _place_name("cluster", cluster, way_out), _place_name("topic_id", topic_id, way_out))
    partition, offset = message.partition(), message.offset()
    if partition is None or offset is None or partition < 0 or offset < 0:
        raise InvalidValue("offset", offset, "is not a position in a log: pass messages of a consumer")
    epoch = message.leader_epoch()
    return {"scope": _joined(*place), "message_id": f"{partition}:{offset}" + ("" if epoch is None else f":{epoch}")}


# --- NATS JetStream


class JetStreamMessage(Protocol):
    """The attributes of nats-py's `Msg` that are used here. It must have come from a stream."""

    @property
    def headers(self) -> Mapping[str, str] | None: ...
    @property
    def metadata(self) -> Any: ...


def from_nats(message: JetStreamMessage, *, scope: str, header: str = "Nats-Msg-Id") -> MessageIdentity:
    """The producer's id, from the named header.

    scope: who gave the ids, for example the producer's name.
    header: by default `Nats-Msg-Id`. A stream drops a message whose `Nats-Msg-Id` it saw within its duplicate window (2
        minutes), also a redrive into the same stream. So a header of your own is better.
    Raises `InvalidValue` for a message without this header, or with several. Of two headers with the same name, nats-py shows
    only the last one.
    """
    headers = (message.headers or {}).items()
    alike = [(header, value) for name, value in headers if name.lower() == header.lower()]
    return {"scope": scope, "message_id": _event_id_in(alike, header)}


def from_nats_sequence(message: JetStreamMessage) -> MessageIdentity:
    """The message's stream, sequence and time, for producers that give no id. A message that is published again is another
    message.

    A stream that is restored from a backup, or deleted and created again, repeats its sequences, and a subscription does not
    notice it. The time distinguishes such messages. Raises `InvalidValue` for a naive time, and what the client raises for a
    message that came from no stream.
    """
    place = message.metadata
    if not isinstance(place.timestamp, datetime) or place.timestamp.tzinfo is None:
        raise InvalidValue("metadata.timestamp", place.timestamp, "must be an aware datetime")
    taken_at = (place.timestamp - EPOCH) // MICROSECOND
    return {"scope": f"nats:{place.stream}", "message_id": f"{place.sequence.stream}:{taken_at}"}


# --- RabbitMQ. AMQP 0-9-1 has no id of the broker's own: a delivery tag counts the deliveries of one channel.


class HasMessageId(Protocol):
    """Pika's `BasicProperties`, or an aio-pika message."""

    @property
    def message_id(self) -> str | None: ...


def from_rabbitmq(properties: HasMessageId, *, scope: str) -> MessageIdentity:
    """The producer's id, from the property `message_id`. Dead-lettering keeps it; a redrive must keep it too.

    scope: who gave the ids, for example the producer's name. Raises `InvalidValue` for a message without an id.
    """
    return {
        "scope": scope,
        "message_id": _event_id(properties.message_id, "property message_id", "the producer must set it"),
    }


# --- Redis Streams


def from_redis(fields: Mapping[Any, Any], *, scope: str, field: str = "event_id") -> MessageIdentity:
    """The producer's id, from the named field. It stays the same if the fields are added to another stream.

    scope: who gave the ids, for example the producer's name. Raises `InvalidValue` for a message without this field.
    """
    found = fields.get(field.encode(), fields.get(field))
    return {"scope": scope, "message_id": _event_id(found, f"field {field!r}", "the producer must send it")}


# --- Amazon SQS


def from_sqs(message: Mapping[str, Any], *, scope: str, attribute: str = "event_id") -> MessageIdentity:
    """The producer's id, from the named message attribute. It stays the same after a redrive from the dead-letter queue.

    scope: who gave the ids, for example the producer's name. Request the attribute when you receive:
    `receive_message(..., MessageAttributeNames=[attribute])`. Raises `InvalidValue` for a message without it.
    """
    found = message.get("MessageAttributes", {}).get(attribute, {}).get("StringValue")
    way_out = "the producer must send it, and receive_message must name it in MessageAttributeNames"
    return {"scope": scope, "message_id": _event_id(found, f"message attribute {attribute!r}", way_out)}


def from_sqs_message_id(message: Mapping[str, Any], *, queue: str) -> MessageIdentity:
    """SQS's own id, for producers that give no id.

    A redrive from a dead-letter queue gives a message a new id, and so does a producer that sends again. Neither is
    recognised as a duplicate.

    queue: the queue's ARN, because the URL of one queue may be written in several ways.
    Raises `InvalidValue` without a queue, and for a message without an id. Source: "Configuring a dead-letter queue redrive"
    in the SQS developer guide.
    """
    _place_name("queue", queue, "the ARN of the queue")
    found = _event_id(message.get("MessageId"), "MessageId", "pass a message as receive_message returns it")
    return {"scope": f"sqs:{queue}", "message_id": found}


# --- Stripe's webhooks

STRIPE_KINDS = ("event", "v2.core.event")
"""What `object` says in an event. An invoice, say, has an id as well, and is the subject of many events."""


def from_stripe(event: object, *, account: str = "") -> MessageIdentity:
    """`event.id`. It is the same in every delivery of the event, also when an operator sends it again.

    The event's fields distinguish events of connected accounts, and events of test and live mode.
    account: a name for the Stripe account of the endpoint or key, if the app has several accounts.

    Raises `InvalidValue` for a body that was only parsed, because anyone can write one. An Event that was made by
    `stripe.Event.construct_from` cannot be distinguished from a verified one: never make one from a request.
    """
    # the type alone is shown: the event is a payload
    shown = type(event).__name__
    found, kind = getattr(event, "id", None), getattr(event, "object", None)
    if not isinstance(found, str) or not found:
        rule = "is not an event: pass the result of stripe.Webhook.construct_event, which verifies the signature"
        raise InvalidValue("event", shown, rule)
    if kind not in STRIPE_KINDS:
        raise InvalidValue("event", shown, "is not an event but the object of one: pass the event itself")
    livemode = getattr(event, "livemode", None)
    if not isinstance(livemode, bool):
        raise InvalidValue("event", shown, "does not say whether it is of live or test mode: 'livemode' is missing")
    connected = getattr(event, "account", None) or getattr(event, "context", None) or ""
    return {"scope": _joined("stripe", "live" if livemode else "test", account, str(connected)), "message_id": found}


# --- what they share


def _event_id(found: object, place: str, way_out: str) -> str:
    """The producer's id of an event, as text. Raises `InvalidValue` if `place` in the message has no id."""
    if isinstance(found, bytes):
        try:
            found = found.decode()
        except UnicodeDecodeError:
            raise InvalidValue(place, found, "is not UTF-8") from None
    if not isinstance(found, str) or not found:
        raise InvalidValue(place, found, f"is missing or empty: {way_out}")
    return found


def _event_id_in(headers: Iterable[tuple[str, object]], header: str) -> str:
    """The producer's id, from the header of this name. Raises `InvalidValue` unless there is exactly one."""
    found = [value for name, value in headers if name == header]
    if len(found) > 1:
        raise InvalidValue("header", header, f"occurs {len(found)} times in the message: an event id must occur once")
    return _event_id(next(iter(found), None), f"header {header!r}", "the producer must send it")


def _place_name(field: str, found: object, way_out: str) -> str:
    """A name of the broker, which distinguishes its messages from another's. Raises `InvalidValue` without one."""
    if not isinstance(found, str) or not found:
        raise InvalidValue(field, found, f"must be a str that is not empty: {way_out}")
    return found


def _joined(*names: str) -> str:
    """Names as one text that can be split again: `a:b` and `c` are not `a` and `b:c`."""
    return ":".join(name.replace("%", "%25").replace(":", "%3A") for name in names)
