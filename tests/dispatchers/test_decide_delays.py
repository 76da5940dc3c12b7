"""When decide lets an entry be sent again, with every limit of a wait; and what conclude makes of what is on record."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decide import (
    DAY,
    FOREVER_KEYS,
    HOUR,
    INSTANT,
    KEYS,
    LEASED_AT,
    MARGIN,
    MINUTE,
    NO_KEYS,
    NO_KEYS_AT_LEAST_ONCE,
    NOW,
    SECOND,
    TIMEOUT,
    WINDOW,
    after,
    fresh,
    in_doubt,
    state_of,
)

from dispatchers.decide import conclude, decide, keep
from dispatchers.delivery import Deferred, Delivered, InProgress, KeyConflict, Outcome, Rejected, Unknown
from dispatchers.stored_outcome import Known
from dispatchers.time_limits import BACKOFF_FIRST, FOREVER, MAX_BACKOFF, Memory, backoff, last_safe_send
from dispatchers.transitions import ClaimedEntry, MarkUncertain, Retry, RetryCallback, SendAgain, Settle

HALF_A_SECOND = SECOND / 2  # the backoff of a first delivery with the jitter of `after`


@pytest.mark.parametrize("outcome", [Deferred, Unknown], ids=["deferred", "unknown"])
@pytest.mark.parametrize("asked", [SECOND, MINUTE, 2 * HOUR, DAY - 2 * MINUTE], ids=str)
def test_a_retry_after_is_honoured_in_full(outcome: Any, asked: timedelta) -> None:
    change = after(fresh(), outcome("busy", after=asked), FOREVER_KEYS)

    assert isinstance(change, Retry)
    assert change.delay == asked


def test_in_progress_honours_a_retry_after_too() -> None:
    change = after(fresh(), InProgress(HOUR))

    assert isinstance(change, Retry)
    assert change.delay == HOUR


def test_a_retry_after_shorter_than_the_backoff_does_not_shorten_it() -> None:
    change = after(fresh(deliveries=9), Deferred("busy", after=SECOND), jitter=0.999)

    assert isinstance(change, Retry)
    assert change.delay == backoff(9, 0.999) > SECOND


@pytest.mark.parametrize("asked", [None, timedelta(0), -SECOND, timedelta.min], ids=["none", "zero", "negative", "min"])
@pytest.mark.parametrize("outcome", [Deferred, Unknown], ids=["deferred", "unknown"])
def test_a_retry_after_that_asks_for_nothing_leaves_the_backoff(outcome: Any, asked: timedelta | None) -> None:
    change = after(fresh(), outcome("busy", after=asked))

    assert isinstance(change, Retry)
    assert change.delay == HALF_A_SECOND


@pytest.mark.parametrize("asked", [4 * DAY, timedelta.max], ids=["long", "max"])
def test_a_huge_retry_after_is_clamped_to_the_age(asked: timedelta) -> None:
    """So there is one last attempt when the age is reached, and the entry ends."""
    entry = fresh(first_leased_at=NOW - HOUR)

    change = after(entry, Deferred("busy", after=asked), KEYS)

    assert isinstance(change, Retry)
    assert change.delay == KEYS.max_age - HOUR


@pytest.mark.parametrize(
    "outcome", [Unknown("busy", after=timedelta.max), InProgress(timedelta.max)], ids=["unknown", "409"]
)
def test_a_huge_retry_after_is_clamped_to_the_window_where_doubt_begins(outcome: Outcome) -> None:
    change = after(fresh(), outcome)

    assert isinstance(change, Retry)
    last = last_safe_send(LEASED_AT, KEYS)
    assert last is not None
    assert NOW + change.delay == last - MARGIN  # a margin earlier, so that the claim still is in time


@pytest.mark.parametrize("outcome", [Deferred("busy"), InProgress(), Unknown("reset")])
def test_after_the_last_attempt_in_the_window_no_wait_is_cut_short(outcome: Outcome) -> None:
    """Else attempt would follow attempt without a pause, until the window's very end."""
    at_the_last = in_doubt(NOW - (WINDOW - TIMEOUT - MARGIN) + MARGIN)
    asking = replace(outcome, after=MARGIN)

    assert isinstance(after(at_the_last, outcome, jitter=0.5), Retry)
    assert after(at_the_last, outcome, jitter=0.5).delay == backoff(at_the_last.deliveries, 0.5)
    assert state_of(after(at_the_last, asking)) == "uncertain"


def test_deferred_in_doubt_is_clamped_to_the_window_of_that_doubt() -> None:
    first = NOW - 20 * HOUR

    change = after(in_doubt(first), Deferred("busy", after=DAY))

    assert isinstance(change, Retry)
    assert NOW + change.delay == first + WINDOW - TIMEOUT - 2 * MARGIN


