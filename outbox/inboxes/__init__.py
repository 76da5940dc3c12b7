"""The identity of each broker's messages: turns a client library's message into the arguments of `outbox.inbox`.

    from outbox import inboxes

    identity = inboxes.sqs.by_event_id(received, scope="shop", attribute="event_id")
    with outbox.inbox(session, consumer="billing", **identity) as message:
        ...

`by_event_id` takes the id that the producer gave to the event, which a redrive, a republishing and a mirror keep: the one to
prefer. The others take the message's place at the broker. Pure, and no client library is loaded.
"""

from outbox.inboxes import cloudevents, kafka, nats, rabbitmq, sqs, stripe
from outbox.inboxes.identity import MessageIdentity

__all__ = ["MessageIdentity", "cloudevents", "kafka", "nats", "rabbitmq", "sqs", "stripe"]
