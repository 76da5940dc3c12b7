"""The text and the channel of a hint: shared by the apps that send hints and the dispatchers that hear them."""

import hashlib
import json
import os
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import uuid4

from sqlalchemy import text

from outbox.errors import InvalidValue
from outbox.keys import check_field

NOTIFY = text("SELECT set_config('synchronous_commit', 'off', true), pg_notify(:channel, :payload)")
"""A hint may be lost: its transaction, which writes nothing else, waits for no disk."""


def notify_sql(channel: str, payload: str) -> str:
    """`NOTIFY` without parameters, which each driver would have otherwise. payload: ASCII, as `encode` makes it."""
    quoted = payload.replace("'", "''")
    return f"SELECT set_config('synchronous_commit', 'off', true), pg_notify('{channel}', '{quoted}')"


Due = frozenset[tuple[str, str]] | None
"""What has become due: destinations and operations; None for "anything"."""

MAX_DUE = 50  # pairs in one hint
MAX_PAYLOAD_BYTES = 4000  # PostgreSQL allows 8000


class Hint(NamedTuple):
    """Entries are due. woken: the token of the dispatchers that know of it already.

    probe: set where a dispatcher asks itself whether it hears anything; it is no hint to the others.
    """

    due: Due = None
    woken: str | None = None
    probe: str | None = None


@lru_cache(maxsize=256)
def channel_of(schema: str | None, prefix: str) -> str:
    """One channel for each set of tables: other outboxes of the database are not woken."""
    return "outbox_" + hashlib.sha256(f"{schema or ''}\0{prefix}".encode()).hexdigest()[:24]


def merged(first: Due, second: Due) -> Due:
    if first is None or second is None:
        return None
    both = first | second
    return both if len(both) <= MAX_DUE else None


def encode(hint: Hint) -> str:
    due = None if hint.due is None else sorted(hint.due)
    payload = json.dumps({"due": due, "woken": hint.woken, "probe": hint.probe})
    return payload if len(payload) <= MAX_PAYLOAD_BYTES else encode(hint._replace(due=None))


def decode(payload: str) -> Hint:
    """Any role of the database can send a hint: a malformed payload counts as a hint without details."""
    try:
        message: dict[str, Any] = json.loads(payload)
        due, woken, probe = message["due"], message["woken"], message["probe"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return Hint()
    return Hint(_pairs(due), woken if isinstance(woken, str) else None, probe if isinstance(probe, str) else None)


def _pairs(due: Any) -> Due:
    if not isinstance(due, list) or len(due) > MAX_DUE:
        return None
    pairs = [tuple(pair) for pair in due if isinstance(pair, list) and len(pair) == 2]
    return frozenset([(name, operation) for name, operation in pairs if _is_named(name, operation)])


def _is_named(destination: object, operation: object) -> bool:
    """Whether an entry can have both names. A claim for other names would fail."""
    try:
        check_field("destination", destination)
        check_field("operation", operation)
    except InvalidValue:
        return False
    return True


# --- this process


class _Process:
    token = uuid4().hex


def process_token() -> str:
    """Names this process, and no other: a fork gets its own."""
    return _Process.token


def _renew() -> None:
    _Process.token = uuid4().hex


os.register_at_fork(after_in_child=_renew)
