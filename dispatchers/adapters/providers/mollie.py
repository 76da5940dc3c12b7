"""Mollie: payments, refunds and subscriptions."""

from datetime import date, timedelta

from dispatchers.adapters.providers.auth import bearer
from dispatchers.adapters.providers.key_places import Header
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Signal
from dispatchers.delivery import KeyFormat

CREATED = {"id": "{id}", "resource": "resource"}

mollie = Profile(
    name="mollie",
    title="Mollie",
    as_of=date(2024, 3, 4),
    sources=(
        "https://docs.mollie.com/reference/api-idempotency",
        "https://github.com/mollie/api-documentation",
        "https://github.com/mollie/openapi",
    ),
    base_url="https://api.mollie.com/v2",
    auth=bearer(),
    key=Header("Idempotency-Key", KeyFormat(encoding="uuid", uuid_version=4)),
    window=timedelta(hours=1),
    stores="all",
    compares="parameters",
    in_flight=Signal(409),
    mismatch=Signal(400),
    replay=Signal(None, headers={"Idempotent-Replayed": "true"}),
    operations={
        "payments.create": Post("/payments", success=201, answer=CREATED),
        "payments.refund": Post("/payments/{payment_id}/refunds", success=201, answer=CREATED),
        "payments.capture": Post("/payments/{payment_id}/captures", success=201, answer=CREATED),
        "payments.route": Post("/payments/{payment_id}/routes", success=201, answer=CREATED),
        "payment_links.create": Post("/payment-links", success=201, answer=CREATED),
        "customers.create": Post("/customers", success=201, answer=CREATED),
        "customers.create_payment": Post("/customers/{customer_id}/payments", success=201, answer=CREATED),
        "customers.create_mandate": Post("/customers/{customer_id}/mandates", success=201, answer=CREATED),
        "customers.create_subscription": Post("/customers/{customer_id}/subscriptions", success=201, answer=CREATED),
        "balance_transfers.create": Post("/connect/balance-transfers", success=201, answer=CREATED),
    },
    result=("id", "status"),
    error=("field",),
    error_answer={"status": "{status}", "title": "Error", "detail": "An error"},
    notes=(
        "A key is also bound to its path.",
        "Of two alike refunds in short succession the second waits: Mollie answers 409.",
    ),
)
