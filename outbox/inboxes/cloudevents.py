"""CloudEvents, over whatever carries them: an event of the `cloudevents` package, or the attributes as a mapping."""

from hashlib import sha256
from typing import Any

from outbox.inboxes.identity import MessageIdentity, event_id, joined, place_name
from outbox.keys import LIMITS


def by_event_id(event: Any, *, sender: str) -> MessageIdentity:
    """`source` and `id`, which together are unique for each event. Source: CloudEvents 1.0.2, section "id".

    sender: the authenticated sender: a webhook's caller, or one name for all who may write to a topic. A sender can write any
        `source`. Without `sender`, one sender could use the ids of another sender's events. A source that is too long is
        replaced by its SHA-256. Raises `InvalidValue` for an event without source or id, and for an empty sender.
    """
    place_name(
        "sender", sender, "who sent the event, as authenticated, or one name for all senders that trust each other"
    )
    source = event_id(_attribute(event, "source"), "attribute 'source'", "the producer must set it")
    message_id = event_id(_attribute(event, "id"), "attribute 'id'", "the producer must set it")
    scope = joined("cloudevents", sender) + f":{source}"
    if len(scope.encode()) > LIMITS["scope"][1]:
        scope = joined("cloudevents-sha256", sender) + f":{sha256(source.encode()).hexdigest()}"
    return {"scope": scope, "message_id": message_id}


def _attribute(event: Any, name: str) -> object:
    getter = getattr(event, f"get_{name}", None)  # cloudevents 2; release 1 has items alone
    return getter() if getter else event.get(name)
