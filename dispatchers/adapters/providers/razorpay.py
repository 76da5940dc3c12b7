"""RazorpayX: payouts."""

from datetime import date, timedelta

from dispatchers.adapters.providers.auth import basic
from dispatchers.adapters.providers.key_places import Header
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.delivery import KeyFormat

razorpay = Profile(
    name="razorpay",
    title="RazorpayX",
    as_of=date(2026, 11, 22),
    sources=("https://razorpay.com/docs/api/x/payout-idempotency/",),
    base_url="https://api.razorpay.com/v1",
    auth=basic("{key_id}", "{key_secret}"),
    key=Header("X-Payout-Idempotency", KeyFormat(max_chars=36, alphabet=r"[A-Za-z0-9 _-]")),
    window=timedelta(days=7),
    stores="current_state",
    compares="body",
    operations={"payouts.create": Post("/payouts", answer={"id": "{id}", "status": "processing"})},
    result=("id", "status"),
    error=("error.code", "error.field"),
    notes=(
        "A different request under the key is refused as any other bad request: HTTP 400, BAD_REQUEST_ERROR.",
        "Other Razorpay APIs take no key.",
    ),
)
