"""The dispatcher of `demo --stay`: charges and receipts, and after each charge a label, a parcel and a contact.

outbox run examples.demo.stay_effects:make_dispatcher
"""

from datetime import timedelta

from sqlalchemy.orm import Session

import outbox
from dispatchers import Delivered, Delivery, Dispatcher, Operations, Outcome, Rejected, RetryPolicy, Settlement, Unknown
from examples.demo import effects as shop
from examples.demo.orders import Order

LABEL, PARCEL, CONTACT = "courier.labels.buy", "warehouse.parcels.create", "crm.contacts.upsert"
DAY = timedelta(days=1)

# Of so many customers, one has an address that the warehouse refuses, and one is in a region whose labels time out.
UNDELIVERABLE, REMOTE = 9, 11

effects = Operations()


@effects.on_settled("stripe.payment_intents.create")
def charged(session: Session, settlement: Settlement) -> None:
    """After a charge: the receipt, the parcel in the order of the customer's purchases, and the contact."""
    shop.charged(session, settlement)
    if settlement.state != "delivered":
        return
    order = session.get_one(Order, settlement.entry.payload["metadata"]["order_id"])
    shipment = {"order": order.id, "customer": order.customer}
    outbox.enqueue(session, LABEL, shipment)
    outbox.enqueue(session, PARCEL, shipment, ordering_key=f"customer:{order.customer}")
    outbox.enqueue(session, CONTACT, {"email": order.email, "last_order": order.id})


def number_of(delivery: Delivery) -> int:
    return int(delivery.payload["customer"].removeprefix("cus_"))


@effects.operation(LABEL, window=DAY, timeout=shop.TIMEOUT, retry=RetryPolicy(max_attempts=2))
async def buy_label(delivery: Delivery) -> Outcome:
    if number_of(delivery) % REMOTE == 0:
        return Unknown("504 from the courier's gateway: it does not say whether the label was bought")
    return Delivered({"label": f"lab_{delivery.key[-12:]}"})


@effects.operation(PARCEL, window=DAY, timeout=shop.TIMEOUT)
async def create_parcel(delivery: Delivery) -> Outcome:
    if number_of(delivery) % UNDELIVERABLE == 0:
        return Rejected(f"422: the address of {delivery.payload['customer']} has no postal code", conclusive=True)
    return Delivered({"parcel": f"par_{delivery.key[-12:]}"})


@effects.operation(CONTACT, window=DAY, timeout=shop.TIMEOUT)
async def upsert_contact(delivery: Delivery) -> Outcome:
    return Delivered()


def make_dispatcher() -> Dispatcher:
    return shop.make_dispatcher(effects)
