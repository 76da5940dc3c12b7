"""The identity of each broker's messages: converts a client library's message to the arguments of `outbox.inbox`.

    from outbox import inboxes

    identity = inboxes.sqs.by_event_id(received, scope="shop", attribute="event_id")
    with outbox.inbox(session, consumer="billing", **identity) as message:
        ...

`by_event_id` uses the id that the producer gave to the event. A redrive, a republishing and a mirror keep this id, so prefer
it. The other functions use the message's position at the broker. Pure; no client library is imported.
"""

from outbox.inboxes import cloudevents, eventbridge, kafka, nats, rabbitmq, redis, sqs, stripe
from outbox.inboxes.identity import MessageIdentity

__all__ = ["MessageIdentity", "cloudevents", "eventbridge", "kafka", "nats", "rabbitmq", "redis", "sqs", "stripe"]
