"""The dispatcher of the demo: `outbox run examples.demo.effects:make_dispatcher`."""

import os
from datetime import UTC, datetime, timedelta

from sqlalchemy.orm import Session

import outbox
from dispatchers import Dispatcher, Operations, Settlement
from dispatchers.adapters import SmtpAdapter, StripeAdapter
from examples.demo.orders import Order

CONCURRENCY = 8  # mails in the hands of a killed dispatcher are uncertain: few at the same time

# Short, so that what a killed dispatcher held is taken up again soon: the lease must outlast the timeout and the margin.
TIMEOUT = timedelta(seconds=3)
MAIL_TIMEOUT = timedelta(
    seconds=6
)  # half of it is for the reply: a machine that is busy must not make a mail uncertain
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
        "email.send",
        {
            "to": order.email,
            "subject": "Your receipt",
            "text": f"Thank you. {order.amount / 100:.2f} {order.currency.upper()} paid for order {order.id}.\n",
            "headers": {"X-Order-Id": order.id},
        },
    )


def make_dispatcher(effects: Operations = effects) -> Dispatcher:
    stripe = StripeAdapter(
        api_key=os.environ["STRIPE_API_KEY"],
        base_url=os.environ["STRIPE_URL"],
        timeout=TIMEOUT,
    )
    email = SmtpAdapter(
        host="127.0.0.1",
        port=int(os.environ["SMTP_PORT"]),
        encryption="none",
        sender="The shop <shop@example.com>",
        local_hostname="shop.example.com",
        timeout=MAIL_TIMEOUT,
        max_connections=CONCURRENCY,
    )
    return Dispatcher(
        os.environ["DATABASE_URL"],
        adapters={"stripe": stripe, "email": email},
        include=[effects],
        lease=LEASE,
        margin=MARGIN,
        poll=POLL,
        concurrency=CONCURRENCY,
    )
