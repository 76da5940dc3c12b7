"""The job: `python -m examples.cron.nightly`, by cron, as often as you like."""

import asyncio
import os
from datetime import UTC, datetime

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

import outbox
from dispatchers import Dispatcher, Operations, Settlement
from dispatchers.adapters import StripeAdapter
from examples.cron.invoices import Invoice, connect

effects = Operations()


def ask_for_charges(engine: Engine) -> int:
    """Enqueue a charge for each open invoice that is due, unless there is one; returns how many are open and due."""
    today = datetime.now(UTC).date()
    with Session(engine) as session, session.begin():
        invoices = session.scalars(select(Invoice).where(Invoice.state == "open", Invoice.due_on <= today)).all()
        for invoice in invoices:
            outbox.enqueue(
                session,
                "stripe.payment_intents.create",
                {
                    "amount": invoice.amount,
                    "currency": "eur",
                    "payment_method": invoice.card,
                    "confirm": True,
                    "metadata": {"invoice": str(invoice.number)},
                },
                parent=f"invoice:{invoice.number}",
                if_exists="ignore",
            )
    return len(invoices)


@effects.on_settled("stripe.payment_intents.create")
def charged(session: Session, settlement: Settlement) -> None:
    invoice = session.get_one(Invoice, int(settlement.entry.payload["metadata"]["invoice"]))
    invoice.state = "paid" if settlement.state == "delivered" else "refused"


def make_dispatcher() -> Dispatcher:
    stripe = StripeAdapter(
        api_key=os.environ["STRIPE_API_KEY"],
        api_version="2026-10-28.endive",
        base_url=os.environ.get("STRIPE_URL"),  # where Stripe is imitated; left out: Stripe
    )
    return Dispatcher(connect(), adapters={"stripe": stripe}, include=[effects])


async def send() -> int:
    """Send what is due now, without a process that stays."""
    dispatcher = make_dispatcher()
    try:
        return await dispatcher.run_once()
    finally:
        await dispatcher.close()


if __name__ == "__main__":
    print(ask_for_charges(connect()), "open and due,", asyncio.run(send()), "tried")
