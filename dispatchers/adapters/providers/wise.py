"""Wise: transfers."""

from datetime import date

from dispatchers.adapters.providers.auth import bearer
from dispatchers.adapters.providers.key_places import BodyField
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.delivery import KeyFormat

wise = Profile(
    name="wise",
    title="Wise",
    as_of=date(2026, 11, 22),
    sources=(
        "https://docs.wise.com/guides/product/send-money/standard-api-transfers",
        "https://docs.wise.com/api-docs/features/authentication-access/environments",
    ),
    base_url="https://api.wise.com",
    auth=bearer("token"),
    key=BodyField("customerTransactionId", KeyFormat(encoding="uuid", uuid_version=4)),
    window=None,
    stores="current_state",
    operations={"transfers.create": Post("/v1/transfers", answer={"id": "{id}", "status": "incoming_payment_waiting"})},
    result=("id", "status"),
    notes=(
        "Wise publishes no time for which it remembers a customerTransactionId.",
        "A second guard: there is one transfer for each quote.",
        "Funding a transfer is a second call, which has no key.",
    ),
)
