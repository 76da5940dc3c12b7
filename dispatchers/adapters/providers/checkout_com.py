"""Checkout.com: payments."""

from datetime import date, timedelta

from dispatchers.adapters.providers.auth import bearer
from dispatchers.adapters.providers.key_places import Header
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Signal
from dispatchers.delivery import KeyFormat

ACTION = {"action_id": "{id}"}

checkout_com = Profile(
    name="checkout_com",
    title="Checkout.com",
    as_of=date(2026, 1, 7),
    sources=(
        "https://www.checkout.com/docs/payments/manage-payments/retry-a-payment",
        "https://support.checkout.com/hc/en-us/articles/24570669653010",
        "https://support.checkout.com/hc/en-us/articles/26763450855186",
        "https://support.checkout.com/hc/en-us/articles/26389366298514",
        "https://github.com/checkout/checkout-sdk-python",
    ),
    base_url="https://{prefix}.api.checkout.com",
    auth=bearer("secret_key"),
    key=Header("Cko-Idempotency-Key", KeyFormat(encoding="uuid", uuid_version=4)),
    window=timedelta(hours=24),
    stores="2xx",
    in_flight=Signal(409),
    operations={
        "payments.request": Post("/payments", success=201, answer={"id": "{id}", "status": "Authorized"}),
        "payments.capture": Post("/payments/{payment_id}/captures", success=202, answer=ACTION),
        "payments.refund": Post("/payments/{payment_id}/refunds", success=202, answer=ACTION),
        "payments.void": Post("/payments/{payment_id}/voids", success=202, answer=ACTION),
        "payments.increment_authorization": Post("/payments/{payment_id}/authorizations", success=201, answer=ACTION),
        "payments.cancel": Post("/payments/{payment_id}/cancellations", success=202, answer=ACTION),
        "payment_contexts.request": Post("/payment-contexts", success=201, answer={"id": "{id}"}),
    },
    result=("id", "status", "action_id"),
    error=("error_type", "error_codes"),
    notes=(
        "Your production account may have another window: ask Checkout.com, and give it as window=...",
        "An error is executed again under the same key.",
        "A declined payment is a success whose status is 'Declined'.",
        "A capture or refund of the full balance that has happened answers 200 with its id, also under another key.",
        "Checkout.com recommends at least 30 seconds between two attempts.",
    ),
)
