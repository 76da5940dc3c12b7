"""admit: which claimed entry is sent, and which is ended instead, by its window, its attempts and its doubt."""

from datetime import UTC, datetime

import pytest
from support.decide import (
    DAY,
    EVERY_SERVICE,
    EVERY_SERVICE_WITH_KEYS,
    FOREVER_KEYS,
    INSTANT,
    KEYS,
    MARGIN,
    MINUTE,
    NO_KEYS,
    NO_KEYS_AT_LEAST_ONCE,
    NOW,
    TIMEOUT,
    WINDOW,
    fresh,
    in_doubt,
)

from dispatchers.decide import admit
from dispatchers.time_limits import Memory, last_safe_send, remembered
from dispatchers.transitions import MarkUncertain, Settle


@EVERY_SERVICE
def test_what_was_never_possibly_sent_is_sent(memory: Memory) -> None:
    assert admit(fresh(), memory, NOW) is None


@EVERY_SERVICE_WITH_KEYS
def test_what_may_have_been_sent_is_sent_again_inside_the_window(memory: Memory) -> None:
    assert admit(in_doubt(), memory, NOW) is None


@pytest.mark.parametrize(
    ("since", "sent"),
    [
        (NOW - (WINDOW - TIMEOUT - MARGIN) + INSTANT, True),
        (NOW - (WINDOW - TIMEOUT - MARGIN), False),
        (NOW - WINDOW, False),
        (NOW - 99 * WINDOW, False),
    ],
    ids=["just inside", "at its end", "the window itself", "long past"],
)
def test_the_window_ends_a_timeout_and_a_margin_early(since: datetime, sent: bool) -> None:
    change = admit(in_doubt(since), KEYS, NOW)

    assert (change is None) == sent
    if change is not None:
        assert isinstance(change, MarkUncertain)
        assert (change.attempts, change.maybe_sent, change.in_doubt_since) == (1, True, since)


def test_a_window_of_forever_never_passes() -> None:
    assert admit(in_doubt(datetime(1970, 1, 1, tzinfo=UTC)), FOREVER_KEYS, NOW) is None


def test_without_doubt_there_is_no_window() -> None:
    assert admit(fresh(first_leased_at=NOW - 99 * WINDOW, leased_at=NOW - 99 * WINDOW), KEYS, NOW) is None


def test_a_crashed_sender_leaves_an_entry_without_keys_uncertain() -> None:
    change = admit(in_doubt(), NO_KEYS, NOW)

    assert isinstance(change, MarkUncertain)
    assert change == MarkUncertain(change.reason, attempts=1, maybe_sent=True, in_doubt_since=NOW - MINUTE)
    assert change.reason == "its sender crashed, and the service keeps no keys"


def test_a_crashed_sender_is_followed_by_another_under_at_least_once() -> None:
    assert admit(in_doubt(NOW - 99 * DAY), NO_KEYS_AT_LEAST_ONCE, NOW) is None


@EVERY_SERVICE
def test_expired_leases_use_up_the_allowed_attempts(memory: Memory) -> None:
    """A payload that kills its process ends too: each lease that ran out counted as an attempt."""
    change = admit(in_doubt(attempts=memory.max_attempts), memory, NOW)

    assert isinstance(change, MarkUncertain)
    assert change.attempts == memory.max_attempts


def test_sent_too_often_without_doubt_is_failed() -> None:
    """When `max_attempts` was lowered: nothing of it can have happened."""
    change = admit(fresh(attempts=3), Memory(window=WINDOW, max_attempts=3), NOW)

    assert change == Settle("failed", attempts=3, reason="no answer in 3 attempts")


# --- the window by itself


def test_the_window_allows_for_the_time_of_a_send_and_for_the_clocks() -> None:
    assert last_safe_send(NOW, KEYS) == NOW + WINDOW - TIMEOUT - MARGIN
    assert last_safe_send(NOW, FOREVER_KEYS) is None
    assert last_safe_send(NOW, NO_KEYS) is None
    assert last_safe_send(None, KEYS) is None


def test_an_answer_may_come_a_timeout_after_the_last_safe_send() -> None:
    assert remembered(NOW - (WINDOW - MARGIN) + INSTANT, KEYS, NOW)
    assert not remembered(NOW - (WINDOW - MARGIN), KEYS, NOW)
    assert remembered(datetime(1970, 1, 1, tzinfo=UTC), FOREVER_KEYS, NOW)
