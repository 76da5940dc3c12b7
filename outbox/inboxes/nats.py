"""NATS JetStream: a `nats.aio.msg.Msg` that came from a stream."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol

from outbox.errors import InvalidValue
from outbox.inboxes.identity import MessageIdentity, event_id


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
    of its own is better. Raises `InvalidValue` for a message without it.
    """
    found = (message.headers or {}).get(header)
    return {"scope": scope, "message_id": event_id(found, f"header {header!r}", "the producer must send it")}


def by_sequence(message: JetStreamMessage, *, created: datetime) -> MessageIdentity:
    """Its place in the stream, for producers that give no id. What is published again is another message.

    created: when the stream was made, for one that was deleted and made again counts from 1 and must not be taken for the old
    one: `(await js.stream_info(name)).created`. Raises `InvalidValue` for a naive datetime.
    """
    if not isinstance(created, datetime) or created.tzinfo is None:
        raise InvalidValue("created", created, "must be an aware datetime: (await js.stream_info(name)).created")
    place = message.metadata
    return {
        "scope": f"nats:{place.stream}:{created.timestamp():.6f}",
        "message_id": str(place.sequence.stream),
    }
