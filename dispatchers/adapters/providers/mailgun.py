"""Mailgun: mail by an API without keys."""

from datetime import date

from dispatchers.adapters.providers.auth import basic
from dispatchers.adapters.providers.key_places import Mark, NoKey
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile

mailgun = Profile(
    name="mailgun",
    title="Mailgun",
    as_of=date(2026, 11, 27),
    sources=(
        "https://github.com/mailgun/mailgun-python",
        "https://documentation.mailgun.com/docs/mailgun/user-manual/events",
    ),
    base_url="https://api.mailgun.net/v3/{domain}",
    auth=basic("api", "{api_key}"),
    key=NoKey(
        mark=Mark("v:outbox_key"),
        search="Logs, by recipient; the variable outbox_key = {key} is in the message's details",
    ),
    stores="nothing",
    operations={
        "messages.send": Post("/messages", content="form", answer={"id": "{id}", "message": "Queued. Thank you."})
    },
    result=("id",),
    notes=(
        "The SDK's IdempotencyGuard writes a header into the mail; Mailgun documents no key that it would compare.",
    ),
)
