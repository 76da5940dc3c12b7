"""RabbitMQ: pika's `BasicProperties`, or an aio-pika message. AMQP 0-9-1 has no id of the broker's own: a delivery tag counts
the deliveries of one channel.
"""

from typing import Protocol

from outbox.inboxes.identity import MessageIdentity, event_id


class HasMessageId(Protocol):
    """What is asked of a message, or of its properties: the id that the producer gave it."""

    @property
    def message_id(self) -> str | None: ...


def by_event_id(properties: HasMessageId, *, scope: str) -> MessageIdentity:
    """The producer's id, from the property `message_id`. Dead-lettering keeps it; a redrive must keep it too.

    scope: who gave the ids, for example the producer's name. Raises `InvalidValue` for a message without an id.
    """
    return {
        "scope": scope,
        "message_id": event_id(properties.message_id, "property message_id", "the producer must set it"),
    }
