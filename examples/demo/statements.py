"""The states of each order's entries in the outbox, which the audit checks."""

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

import outbox
from examples.demo.checkout_results import CheckoutResult
from examples.demo.orders import Order

CHARGE = "stripe.payment_intents.create"
RECEIPT = "postmark.email.send"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One entry of an order. key: the child key that the remote service got. reason: why it is uncertain or failed, if so."""

    id: UUID
    operation: str
    key: str
    state: str
    reason: str | None = None


def read_statements(engine: Engine, results: Iterable[CheckoutResult]) -> dict[str, list[Statement]]:
    """The entries of all orders, by order."""
    found: dict[str, list[Statement]] = {}
    with Session(engine) as session:
        for checkout in results:
            parent = outbox.ParentKey(checkout.key, scope=checkout.customer, source="http")
            statements = [
                Statement(
                    id=entry.id,
                    operation=entry.operation,
                    key=entry.child_key,
                    state=entry.state,
                    reason=entry.reason,
                )
                for entry in outbox.status(session, parent)
            ]
            found |= dict.fromkeys(checkout.order_ids, statements)
    return found


def read_paid(engine: Engine) -> set[str]:
    """The orders that are marked as paid."""
    with Session(engine) as session:
        return set(session.scalars(select(Order.id).where(Order.paid_at.is_not(None))))
