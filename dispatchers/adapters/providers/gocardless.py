"""GoCardless: bank payments."""

from datetime import date

from dispatchers.adapters.providers.auth import bearer
from dispatchers.adapters.providers.key_places import Header
from dispatchers.adapters.providers.operations import Operation, Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Duplicate, Signal
from dispatchers.delivery import KeyFormat


def created(resource: str) -> Operation:
    """A creation. The payload is the service's own JSON, in its envelope: {"payments": {...}}."""
    return Post(f"/{resource}", success=201, result=(f"{resource}.id",), answer={resource: {"id": "{id}"}})


gocardless = Profile(
    name="gocardless",
    title="GoCardless",
    as_of=date(2026, 11, 22),
    sources=(
        "https://gocardless.com/blog/idempotency-keys",
        "https://github.com/gocardless/gocardless-pro-python",
    ),
    base_url="https://api.gocardless.com",
    auth=bearer("access_token"),
    headers={"GoCardless-Version": "2015-07-06"},
    key=Header("Idempotency-Key", KeyFormat(encoding="uuid", uuid_version=4)),
    window=None,
    stores="duplicate_refused",
    duplicate=Duplicate(
        Signal(409, body={"error": {"type": "invalid_state", "errors": [{"reason": "idempotent_creation_conflict"}]}}),
        id="error.errors[].links.conflicting_resource_id",
    ),
    operations={
        f"{resource}.create": created(resource)
        for resource in (
            "payments",
            "refunds",
            "subscriptions",
            "instalment_schedules",
            "outbound_payments",
            "mandates",
            "customers",
            "customer_bank_accounts",
            "billing_requests",
            "billing_request_flows",
        )
    },
    error=("error.type", "error.errors[].reason"),
    error_answer={
        "error": {
            "code": "{status}",
            "type": "gocardless",
            "message": "An error",
            "errors": [{"reason": "internal_server_error", "message": "An error"}],
        }
    },
    notes=(
        "GoCardless documents keys for creations only, so actions such as a cancellation are not here.",
        "A duplicate's id is that of the first request's resource; whether both requests were alike is not checked.",
    ),
)
