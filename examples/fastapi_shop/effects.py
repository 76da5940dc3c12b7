"""The sending process: `outbox run examples.fastapi_shop.effects:make_dispatcher`."""

import os

from sqlalchemy.orm import Session

import outbox
from dispatchers import Dispatcher, Operations, Settlement
from dispatchers.adapters import SmtpAdapter, StripeAdapter
from examples.fastapi_shop.orders import Order, connect

effects = Operations()


@effects.on_settled("stripe.payment_intents.create")
def charged(session: Session, settlement: Settlement) -> None:
    """Runs in the transaction that settles the charge: the order, the receipt's entry and the settlement commit together."""
    order = order_of(session, settlement)
    if settlement.state != "delivered":
        order.state = "unpaid"
        return
    order.state = "paid"
    receipt = f"Thank you. You paid {order.amount / 100:.2f} {order.currency.upper()} for order {order.number}.\n"
    outbox.enqueue(session, "email.send", {"to": order.email, "subject": "Your receipt", "text": receipt})


@effects.on_uncertain("stripe.payment_intents.create")
def unclear(session: Session, settlement: Settlement) -> None:
    """It is unknown whether the card was charged. An operator checks, and runs `outbox resolve`."""
    order_of(session, settlement).state = "unclear"


def order_of(session: Session, settlement: Settlement) -> Order:
    return session.get_one(Order, settlement.entry.payload["metadata"]["order"])


def make_dispatcher() -> Dispatcher:
    stripe = StripeAdapter(
        api_key=os.environ["STRIPE_API_KEY"],
        api_version="2026-10-28.endive",
        base_url=os.environ.get("STRIPE_URL"),  # where Stripe is imitated; left out: Stripe
    )
    email = SmtpAdapter(
        host=os.environ["SMTP_HOST"],
        port=int(os.environ["SMTP_PORT"]),
        encryption="starttls" if "SMTP_USERNAME" in os.environ else "none",
        username=os.environ.get("SMTP_USERNAME"),
        password=os.environ.get("SMTP_PASSWORD"),
        sender="The shop <shop@example.com>",
    )
    return Dispatcher(connect(), adapters={"stripe": stripe, "email": email}, include=[effects])
