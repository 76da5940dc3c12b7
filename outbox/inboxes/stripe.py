"""Stripe's webhooks: the event that `stripe.Webhook.construct_event` returns once it has verified the signature."""

from outbox.errors import InvalidValue
from outbox.inboxes.identity import MessageIdentity, joined

KINDS = ("event", "v2.core.event")
"""What `object` says in an event. An invoice, say, has an id as well, and is the subject of many events."""


def by_event_id(event: object, *, account: str = "") -> MessageIdentity:
    """`event.id`. It is the same in every delivery of the event, also when an operator sends it again.

    The event's fields distinguish events of connected accounts, and events of test and live mode.
    account: a name for the Stripe account of the endpoint or key, if the app has several accounts.

    Raises `InvalidValue` for a body that was only parsed, because anyone can write one. An Event that was made by
    `stripe.Event.construct_from` cannot be distinguished from a verified one: never make one from a request.
    """
    # the type alone is shown: the event is a payload
    shown = type(event).__name__
    found, kind = getattr(event, "id", None), getattr(event, "object", None)
    if not isinstance(found, str) or not found:
        rule = "is not an event: pass the result of stripe.Webhook.construct_event, which verifies the signature"
        raise InvalidValue("event", shown, rule)
    if kind not in KINDS:
        raise InvalidValue("event", shown, "is not an event but the object of one: pass the event itself")
    livemode = getattr(event, "livemode", None)
    if not isinstance(livemode, bool):
        raise InvalidValue("event", shown, "does not say whether it is of live or test mode: 'livemode' is missing")
    connected = getattr(event, "account", None) or getattr(event, "context", None) or ""
    return {"scope": joined("stripe", "live" if livemode else "test", account, str(connected)), "message_id": found}
