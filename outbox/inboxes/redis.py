"""Redis Streams: the fields of a message, as redis-py returns them in `xreadgroup` and `xautoclaim`: bytes, or decoded."""

from collections.abc import Mapping
from typing import Any

from outbox.inboxes.identity import MessageIdentity, event_id


def by_event_id(fields: Mapping[Any, Any], *, scope: str, field: str = "event_id") -> MessageIdentity:
    """The producer's id, from the named field. It stays the same if the fields are added to another stream.

    scope: who gave the ids, for example the producer's name. Raises `InvalidValue` for a message without this field.
    """
    found = fields.get(field.encode(), fields.get(field))
    return {"scope": scope, "message_id": event_id(found, f"field {field!r}", "the producer must send it")}
