"""When decide lets an entry be sent again: Retry-After, backoff, and every limit that cuts them short."""

from dataclasses import replace
from datetime import timedelta
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
    NOW,
    SECOND,
    TIMEOUT,
    WINDOW,
    after,
    fresh,
    in_doubt,
    state_of,
)

from dispatchers.decide import decide
from dispatchers.delivery import Deferred, Delivered, InProgress, KeyConflict, Outcome, Rejected, Unknown
from dispatchers.time_limits import BACKOFF_FIRST, FOREVER, MAX_BACKOFF, Memory, backoff, last_safe_send
from dispatchers.transitions import ClaimedEntry, MarkUncertain, Retry, Settle

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
