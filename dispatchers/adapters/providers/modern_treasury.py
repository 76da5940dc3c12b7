"""Modern Treasury: payment orders and ledgers."""

from datetime import date, timedelta

from dispatchers.adapters.providers.auth import basic
from dispatchers.adapters.providers.key_places import Header
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Signal

CREATED = {"id": "{id}"}

modern_treasury = Profile(
    name="modern_treasury",
    title="Modern Treasury",
    as_of=date(2026, 8, 22),
    sources=(
        "https://docs.moderntreasury.com/reference/idempotent-requests",
        "https://github.com/Modern-Treasury/modern-treasury-openapi",
    ),
    base_url="https://app.moderntreasury.com/api",
    auth=basic("{organization_id}", "{api_key}"),
    key=Header("Idempotency-Key"),
    window=timedelta(hours=24),
    window_from="first_finished",
    stores="success",
    compares="nothing",
    scope="api_key",
    in_flight=Signal(409),
    operations={
        "payment_orders.create": Post("/payment_orders", success=201, answer=CREATED),
        "payment_orders.create_async": Post("/payment_orders/create_async", success=202, answer=CREATED),
        "payment_orders.reverse": Post("/payment_orders/{payment_order_id}/reversals", success=201, answer=CREATED),
        "counterparties.create": Post("/counterparties", success=201, answer=CREATED),
        "external_accounts.create": Post("/external_accounts", success=201, answer=CREATED),
        "internal_accounts.create": Post("/internal_accounts", success=201, answer=CREATED),
        "expected_payments.create": Post("/expected_payments", success=201, answer=CREATED),
        "returns.create": Post("/returns", success=201, answer=CREATED),
        "invoices.create": Post("/invoices", answer=CREATED),
        "ledgers.create": Post("/ledgers", success=201, answer=CREATED),
        "ledger_accounts.create": Post("/ledger_accounts", success=201, answer=CREATED),
        "ledger_transactions.create": Post("/ledger_transactions", success=201, answer=CREATED),
    },
    result=("id",),
    error=("errors.code", "errors.parameter"),
    error_answer={"errors": {"code": "error", "message": "An error", "parameter": None}},
    notes=(
        "A key is known for every path: a different request under it gets the first one's answer.",
        "HTTP 409 is both a key in use and a conflict, such as an external_id that exists: an entry with such a conflict waits"
        " until its window ends.",
    ),
)
