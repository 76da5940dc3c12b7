"""Adyen: payments, by the Checkout API."""

from datetime import date, timedelta

from dispatchers.adapters.providers.auth import in_header
from dispatchers.adapters.providers.key_places import Header
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Signal
from dispatchers.delivery import KeyFormat

RECEIVED = {"pspReference": "{id}", "status": "received"}

adyen = Profile(
    name="adyen",
    title="Adyen",
    as_of=date(2026, 9, 20),
    sources=(
        "https://docs.adyen.com/development-resources/api-idempotency",
        "https://github.com/Adyen/adyen-openapi",
    ),
    base_url="https://{prefix}-checkout-live.adyenpayments.com/checkout/v71",
    auth=in_header("X-API-Key"),
    key=Header("Idempotency-Key", KeyFormat(max_chars=64)),
    window=timedelta(days=7),
    stores="all",
    scope="region",
    in_flight=Signal(None, body={"errorCode": "704"}),
    operations={
        "payments.create": Post("/payments", answer={"pspReference": "{id}", "resultCode": "Authorised"}),
        "payments.capture": Post("/payments/{payment_psp_reference}/captures", success=201, answer=RECEIVED),
        "payments.refund": Post("/payments/{payment_psp_reference}/refunds", success=201, answer=RECEIVED),
        "payments.cancel": Post("/payments/{payment_psp_reference}/cancels", success=201, answer=RECEIVED),
        "payments.reverse": Post("/payments/{payment_psp_reference}/reversals", success=201, answer=RECEIVED),
        "payments.update_amount": Post("/payments/{payment_psp_reference}/amountUpdates", success=201, answer=RECEIVED),
        "cancels.create": Post("/cancels", success=201, answer=RECEIVED),
        "payment_links.create": Post("/paymentLinks", success=201, result=("id", "url"), answer={"id": "{id}"}),
        "sessions.create": Post("/sessions", success=201, result=("id",), answer={"id": "{id}"}),
        "orders.create": Post("/orders", answer={"pspReference": "{id}", "resultCode": "Success"}),
        "donations.create": Post("/donations", result=("id", "status"), answer={"id": "{id}", "status": "completed"}),
    },
    # Adyen allows a retry with the same key. It does not state that nothing was executed.
    errors=((Signal(None, headers={"transient-error": "true"}), "unknown"),),
    result=("pspReference", "resultCode", "status"),
    error=("errorCode", "errorType"),
    error_answer={"status": "{status}", "errorCode": "000", "message": "An error", "errorType": "internal"},
    notes=(
        "Keys belong to the company account, and each region knows its own.",
        "Adyen remembers a key for 7 to 14 days.",
        "A refused payment is a success whose resultCode is 'Refused'.",
    ),
)
