"""OneSignal: push notifications."""

from datetime import date, timedelta

from dispatchers.adapters.providers.auth import Auth
from dispatchers.adapters.providers.key_places import BodyField
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Signal
from dispatchers.delivery import KeyFormat

onesignal = Profile(
    name="onesignal",
    title="OneSignal",
    as_of=date(2026, 11, 22),
    sources=("https://documentation.onesignal.com/reference/idempotent-notification-requests",),
    base_url="https://api.onesignal.com",
    auth=Auth("Authorization", "Key {api_key}"),
    key=BodyField("idempotency_key", KeyFormat(encoding="uuid", uuid_version=4)),
    window=timedelta(days=30),
    stores="success",
    operations={"notifications.create": Post("/notifications", answer={"id": "{id}"})},
    errors=((Signal(200, body={"id": ""}), "rejected"),),
    result=("id",),
    notes=("An answer with an empty id means that no notification was made, though its status is 200.",),
)
