"""The records of an order in the tests of the demo: responses, both ledgers, and the outbox's statements."""

from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

from dispatchers.testing.stripe_ledger import Effect
from examples.demo.checkout_results import CheckoutResult
from examples.demo.mail_ledger import Mail
from examples.demo.statements import CHARGE, RECEIPT, Statement


def ordered(order_id: str, **fields: Any) -> CheckoutResult:
    """The response to the client of a good checkout."""
    owed = {"customer": "ada", "email": "ada@example.com", "amount": 2000, "currency": "eur"}
    return CheckoutResult(**{"key": f"key-{order_id}", "order_ids": [order_id], **owed, **fields})


def charge(order_id: str, **fields: Any) -> Effect:
    """A charge as the payment service's ledger has it."""
    given = {"amount": 2000, "currency": "eur", "customer": "ada", "metadata": {"order_id": order_id}}
    said = {"id": "ch_1", "object": "charge", "account": "acct", "key": f"charge-{order_id}", "request_id": "req_1"}
    return Effect(created=datetime(2030, 1, 1, tzinfo=UTC), **said | given | fields)


def mail(order_id: str, **fields: Any) -> Mail:
    """A receipt as the mail service's ledger has it."""
    given = {"recipient": "ada@example.com", "order_id": order_id, "subject": "Your receipt", "reply_lost": False}
    return Mail(**{"message_id": "<1@shop>", "key": f"receipt-{order_id}", **given, **fields})


def charge_id(order_id: str) -> UUID:
    return uuid5(NAMESPACE_OID, f"charge {order_id}")


def receipt_id(order_id: str) -> UUID:
    return uuid5(NAMESPACE_OID, f"receipt {order_id}")


def charging(order_id: str, state: str) -> Statement:
    return Statement(id=charge_id(order_id), operation=CHARGE, key=f"charge-{order_id}", state=state)


def mailing(order_id: str, state: str) -> Statement:
    return Statement(id=receipt_id(order_id), operation=RECEIPT, key=f"receipt-{order_id}", state=state)
