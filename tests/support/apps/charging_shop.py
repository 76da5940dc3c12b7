"""A shop that charges a card inside a leased claim, and may be killed at a given moment: a process of test_leases_crashed.py."""

import os
import signal
import sys
from datetime import timedelta

import sqlalchemy as sa
import stripe
from sqlalchemy.orm import Session

import outbox
from outbox.requests.leases import LeasedAttempt
from support.database import CHARGE, PAYLOAD, REQUEST, Database, Order

MOMENTS = (
    "before the claim",
    "before the charge",
    "after the charge",
    "inside the fence",
    "before the commit",
    "after the commit",
)


def handle(database: Database, stripe_url: str, moment: str = "") -> outbox.Response:
    """Charge and answer the one request, renewing in the background; at `moment` the process kills itself."""

    def reach(name: str) -> None:
        if name == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    ob = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test")
    reach("before the claim")
    with ob.leased(
        database.engine, "retry-001", scope="acct_1", content=REQUEST, renew_for=timedelta(minutes=5)
    ) as claim:
        if claim.replayed:
            return claim.require_response()
        reach("before the charge")
        intent = charge(claim, stripe_url)
        reach("after the charge")
        with Session(database.engine) as session:
            with claim.fence(session) as fence:
                session.add(Order(customer="ada", amount=intent.amount))
                ob.enqueue(session, "email.send", PAYLOAD)
                fence.respond(201, {"intent": intent.id})
                session.flush()
                reach("inside the fence")
            reach("before the commit")
            session.commit()
        reach("after the commit")
    return claim.require_response()


def charge(claim: LeasedAttempt, stripe_url: str) -> stripe.PaymentIntent:
    client = stripe.StripeClient("sk_test_fake", base_addresses={"api": stripe_url}, max_network_retries=0)
    return client.v1.payment_intents.create(
        {"amount": 2000, "currency": "eur", "payment_method": "pm_card_visa", "confirm": True},
        {"idempotency_key": claim.child_key(CHARGE)},
    )


if __name__ == "__main__":
    url, stripe_url, moment = sys.argv[1:]
    handle(Database(sa.make_url(url)), stripe_url, moment)
