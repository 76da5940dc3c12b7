"""CloudEvents, over whatever carries them: an event of the `cloudevents` package, or the attributes as a mapping."""

from typing import Any

from outbox.inboxes.identity import MessageIdentity, event_id


def by_event_id(event: Any) -> MessageIdentity:
    """`source` and `id`, which together are unique for each event. Source: CloudEvents 1.0.2, section "id".

    Raises `InvalidValue` for an event without one of them.
    """
    source = event_id(_attribute(event, "source"), "attribute 'source'", "the producer must set it")
    message_id = event_id(_attribute(event, "id"), "attribute 'id'", "the producer must set it")
    return {"scope": f"cloudevents:{source}", "message_id": message_id}


def _attribute(event: Any, name: str) -> object:
    getter = getattr(event, f"get_{name}", None)  # cloudevents 2; release 1 has items alone
    return getter() if getter else event.get(name)
