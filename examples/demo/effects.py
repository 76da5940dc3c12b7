"""The dispatcher of the demo: `outbox run examples.demo.effects:make_dispatcher`."""

import os
from datetime import UTC, datetime, timedelta

from sqlalchemy.orm import Session

import outbox
from dispatchers import Dispatcher, Operations, Settlement
from dispatchers.adapters import StripeAdapter
from dispatchers.adapters.providers import postmark
from examples.demo.orders import Order

CONCURRENCY = 8  # mails in the hands of a killed dispatcher are uncertain: few at the same time

# Short, so that what a killed dispatcher held is taken up again soon: the lease must outlast the timeout and the margin.
TIMEOUT = timedelta(seconds=3)
MAIL_TIMEOUT = timedelta(seconds=6)  # long: a machine that is busy must not make a mail uncertain
MARGIN = timedelta(seconds=1)
LEASE = timedelta(seconds=8)
POLL = timedelta(milliseconds=200)

effects = Operations()


@effects.on_settled("stripe.payment_intents.create")
def charged(session: Session, settlement: Settlement) -> None:
    """Mark the order as paid and have its receipt sent, in the transaction that settles the charge."""
    if settlement.state != "delivered":
        return
    order = session.get_one(Order, settlement.entry.payload["metadata"]["order_id"])
    order.paid_at = datetime.now(UTC).replace(tzinfo=None)
    outbox.enqueue(
        session,
        "postmark.email.send",
        {
            "From": "The shop <shop@example.com>",
            "To": order.email,
            "Subject": "Your receipt",
            "TextBody": f"Thank you. {order.amount / 100:.2f} {order.currency.upper()} paid for order {order.id}.\n",
            "Metadata": {"order_id": order.id},
        },
    )


def make_dispatcher(effects: Operations = effects) -> Dispatcher:
    stripe = StripeAdapter(
        api_key=os.environ["STRIPE_API_KEY"],
        base_url=os.environ["STRIPE_URL"],
        timeout=TIMEOUT,
    )
    mails = postmark(server_token="server_token_of_the_demo", base_url=os.environ["MAIL_URL"], timeout=MAIL_TIMEOUT)
    return Dispatcher(
        os.environ["DATABASE_URL"],
        adapters={"stripe": stripe, "postmark": mails},
        include=[effects],
        lease=LEASE,
        margin=MARGIN,
        poll=POLL,
        concurrency=CONCURRENCY,
    )
