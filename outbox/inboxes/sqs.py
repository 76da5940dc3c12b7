"""Amazon SQS: a message as boto3's `receive_message` returns it, one of `response["Messages"]`."""

from collections.abc import Mapping
from typing import Any

from outbox.inboxes.identity import MessageIdentity, event_id, place_name


def by_event_id(message: Mapping[str, Any], *, scope: str, attribute: str) -> MessageIdentity:
    """The producer's id, from the named message attribute. It stays the same after a redrive from the dead-letter queue.

    scope: who gave the ids, for example the producer's name. Request the attribute when you receive:
    `receive_message(..., MessageAttributeNames=[attribute])`. Raises `InvalidValue` for a message without it.
    """
    found = message.get("MessageAttributes", {}).get(attribute, {}).get("StringValue")
    way_out = "the producer must send it, and receive_message must name it in MessageAttributeNames"
    return {"scope": scope, "message_id": event_id(found, f"message attribute {attribute!r}", way_out)}


def by_message_id(message: Mapping[str, Any], *, queue: str) -> MessageIdentity:
    """SQS's own id, for producers that give none.

    A redrive from a dead-letter queue gives a message a new id, and so does a producer that sends again. Neither is
    recognised as a duplicate.

    queue: the queue's ARN, because the URL of one queue may be written in several ways.
    Raises `InvalidValue` without a queue, and for a message without an id. Source: "Configuring a dead-letter queue redrive"
    in the SQS developer guide.
    """
    place_name("queue", queue, "the ARN of the queue")
    found = event_id(message.get("MessageId"), "MessageId", "pass a message as receive_message returns it")
    return {"scope": f"sqs:{queue}", "message_id": found}
