"""EventBridge: an event as a Lambda function gets it, or parsed from the body of a message of SQS."""

from collections.abc import Mapping
from typing import Any

from outbox.inboxes.identity import MessageIdentity, event_id


def by_event_id(event: Mapping[str, Any], *, scope: str) -> MessageIdentity:
    """The producer's id, from `detail.metadata.event_id`. It stays the same if the event is put again.

    scope: who gave the ids, for example the producer's name. Raises `InvalidValue` for an event without this field.
    """
    found: Any = event
    for name in ("detail", "metadata", "event_id"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return {"scope": scope, "message_id": event_id(found, "detail.metadata.event_id", "the producer must send it")}
