"""Postmark: mail by an API without keys."""

from datetime import date

from dispatchers.adapters.providers.auth import in_header
from dispatchers.adapters.providers.key_places import Mark, NoKey
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile

SENT = {"MessageID": "{id}", "ErrorCode": 0, "Message": "OK"}

postmark = Profile(
    name="postmark",
    title="Postmark",
    as_of=date(2025, 9, 30),
    sources=(
        "https://postmarkapp.com/support/article/what-is-an-idempotency-key",
        "https://postmarkapp.com/support/article/1125-custom-metadata-faq",
    ),
    base_url="https://api.postmarkapp.com",
    auth=in_header("X-Postmark-Server-Token", "server_token"),
    key=NoKey(
        mark=Mark("Metadata.outbox_key"),
        search="Activity, metadata outbox_key = {key}; by API: /messages/outbound?count=1&offset=0&metadata_outbox_key={key}",
    ),
    stores="nothing",
    operations={
        "email.send": Post("/email", answer=SENT),
        "email.send_with_template": Post("/email/withTemplate", answer=SENT),
    },
    result=("MessageID",),
    error=("ErrorCode",),
    error_answer={"ErrorCode": 100, "Message": "An error"},
)
