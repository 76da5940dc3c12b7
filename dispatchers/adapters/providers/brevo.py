"""Brevo: transactional mail."""

from datetime import date, timedelta

from dispatchers.adapters.providers.auth import in_header
from dispatchers.adapters.providers.key_places import BodyField
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Duplicate, Signal
from dispatchers.delivery import KeyFormat

brevo = Profile(
    name="brevo",
    title="Brevo",
    as_of=date(2026, 11, 22),
    sources=(
        "https://developers.brevo.com/docs/heterogenous-versions-batch-emails",
        "https://developers.brevo.com/changelog/email-api-now-supports-idempotency",
    ),
    base_url="https://api.brevo.com/v3",
    auth=in_header("api-key"),
    key=BodyField("headers.idempotencyKey", KeyFormat(encoding="uuid", uuid_version=4)),
    window=timedelta(minutes=15),
    stores="duplicate_refused",
    compares="nothing",
    duplicate=Duplicate(Signal(None, body={"code": "duplicate_parameter"}), after_errors=True),
    operations={"smtp.email.send": Post("/smtp/email", success=201, answer={"messageId": "{id}"})},
    result=("messageId",),
    error=("code",),
    error_answer={"code": "an_error", "message": "An error"},
    notes=(
        "A key that was used is refused, whether or not its request succeeded: look for the mail at Brevo.",
        "Brevo's announcement says 15 minutes, its guide 30: the shorter time is safe.",
    ),
)
