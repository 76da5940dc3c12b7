"""Twilio: SMS and calls, by APIs without keys."""

from datetime import date

from dispatchers.adapters.providers.auth import basic
from dispatchers.adapters.providers.key_places import NoKey
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile

SENT = {"sid": "{id}", "status": "queued"}

twilio = Profile(
    name="twilio",
    title="Twilio",
    as_of=date(2026, 11, 27),
    sources=("https://github.com/twilio/twilio-python", "https://github.com/twilio/twilio-oai"),
    base_url="https://api.twilio.com/2010-04-01/Accounts/{account_sid}",
    auth=basic("{account_sid}", "{auth_token}"),
    key=NoKey(search="Messaging > Logs or Voice > Logs, by recipient and day: Twilio stores no key"),
    stores="nothing",
    operations={
        "messages.create": Post("/Messages.json", content="form", success=201, answer=SENT),
        "calls.create": Post("/Calls.json", content="form", success=201, answer=SENT),
    },
    result=("sid", "status"),
    error=("code",),
    error_answer={"code": 20500, "message": "An error", "more_info": "", "status": "{status}"},
    notes=("Twilio's newer APIs (Conversations v2, Voice v3) take an Idempotency-Key; these two do not.",),
)
