"""Square: payments, refunds, orders and invoices."""

from datetime import date

from dispatchers.adapters.providers.auth import bearer
from dispatchers.adapters.providers.key_places import BodyField
from dispatchers.adapters.providers.operations import Operation, Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Signal
from dispatchers.delivery import KeyFormat


def created(path: str, name: str) -> Operation:
    """A request whose answer has the object under its name: {"payment": {"id": ...}}."""
    return Post(path, result=(f"{name}.id", f"{name}.status"), answer={name: {"id": "{id}"}})


square = Profile(
    name="square",
    title="Square",
    as_of=date(2026, 10, 23),
    sources=(
        "https://developer.squareup.com/docs/build-basics/common-api-patterns/idempotency",
        "https://developer.squareup.com/forums/t/question-about-idempotency-key-on-payments/28309",
        "https://github.com/square/connect-api-specification",
    ),
    base_url="https://connect.squareup.com",
    auth=bearer("access_token"),
    headers={"Square-Version": "2026-09-16"},
    key=BodyField("idempotency_key", KeyFormat(max_chars=45)),
    window=None,
    stores="success",
    compares="parameters",
    mismatch=Signal(400, body={"errors": [{"code": "IDEMPOTENCY_KEY_REUSED"}]}),
    operations={
        "payments.create": created("/v2/payments", "payment"),
        "refunds.create": created("/v2/refunds", "refund"),
        "orders.create": created("/v2/orders", "order"),
        "orders.pay": created("/v2/orders/{order_id}/pay", "order"),
        "invoices.create": created("/v2/invoices", "invoice"),
        "invoices.publish": created("/v2/invoices/{invoice_id}/publish", "invoice"),
        "payment_links.create": created("/v2/online-checkout/payment-links", "payment_link"),
        "gift_cards.create": created("/v2/gift-cards", "gift_card"),
        "gift_card_activities.create": created("/v2/gift-cards/activities", "gift_card_activity"),
        "terminal_checkouts.create": created("/v2/terminals/checkouts", "checkout"),
        "customers.create": created("/v2/customers", "customer"),
        "subscriptions.create": created("/v2/subscriptions", "subscription"),
    },
    error=("errors[].code", "errors[].category"),
    error_answer={"errors": [{"category": "API_ERROR", "code": "INTERNAL_SERVER_ERROR", "detail": "An error"}]},
    notes=("Square publishes no time for which it remembers a key (its staff, October 2026).",),
)
