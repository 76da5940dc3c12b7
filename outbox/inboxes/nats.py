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
    """The producer's id, from the named header.

    scope: who gave the ids, for example the producer's name.
    header: by default `Nats-Msg-Id`. A stream drops a message whose `Nats-Msg-Id` it saw within its duplicate window (2
        minutes), also a redrive into the same stream. So a header of your own is better.
    Raises `InvalidValue` for a message without this header, or with several. Of two headers with the same name, nats-py shows
    only the last one.
    """
    headers = (message.headers or {}).items()
    alike = [(header, value) for name, value in headers if name.lower() == header.lower()]
    return {"scope": scope, "message_id": event_id_in(alike, header)}


def by_sequence(message: JetStreamMessage) -> MessageIdentity:
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
