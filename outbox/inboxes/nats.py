"""NATS JetStream: a `nats.aio.msg.Msg` that came from a stream."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol

from outbox.errors import InvalidValue
from outbox.inboxes.identity import MessageIdentity, event_id_in
from outbox.times import EPOCH, MICROSECOND


class JetStreamMessage(Protocol):
    """What is asked of a message: nats-py's headers, and its place in the stream."""

    @property
    def headers(self) -> Mapping[str, str] | None: ...
    @property
    def metadata(self) -> Any: ...


def by_event_id(message: JetStreamMessage, *, scope: str, header: str = "Nats-Msg-Id") -> MessageIdentity:
    """The producer's id, in the header named.

    scope: whose ids these are, e.g. the producer's name. header: the default is the one by which a stream drops what is
    published twice within its duplicate window (2 minutes); a redrive into the same stream meets that too, so an id in a header
    of its own is better. Raises `InvalidValue` for a message without it, or with several: of two that are spelled alike
    nats-py shows the last alone.
    """
    headers = (message.headers or {}).items()
    alike = [(header, value) for name, value in headers if name.lower() == header.lower()]
    return {"scope": scope, "message_id": event_id_in(alike, header)}


def by_sequence(message: JetStreamMessage) -> MessageIdentity:
    """Its place in the stream, and when the stream took it: for producers that give no id. What is published again is another
    message.

    A stream that is restored from a backup, or deleted and made again, counts through the same sequences once more, and a
    subscription outlives that unnoticed; the time distinguishes the messages. Raises `InvalidValue` for a naive time, and what
    the client raises for a message that came from no stream.
    """
    place = message.metadata
    if not isinstance(place.timestamp, datetime) or place.timestamp.tzinfo is None:
        raise InvalidValue("metadata.timestamp", place.timestamp, "must be an aware datetime")
    taken_at = (place.timestamp - EPOCH) // MICROSECOND
    return {"scope": f"nats:{place.stream}", "message_id": f"{place.sequence.stream}:{taken_at}"}
