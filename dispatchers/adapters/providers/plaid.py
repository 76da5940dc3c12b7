"""Plaid: transfers, wallets and consent payments."""

from datetime import date, timedelta

from dispatchers.adapters.providers.auth import in_header
from dispatchers.adapters.providers.key_places import BodyField, NaturalKey
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.delivery import KeyFormat

TRANSFERS = KeyFormat(max_chars=50)
PAYMENTS = BodyField("idempotency_key", KeyFormat(max_chars=128))

plaid = Profile(
    name="plaid",
    title="Plaid",
    as_of=date(2026, 6, 10),
    sources=("https://github.com/plaid/plaid-openapi",),
    base_url="https://production.plaid.com",
    auth=(in_header("PLAID-CLIENT-ID", "client_id"), in_header("PLAID-SECRET", "secret")),
    key=BodyField("idempotency_key", TRANSFERS),
    window=None,
    stores="success",
    operations={
        "transfer.authorization.create": Post(
            "/transfer/authorization/create",
            window=timedelta(hours=48),
            result=("authorization.id", "authorization.decision"),
            answer={"request_id": "1", "authorization": {"id": "{id}", "decision": "approved"}},
        ),
        "transfer.create": Post(
            "/transfer/create",
            key=NaturalKey("authorization_id: there is one transfer for each authorization"),
            result=("transfer.id", "transfer.status"),
            answer={"request_id": "1", "transfer": {"id": "{id}", "status": "pending"}},
        ),
        "transfer.refund.create": Post(
            "/transfer/refund/create", result=("refund.id",), answer={"request_id": "1", "refund": {"id": "{id}"}}
        ),
        "transfer.recurring.create": Post(
            "/transfer/recurring/create",
            result=("recurring_transfer.recurring_transfer_id",),
            answer={"request_id": "1", "recurring_transfer": {"recurring_transfer_id": "{id}"}},
        ),
        "payment_initiation.consent.payment.execute": Post(
            "/payment_initiation/consent/payment/execute",
            key=PAYMENTS,
            window=timedelta(hours=48),
            result=("payment_id", "status"),
            answer={"request_id": "1", "payment_id": "{id}", "status": "PAYMENT_STATUS_INITIATED"},
        ),
        "wallet.transaction.execute": Post(
            "/wallet/transaction/execute",
            key=PAYMENTS,
            window=timedelta(hours=24),
            pause=timedelta(minutes=1),
            result=("transaction_id", "status"),
            answer={"request_id": "1", "transaction_id": "{id}", "status": "INITIATED"},
        ),
    },
    error=("error_type", "error_code"),
    error_answer={
        "request_id": "1",
        "error_type": "API_ERROR",
        "error_code": "INTERNAL_SERVER_ERROR",
        "error_message": "An error",
    },
    notes=(
        "Plaid publishes no window for refunds and recurring transfers.",
        "An authorization whose decision is user_action_required is not remembered.",
    ),
)