def test_deferred_without_doubt_knows_no_window() -> None:
    change = after(fresh(), Deferred("busy", after=2 * WINDOW))

    assert isinstance(change, Retry)
    assert change.delay == 2 * WINDOW


def test_what_must_wait_past_the_last_margin_is_not_sent_again() -> None:
    first = NOW - (WINDOW - TIMEOUT - MARGIN) + INSTANT

    change = after(in_doubt(first), Unknown("reset", after=HOUR))

    assert isinstance(change, MarkUncertain)
    assert change.reason == "reset; the service may forget its key before another attempt"


@pytest.mark.parametrize(
    ("deliveries", "ceiling"),
    [
        (0, SECOND),
        (1, SECOND),
        (2, 2 * SECOND),
        (5, 16 * SECOND),
        (10, 512 * SECOND),
        (11, MAX_BACKOFF),
        (1_000_000, MAX_BACKOFF),
    ],
)
def test_backoff_doubles_with_each_delivery_up_to_its_cap_less_jitter(deliveries: int, ceiling: timedelta) -> None:
    assert backoff(deliveries, 0) == timedelta(0)
    assert backoff(deliveries, 0.5) == ceiling / 2
    assert 0.99 * ceiling < backoff(deliveries, 0.999) < ceiling


def test_backoff_begins_with_a_second_and_is_capped_at_ten_minutes() -> None:
    assert BACKOFF_FIRST == SECOND
    assert MAX_BACKOFF == 10 * MINUTE


@pytest.mark.parametrize("jitter", [0, 0.5, 0.999])
def test_a_retry_waits_for_the_backoff_of_its_deliveries(jitter: float) -> None:
    change = after(fresh(deliveries=7), Deferred("busy"), jitter=jitter)

    assert isinstance(change, Retry)
    assert change.delay == backoff(7, jitter)


# --- whatever comes

DURATIONS = st.sampled_from([timedelta(0), INSTANT, SECOND, MINUTE, HOUR, DAY, 4 * DAY]) | st.timedeltas(
    timedelta(0), timedelta(days=30)
)
RETRY_AFTERS = st.none() | st.timedeltas()
OUTCOMES = st.one_of(
    st.builds(Delivered),
    st.builds(Rejected, st.just("no"), conclusive=st.booleans()),
    st.builds(KeyConflict, st.just("other")),
    st.builds(Deferred, st.just("busy"), after=RETRY_AFTERS),
    st.builds(InProgress, RETRY_AFTERS),
    st.builds(Unknown, st.just("reset"), after=RETRY_AFTERS, final=st.booleans()),
)
MEMORIES = st.builds(
    Memory,
    window=st.sampled_from([None, FOREVER, HOUR, DAY]),
    at_least_once=st.booleans(),
    max_attempts=st.integers(1, 5),
    max_age=DURATIONS.filter(bool),
)


@st.composite
def entries(draw: st.DrawFn) -> ClaimedEntry:
    leased_at = NOW - draw(DURATIONS)
    since = draw(st.none() | DURATIONS.map(lambda before: leased_at - before))
    return fresh(
        first_leased_at=leased_at - draw(DURATIONS),
        leased_at=leased_at,
        deliveries=draw(st.integers(1, 99)),
        attempts=draw(st.integers(0, 6)),
        maybe_sent=since is not None,
        in_doubt_since=since,
    )


@settings(max_examples=100)
@given(entries(), OUTCOMES, MEMORIES, st.floats(0, 1, exclude_max=True))
def test_a_retry_is_due_inside_every_limit_and_doubt_never_fails(
    entry: ClaimedEntry, outcome: Outcome, memory: Memory, jitter: float
) -> None:
    change = decide(entry, outcome, memory, NOW, jitter)

    match change:
        case Retry():
            last = last_safe_send(change.in_doubt_since, memory)
            assert timedelta(0) <= change.delay <= entry.first_leased_at + memory.max_age - NOW
            assert last is None or NOW + change.delay < last
            assert change.attempts < memory.max_attempts or isinstance(outcome, Deferred)
            assert change.maybe_sent == (change.in_doubt_since is not None)
        case MarkUncertain():
            assert change.maybe_sent
            assert change.in_doubt_since is not None
        case Settle(state="failed") if entry.maybe_sent:
            assert isinstance(outcome, Rejected)
            assert outcome.conclusive
        case Settle(state="delivered"):
            assert isinstance(outcome, Delivered)


# --- conclude and keep: state transitions of an entry whose outcome is stored, and what is stored when a callback fails.


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
