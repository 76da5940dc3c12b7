"""SendGrid: mail by an API without keys."""

from datetime import date

from dispatchers.adapters.providers.auth import bearer
from dispatchers.adapters.providers.key_places import Mark, NoKey
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile

sendgrid = Profile(
    name="sendgrid",
    title="SendGrid",
    as_of=date(2026, 11, 22),
    sources=(
        "https://github.com/sendgrid/sendgrid-python",
        "https://www.twilio.com/docs/sendgrid/for-developers/sending-email/getting-started-email-activity-api",
    ),
    base_url="https://api.sendgrid.com/v3",
    auth=bearer(),
    key=NoKey(
        mark=Mark("custom_args.outbox_key"),
        search="Activity, custom argument outbox_key = {key}; by API (paid): /v3/messages?query=unique_args",
    ),
    stores="nothing",
    operations={"mail.send": Post("/mail/send", success=202)},
    error=("errors[].field",),
    error_answer={"errors": [{"message": "An error", "field": None, "help": None}]},
)
