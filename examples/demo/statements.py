"""What the outbox says of each order: the claims that the audit puts to the test."""

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

import outbox
from examples.demo.orders import Order
from examples.demo.promises import Promise

CHARGE = "stripe.payment_intents.create"
RECEIPT = "email.send"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One entry of an order. key: what the remote service got. reason: why it is uncertain or has failed, if it is or has."""

    id: UUID
    operation: str
    key: str
    state: str
    reason: str | None = None


def read_statements(engine: Engine, promises: Iterable[Promise]) -> dict[str, list[Statement]]:
    """All of them, by order."""
    said: dict[str, list[Statement]] = {}
    with Session(engine) as session:
        for promise in promises:
            parent = outbox.ParentKey(promise.key, scope=promise.customer, source="http")
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
            said |= dict.fromkeys(promise.order_ids, statements)
    return said


def read_paid(engine: Engine) -> set[str]:
    """The orders that are marked as paid."""
    with Session(engine) as session:
        return set(session.scalars(select(Order.id).where(Order.paid_at.is_not(None))))
