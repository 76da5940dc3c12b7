"""PayPal: orders, payments, payouts, subscriptions and saved payment methods."""

from datetime import date, timedelta

from dispatchers.adapters.providers.auth import bearer
from dispatchers.adapters.providers.key_places import Header
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Signal
from dispatchers.delivery import KeyFormat

MADE = {"id": "{id}", "status": "COMPLETED"}
VAULT, ORDERS, BILLING, PAYMENTS = timedelta(hours=3), timedelta(hours=6), timedelta(hours=72), timedelta(days=45)
PAYOUTS = timedelta(days=30)

paypal = Profile(
    name="paypal",
    title="PayPal",
    as_of=date(2026, 6, 30),
    sources=(
        "https://developer.paypal.com/reference/guidelines/idempotency",
        "https://github.com/paypal/paypal-rest-api-specifications",
        "https://developer.paypal.com/api/payment-tokens/v3/errors/paypal_request_id_previously_used",
    ),
    base_url="https://api-m.paypal.com",
    auth=bearer("access_token"),
    key=Header("PayPal-Request-Id", KeyFormat(max_chars=78)),
    window=ORDERS,
    stores="current_state",
    scope="account",
    in_flight=Signal(409, body={"details": [{"issue": "PREVIOUS_REQUEST_IN_PROGRESS"}]}),
    mismatch=Signal(422, body={"details": [{"issue": "PAYPAL_REQUEST_ID_PREVIOUSLY_USED"}]}),
    operations={
        "orders.create": Post("/v2/checkout/orders", success=201, answer=MADE),
        "orders.authorize": Post("/v2/checkout/orders/{order_id}/authorize", success=201, answer=MADE),
        "orders.capture": Post("/v2/checkout/orders/{order_id}/capture", success=201, answer=MADE),
        "authorizations.capture": Post(
            "/v2/payments/authorizations/{authorization_id}/capture", window=PAYMENTS, success=201, answer=MADE
        ),
        "captures.refund": Post("/v2/payments/captures/{capture_id}/refund", window=PAYMENTS, success=201, answer=MADE),
        "payouts.create": Post(
            "/v1/payments/payouts",
            window=PAYOUTS,
            success=201,
            result=("batch_header.payout_batch_id", "batch_header.batch_status"),
            answer={"batch_header": {"payout_batch_id": "{id}", "batch_status": "PENDING"}},
        ),
        "products.create": Post("/v1/catalogs/products", window=BILLING, success=201, answer=MADE),
        "plans.create": Post("/v1/billing/plans", window=BILLING, success=201, answer=MADE),
        "subscriptions.create": Post("/v1/billing/subscriptions", window=BILLING, success=201, answer=MADE),
        "setup_tokens.create": Post("/v3/vault/setup-tokens", window=VAULT, success=201, answer=MADE),
        "payment_tokens.create": Post("/v3/vault/payment-tokens", window=VAULT, success=201, answer=MADE),
    },
    result=("id", "status"),
    error=("name", "details[].issue"),
    error_answer={"name": "INTERNAL_SERVER_ERROR", "message": "An error", "debug_id": "1", "details": []},
    notes=(
        "Its longest window needs Dispatcher(retention=timedelta(days=46)).",
        "A repeated request gets the present state, not the first answer.",
        "PayPal does not say what a key belongs to; it cannot be the access token, which it outlives.",
    ),
)
