"""conclude and keep: state transitions of an entry whose outcome is stored, and what is stored when a callback fails."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from support.decide import (
    DAY,
    FOREVER_KEYS,
    HOUR,
    INSTANT,
    KEYS,
    LEASED_AT,
    MARGIN,
    NO_KEYS,
    NO_KEYS_AT_LEAST_ONCE,
    NOW,
    TIMEOUT,
    WINDOW,
    after,
    fresh,
    in_doubt,
)

from dispatchers.decide import conclude, keep
from dispatchers.delivery import Delivered, KeyConflict, Rejected, Unknown
from dispatchers.stored_outcome import Known
from dispatchers.time_limits import BACKOFF_FIRST, Memory
from dispatchers.transitions import ClaimedEntry, MarkUncertain, RetryCallback, SendAgain, Settle

FENCING_DELAY = timedelta(seconds=65)


def concluded(entry: ClaimedEntry, memory: Memory = KEYS, **known: Any) -> Any:
    return conclude(entry, Known(**known), memory)


# --- ends


@pytest.mark.parametrize("state", ["delivered", "failed", "cancelled"])
@pytest.mark.parametrize("memory", [KEYS, FOREVER_KEYS, NO_KEYS, NO_KEYS_AT_LEAST_ONCE])
def test_a_known_end_is_the_end_whatever_the_service_remembers(state: Any, memory: Memory) -> None:
    past_the_window = in_doubt(NOW - 2 * DAY, attempts=3)

    end = concluded(past_the_window, memory, state=state, result={"id": 1}, reason="looked")

    assert end == Settle(state, 3, {"id": 1}, "looked", failure_blocks_group=state != "failed", decided=True)


def test_an_end_whose_callback_failed_has_the_attempts_that_it_had_then() -> None:
    crashed_in_the_callback = in_doubt(attempts=7)

    assert concluded(crashed_in_the_callback, state="delivered", attempts=2).attempts == 2


def test_uncertain_with_a_callback_due_is_uncertain_as_it_was() -> None:
    park = concluded(in_doubt(), state="uncertain", attempts=2, reason="500", stored=True)

    assert park == MarkUncertain("500", 2, True, NOW - timedelta(minutes=1), stored=True, failure_blocks_group=False)


# --- send again


@pytest.mark.parametrize("memory", [KEYS, FOREVER_KEYS])
def test_send_again_keeps_the_key_while_the_service_surely_remembers_it(memory: Memory) -> None:
    requeue = concluded(in_doubt(NOW - HOUR, key_epoch=3), memory, state="send_again", reason="looked")

    assert requeue == SendAgain(3, NOW - HOUR, FENCING_DELAY, "looked")


@pytest.mark.parametrize(
    ("entry", "memory", "stored"),
    [
        (in_doubt(NOW - DAY, key_epoch=3), KEYS, False),
        (in_doubt(NOW - HOUR, key_epoch=3), KEYS, True),
        (in_doubt(NOW - HOUR, key_epoch=3), FOREVER_KEYS, True),
        (in_doubt(NOW - HOUR, key_epoch=3), NO_KEYS, False),
        (in_doubt(NOW - HOUR, key_epoch=3), NO_KEYS_AT_LEAST_ONCE, False),
    ],
    ids=["past the window", "stored", "stored permanently", "no keys", "at least once"],
)
def test_send_again_takes_the_next_key_where_the_old_one_is_worth_nothing(
    entry: ClaimedEntry, memory: Memory, stored: bool
) -> None:
    requeue = concluded(entry, memory, state="send_again", stored=stored)

    assert requeue == SendAgain(4, None, FENCING_DELAY, "send_again")


@pytest.mark.parametrize(("earlier", "epoch"), [(timedelta(0), 1), (INSTANT, 0)])
def test_the_last_moment_for_the_same_key_counts_from_the_real_send(earlier: timedelta, epoch: int) -> None:
    sent_at = LEASED_AT + FENCING_DELAY
    doubt = sent_at - (WINDOW - TIMEOUT - MARGIN) + earlier

    assert concluded(in_doubt(doubt), state="send_again").key_epoch == epoch


def test_a_key_under_which_nothing_is_in_doubt_is_kept() -> None:
    refused_under_a_new_key = fresh(key_epoch=1, maybe_sent=True, deliveries=3)

    assert concluded(refused_under_a_new_key, state="send_again").key_epoch == 1


@pytest.mark.parametrize(("since", "allowed"), [(NOW - DAY, 3), (NOW - HOUR, 4)], ids=["same key", "new key"])
def test_a_key_that_the_operator_did_not_allow_is_not_used(since: datetime, allowed: int) -> None:
    change = concluded(in_doubt(since, key_epoch=3), state="send_again", key_epoch=allowed)

    assert isinstance(change, MarkUncertain)
    assert change.reason.endswith("; decide again")
    assert (change.in_doubt_since, change.stored, change.failure_blocks_group) == (since, False, False)


@pytest.mark.parametrize(("since", "allowed"), [(NOW - HOUR, 3), (NOW - DAY, 4)], ids=["same key", "new key"])
def test_a_key_that_the_operator_allowed_is_used_while_it_is_safe(since: datetime, allowed: int) -> None:
    assert concluded(in_doubt(since, key_epoch=3), state="send_again", key_epoch=allowed).key_epoch == allowed


# --- a later key


LATER = fresh(key_epoch=1, maybe_sent=True, deliveries=3)


@pytest.mark.parametrize("entry", [LATER, LATER._replace(in_doubt_since=NOW - HOUR)], ids=["first", "again"])
@pytest.mark.parametrize("conclusive", [False, True])
def test_a_rejection_of_a_later_key_says_nothing_of_the_earlier_ones(entry: ClaimedEntry, conclusive: bool) -> None:
    change = after(entry, Rejected("no", conclusive=conclusive))

    assert isinstance(change, MarkUncertain)
    assert (change.stored, change.in_doubt_since) == (conclusive, entry.in_doubt_since)


def test_the_doubt_about_a_later_key_begins_with_its_own_first_attempt() -> None:
    assert after(LATER, Unknown("reset")).in_doubt_since == LEASED_AT  # type: ignore[union-attr]


def test_success_under_a_later_key_is_success() -> None:
    assert after(LATER, Delivered()) == Settle("delivered", 1)


@pytest.mark.parametrize(
    ("answer", "stored"),
    [
        (KeyConflict("other"), True),
        (Unknown("500", final=True), True),
        (Rejected("no"), False),
    ],
)
def test_what_is_stored_under_the_key_is_put_down(answer: Any, stored: bool) -> None:
    change = after(in_doubt(), answer)

    assert isinstance(change, MarkUncertain)
    assert change.stored == stored


# --- keep


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (Settle("delivered", 1), "delivered, but its callback raised KeyError"),
        (Settle("failed", 1, reason="no"), "failed, but its callback raised KeyError"),
        (MarkUncertain("500", 1, True, NOW), "uncertain, but its callback raised KeyError"),
    ],
)
def test_what_is_kept_says_what_it_is_and_what_is_missing(end: Any, reason: str) -> None:
    kept = keep(fresh(), end, "its callback raised KeyError", 0.5)

    assert kept == RetryCallback(end, BACKOFF_FIRST / 2, reason)


def test_a_callback_is_tried_again_later_and_later() -> None:
    delays = [keep(fresh(deliveries=number), Settle("delivered", 1), "", 1.0).delay for number in (1, 2, 5)]

    assert delays == [BACKOFF_FIRST, 2 * BACKOFF_FIRST, 16 * BACKOFF_FIRST]
