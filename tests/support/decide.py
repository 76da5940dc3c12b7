"""Claimed entries and services, as the tests of decide and admit need them, at one fixed time."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dispatchers.decide import decide
from dispatchers.delivery import Outcome
from dispatchers.stored_outcome import NOTHING_STORED
from dispatchers.time_limits import FOREVER, Memory
from dispatchers.transitions import ClaimedEntry, MarkUncertain, Retry, Settle, Transition

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
INSTANT = timedelta(microseconds=1)

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
LEASED_AT = NOW - 2 * SECOND
WINDOW, TIMEOUT, MARGIN = DAY, 30 * SECOND, 5 * SECOND

# The four kinds of service.
KEYS = Memory(window=WINDOW, timeout=TIMEOUT, margin=MARGIN)
FOREVER_KEYS = Memory(window=FOREVER)
NO_KEYS = Memory(window=None)
NO_KEYS_AT_LEAST_ONCE = Memory(window=None, at_least_once=True)

EVERY_SERVICE = pytest.mark.parametrize(
    "memory", [KEYS, FOREVER_KEYS, NO_KEYS, NO_KEYS_AT_LEAST_ONCE], ids=["keys", "forever", "no keys", "at least once"]
)
EVERY_SERVICE_WITH_KEYS = pytest.mark.parametrize("memory", [KEYS, FOREVER_KEYS], ids=["keys", "forever"])


def fresh(**fields: Any) -> ClaimedEntry:
    """An entry under its first lease, never possibly sent before. What no rule looks at is None."""
    blank = ClaimedEntry(**dict.fromkeys(ClaimedEntry._fields))  # type: ignore[arg-type]
    given: dict[str, Any] = {
        "first_leased_at": NOW - MINUTE,
        "queued_at": NOW - MINUTE,
        "deliveries": 1,
        "attempts": 0,
        "key_epoch": 0,
        "maybe_sent": False,
        "in_doubt_since": None,
        "leased_at": LEASED_AT,
        "outcome": NOTHING_STORED,
    }
    return blank._replace(**{**given, **fields})


def in_doubt(since: datetime = NOW - MINUTE, **fields: Any) -> ClaimedEntry:
    """An entry whose earlier attempt, under the lease of `since`, has an unknown outcome."""
    return fresh(**{"deliveries": 2, "attempts": 1, "maybe_sent": True, "in_doubt_since": since, **fields})


def after(
    entry: ClaimedEntry, outcome: Outcome, memory: Memory = KEYS, now: datetime = NOW, jitter: float = 0.5
) -> Transition:
    return decide(entry, outcome, memory, now, jitter)


def state_of(change: Transition) -> str:
    match change:
        case Settle(state=state):
            return state
        case Retry():
            return "retry"
        case MarkUncertain():
            return "uncertain"
    raise AssertionError(f"decide never answers with {change}")
