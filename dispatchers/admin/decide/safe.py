"""Which decisions about an entry are safe now, and why the others are not. Pure.

By these functions the dashboard offers what is safe, and `uncertain` refuses what is not. A decision depends on the entry's state
and on the service's memory, as live dispatchers declare it.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeAlias

from sqlalchemy import Row

from dispatchers.admin.decide.rules import (
    is_unopened,
    why_not_cancel,
    why_not_release,
    why_not_resolve,
    why_not_retry,
)
from dispatchers.stored_outcome import KEY_CONFLICT, read_outcome
from dispatchers.time_limits import Memory, last_safe_send, same_key_is_safe

Decision: TypeAlias = Literal[
    "look_up", "same_key", "new_key", "happened", "did_not_happen", "retry", "cancel", "release", "again"
]

NOT_SERVED = "no live dispatcher serves this operation, so it is unknown how long the service remembers the key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One decision. why_not: None if it is safe now."""

    decision: Decision
    why_not: str | None


def offers(row: Row[Any], memory: Memory | None, now: datetime, *, is_suspended: bool) -> list[Offer]:
    """Every decision that concerns the entry's state, the safe ones with `why_not=None`.

    row: of the queue. memory: of its operation. is_suspended: whether sending is, in the whole database.
    """
    if row.suspended_reason is not None:
        found: dict[Decision, str | None] = {"release": why_not_release(row)}
    elif row.state == "uncertain":
        found = {
            "look_up": why_not_look_up(row, memory),
            "same_key": why_not_same_key(row, memory, now),
            "new_key": why_not_new_key(row, memory, now),
            "happened": why_not_resolve(row),
            "did_not_happen": why_not_resolve(row),
        }
    else:
        found = {"retry": why_not_retry(row), "cancel": why_not_cancel(row, is_suspended=is_suspended)}
        if is_unopened(row):
            found["happened"] = why_not_resolve(row, "happened")
            found["did_not_happen"] = why_not_resolve(row, "did_not_happen")
    return [Offer(decision=decision, why_not=why_not) for decision, why_not in found.items()]


def why_not_look_up(row: Row[Any], memory: Memory | None) -> str | None:
    if (why := why_not_resolve(row)) is not None:
        return why
    stored = read_outcome(row.outcome)
    if stored.known is not None:
        return f"it is decided ({stored.known.state}); a running dispatcher carries that out"
    if (stored.reason or "").startswith(KEY_CONFLICT):
        return "the service has its key for another request, and a status lookup might find that one"
    if memory is None:
        return NOT_SERVED
    if not memory.can_look_up:
        return "the adapter of this operation has no status lookup"
    if row.in_doubt_since is not None and row.sent_as not in (None, memory.form):
        return f"it was sent as {row.sent_as!r}, and would be looked up as {memory.form!r}"
    return None


def why_not_same_key(row: Row[Any], memory: Memory | None, now: datetime) -> str | None:
    if (why := why_not_resolve(row)) is not None:
        return why
    if memory is None:
        return NOT_SERVED
    if memory.window is None:
        return "the service keeps no keys: under the same key it may happen twice"
    if read_outcome(row.outcome).stored:
        return "the service has an answer on record under this key, and would only repeat it"
    last = last_safe_send(row.in_doubt_since, memory)
    if not same_key_is_safe(last, memory, now + memory.fencing_delay, stored=False):
        return "the service may have forgotten the key by then: it may happen twice"
    return None


def why_not_new_key(row: Row[Any], memory: Memory | None, now: datetime) -> str | None:
    if (why := why_not_resolve(row)) is not None:
        return why
    if memory is None:
        return NOT_SERVED
    if why_not_same_key(row, memory, now) is None:
        return "the service still remembers its key: under a new key it may happen twice"
    return None
