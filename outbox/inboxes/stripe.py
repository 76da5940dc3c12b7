"""Stripe's webhooks: the event that `stripe.Webhook.construct_event` returns once it has verified the signature."""

from outbox.errors import InvalidValue
from outbox.inboxes.identity import MessageIdentity


def by_event_id(event: object) -> MessageIdentity:
    """`event.id`: the same in every delivery of the event, also when it is sent again by hand.

    Raises `InvalidValue` for a body that was merely parsed: anybody can write one.
    """
    found = getattr(event, "id", None)
    if not isinstance(found, str) or not found:
        # the type alone is shown: the event is a payload
        rule = "is no event: pass what stripe.Webhook.construct_event returns, which verifies the signature"
        raise InvalidValue("event", type(event).__name__, rule)
    return {"scope": "stripe", "message_id": found}
