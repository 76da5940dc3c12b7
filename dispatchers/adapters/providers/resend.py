"""Resend: mail by an API with keys."""

from datetime import date, timedelta

from dispatchers.adapters.providers.auth import bearer
from dispatchers.adapters.providers.key_places import Header
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Signal
from dispatchers.delivery import KeyFormat

resend = Profile(
    name="resend",
    title="Resend",
    as_of=date(2026, 8, 21),
    sources=(
        "https://resend.com/docs/dashboard/emails/idempotency-keys",
        "https://github.com/resend/resend-openapi",
        "https://github.com/resend/resend-python",
    ),
    base_url="https://api.resend.com",
    auth=bearer(),
    key=Header("Idempotency-Key", KeyFormat(max_chars=256)),
    window=timedelta(hours=24),
    stores="success",
    compares="parameters",
    in_flight=Signal(409, body={"name": "concurrent_idempotent_requests"}),
    mismatch=Signal(409, body={"name": "invalid_idempotent_request"}),
    operations={
        "emails.send": Post("/emails", answer={"id": "{id}"}),
        "emails.batch": Post("/emails/batch", payload="list", result=("data[].id",), answer={"data": [{"id": "{id}"}]}),
    },
    result=("id",),
    error=("name",),
    error_answer={"statusCode": "{status}", "name": "application_error", "message": "An error"},
    notes=("A key is known for one method and path.",),
)
