"""Slack: messages, by an API without keys."""

from datetime import date

from dispatchers.adapters.providers.auth import bearer
from dispatchers.adapters.providers.key_places import Mark, NoKey
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Signal

SENT = {"ok": True, "ts": "1503435956.000247", "channel": "C123ABC456"}

slack = Profile(
    name="slack",
    title="Slack",
    as_of=date(2026, 11, 22),
    sources=(
        "https://docs.slack.dev/reference/methods/chat.postMessage",
        "https://docs.slack.dev/messaging/message-metadata",
        "https://github.com/slackapi/slack-api-specs/issues/10",
    ),
    base_url="https://slack.com/api",
    auth=bearer("token"),
    key=NoKey(
        mark=Mark("metadata", {"event_type": "outbox", "event_payload": {"key": "{key}"}}),
        search="conversations.history of the channel with include_all_metadata=true: event_payload.key = {key}",
    ),
    stores="nothing",
    operations={
        "chat.post_message": Post("/chat.postMessage", answer=SENT),
        "chat.schedule_message": Post("/chat.scheduleMessage", answer=SENT),
        "chat.post_ephemeral": Post("/chat.postEphemeral", key=NoKey(), answer=SENT),
    },
    errors=(
        # "It's possible some aspect of the operation succeeded": the method's page.
        (Signal(200, body={"ok": False, "error": "fatal_error"}), "unknown"),
        (Signal(200, body={"ok": False, "error": "internal_error"}), "unknown"),
        (Signal(200, body={"ok": False, "error": "service_unavailable"}), "unknown"),
        (Signal(200, body={"ok": False, "error": "request_timeout"}), "deferred"),
        (Signal(200, body={"ok": False, "error": "ratelimited"}), "deferred"),
        (Signal(200, body={"ok": False, "error": "rate_limited"}), "deferred"),
        (Signal(200, body={"ok": False, "error": "not_authed"}), "deferred"),
        (Signal(200, body={"ok": False, "error": "invalid_auth"}), "deferred"),
        (Signal(200, body={"ok": False, "error": "token_expired"}), "deferred"),
        (Signal(200, body={"ok": False, "error": "token_revoked"}), "deferred"),
        (Signal(200, body={"ok": False}), "rejected"),
        (Signal(200, body={"ok": True}), "delivered"),
        (Signal(200), "unknown"),  # not Slack's answer: a proxy's
    ),
    result=("ts", "channel", "scheduled_message_id"),
    error=("error",),
    error_answer={"ok": False, "error": "an_error"},
    notes=("slack_sdk sends again by itself when a connection breaks; this adapter does not.",),
)
