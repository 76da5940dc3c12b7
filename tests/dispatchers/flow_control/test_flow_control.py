"""The rules of cooldown, breaker, rate, pause and shared permits, without a database."""

import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.entries import LEASE

import outbox
from dispatchers import Breaker, Dispatcher, Limits
from dispatchers.adapters import MemoryAdapter
from dispatchers.flow_control.state import (
    MAX_COOLDOWN,
    PERMITS_WAIT,
    FlowState,
    News,
    Taken,
    admitted,
    as_record,
    claimed,
    closed_until,
    heard,
    on_record,
    opens_at,
)
from dispatchers.pipeline.destinations import Destinations
from dispatchers.pipeline.flow_monitor import FlowMonitor
from outbox.times import NEVER

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
CALM = FlowState()
PROBE, ANOTHER = UUID(int=1), UUID(int=2)
THREE = Limits(breaker=Breaker(failures=3, wait=10 * SECOND, max_wait=60 * SECOND))


def opened(limits: Limits = THREE) -> FlowState:
    return heard(CALM, News(failures=3), limits, NOW)


def on_trial(at: datetime = NOW + 10 * SECOND) -> FlowState:
    assert admitted(opened(), THREE, at, 50) == 1
    return claimed(opened(), THREE, at, 1, PROBE, LEASE)


# --- the breaker


def test_failures_in_a_row_open_the_breaker_in_any_dispatcher() -> None:
    once = heard(CALM, News(failures=2), THREE, NOW)
    twice = heard(once, News(failures=1), THREE, NOW)

    assert (once.breaker, once.breaker_failures) == ("closed", 2)
    assert (twice.breaker, twice.breaker_until) == ("open", NOW + 10 * SECOND)
    assert admitted(twice, THREE, NOW + 9 * SECOND, 50) == 0


def test_an_answer_between_them_begins_the_count_again() -> None:
    state = heard(CALM, News(failures=2), THREE, NOW)

    assert heard(state, News(answered=True), THREE, NOW) == CALM
    assert heard(state, News(answered=True, failures=2), THREE, NOW).breaker_failures == 2


def test_an_open_breaker_lets_one_entry_through_and_nothing_beside_it() -> None:
    trial = on_trial()

    assert (trial.breaker, trial.breaker_token) == ("half_open", PROBE)
    assert admitted(trial, THREE, NOW + 11 * SECOND, 50) == 0


def test_a_claim_that_found_nothing_leaves_the_trial_to_others() -> None:
    state = claimed(opened(), THREE, NOW + 10 * SECOND, 0, PROBE, LEASE)

    assert admitted(state, THREE, NOW + 10 * SECOND, 50) == 1


def test_a_probe_that_gets_through_closes_the_breaker() -> None:
    assert heard(on_trial(), News(answered=True, probe=PROBE, passed=True), THREE, NOW) == CALM


def test_each_probe_that_fails_doubles_the_wait_up_to_the_most() -> None:
    state, at, waits = opened(), NOW, []
    for _ in range(5):
        assert state.breaker_until is not None
        waits.append((state.breaker_until - at).total_seconds())
        at = state.breaker_until
        state = claimed(state, THREE, at, 1, PROBE, LEASE)
        state = heard(state, News(failures=1, probe=PROBE, passed=False), THREE, at)

    assert waits == [10, 20, 40, 60, 60]


def test_a_probe_that_was_never_sent_leaves_its_place_at_once() -> None:
    state = heard(on_trial(), News(probe=PROBE), THREE, NOW + 11 * SECOND)

    assert (state.breaker, state.breaker_failures) == ("open", 3)
    assert admitted(state, THREE, NOW + 11 * SECOND, 50) == 1


def test_a_probe_whose_lease_expired_leaves_its_place_and_counts_no_more() -> None:
    at = NOW + 10 * SECOND + LEASE
    assert admitted(on_trial(), THREE, at, 50) == 1
    second = claimed(on_trial(), THREE, at, 1, ANOTHER, LEASE)

    assert heard(second, News(answered=True, probe=PROBE, passed=True), THREE, at) == second


@pytest.mark.parametrize("news", [News(failures=100), News(answered=True)], ids=["failures", "an answer"])
def test_while_the_breaker_is_not_closed_only_its_probe_counts(news: News) -> None:
    """The other answers are to sends from before: those of a hundred permits would each double the wait."""
    assert heard(opened(), news, THREE, NOW) == opened()
    assert heard(on_trial(), news, THREE, NOW) == on_trial()


def test_without_a_breaker_nothing_opens_but_what_others_opened_is_kept_to() -> None:
    none = Limits(breaker=None)

    assert heard(CALM, News(failures=1000), none, NOW) == CALM
    assert admitted(opened(), none, NOW, 50) == 0
    assert heard(on_trial(), News(failures=1, probe=PROBE, passed=False), none, NOW).breaker == "open"


# --- cooldown and pause


def test_a_destination_that_asks_for_a_cooldown_gets_the_longer_one() -> None:
    state = heard(CALM, News(cooldown=60 * SECOND), THREE, NOW)
    state = heard(state, News(cooldown=5 * SECOND), THREE, NOW)

    assert closed_until(state, NOW) == NOW + 60 * SECOND
    assert admitted(state, THREE, NOW + 59 * SECOND, 50) == 0
    assert admitted(state, THREE, NOW + 60 * SECOND, 50) == 50


@pytest.mark.parametrize(
    ("cooldown", "until"),
    [(timedelta.max, NOW + MAX_COOLDOWN), (timedelta(days=-3), None), (timedelta.min, None), (timedelta(0), None)],
)
def test_a_huge_or_negative_quiet_is_bounded(cooldown: timedelta, until: datetime | None) -> None:
    assert closed_until(heard(CALM, News(cooldown=cooldown), THREE, NOW), NOW) == until


def test_a_probe_that_gets_a_retry_after_got_through_all_the_same() -> None:
    state = heard(on_trial(), News(cooldown=7 * SECOND, probe=PROBE, passed=True), THREE, NOW)

    assert (state.breaker, closed_until(state, NOW)) == ("closed", NOW + 7 * SECOND)


def test_a_pause_outlasts_everything() -> None:
    state = FlowState(paused=True, cooldown_until=NOW - SECOND)

    assert closed_until(state, NOW) == NEVER
    assert opens_at(state, THREE, NOW) == NEVER
    assert admitted(state, THREE, NOW + timedelta(days=365), 50) == 0


# --- the rate


@settings(deadline=None)
@given(
    rate=st.floats(0.01, 5000),
    burst=st.none() | st.integers(1, 500),
    claims=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 200)), min_size=1, max_size=40),
)
def test_no_span_of_time_sees_more_than_its_rate_and_one_burst(
    rate: float, burst: int | None, claims: list[tuple[float, int]]
) -> None:
    limits = Limits(rate=rate, burst=burst)
    most = burst or max(1, math.floor(rate))
    state, now, sent = CALM, NOW, []
    for pause, wanted in claims:
        now += timedelta(seconds=pause)
        entries = admitted(state, limits, now, wanted)
        state = claimed(state, limits, now, entries, PROBE, LEASE)
        sent.append((now, entries))
        assert 0 <= entries <= wanted

    for first in range(len(sent)):
        for last in range(first, len(sent)):
            seconds = (sent[last][0] - sent[first][0]).total_seconds()
            entries = sum(entries for _, entries in sent[first : last + 1])
            # a microsecond is the smallest step of an instant: each claim may be off by one
            assert entries <= most + rate * (seconds + 1e-6 * len(sent)) + 0.01


@given(rate=st.floats(0.5, 500), burst=st.none() | st.integers(1, 100))
def test_who_asks_when_it_is_worth_it_gets_the_whole_rate(rate: float, burst: int | None) -> None:
    limits = Limits(rate=rate, burst=burst)
    state, now, total = CALM, NOW, 0
    while now < NOW + 3 * SECOND:
        entries = admitted(state, limits, now, 10_000)
        state = claimed(state, limits, now, entries, PROBE, LEASE)
        total += entries
        at = opens_at(state, limits, now)
        assert at is not None
        assert at > now
        now = at

    expected = rate * (now - NOW).total_seconds()
    assert expected * 0.99 - 1 <= total <= expected * 1.01 + (burst or max(1, rate)) + 1


def test_a_rate_is_handed_out_in_portions_worth_a_claim() -> None:
    limits = Limits(rate=1000)
    state = claimed(CALM, limits, NOW, admitted(CALM, limits, NOW, 10_000), PROBE, LEASE)

    at = opens_at(state, limits, NOW)

    assert at == NOW + 0.1 * SECOND
    assert admitted(state, limits, at, 10_000) == 100


def test_what_was_not_claimed_is_not_used_up() -> None:
    limits = Limits(rate=10)

    state = claimed(CALM, limits, NOW, 3, PROBE, LEASE)

    assert admitted(state, limits, NOW, 50) == 7


def test_what_was_released_without_a_send_does_not_use_up_the_rate() -> None:
    limits = Limits(rate=10)
    state = claimed(CALM, limits, NOW, 10, PROBE, LEASE)

    news = News(unsent={NOW: 3}).then(News(unsent={NOW: 1}))
    assert admitted(heard(state, news, limits, NOW), limits, NOW, 50) == 4
    assert admitted(heard(state, news, limits, NOW + 2 * SECOND), limits, NOW + 2 * SECOND, 50) == 10


def test_releases_that_come_late_together_add_no_more_than_a_burst() -> None:
    """Three dispatchers stood still, each with a claim, while others used the rate."""
    limits, late, state = Limits(rate=10), NOW + 5 * SECOND, CALM
    for at in (NOW, NOW + SECOND, NOW + 2 * SECOND, late):
        assert admitted(state, limits, at, 50) == 10
        state = claimed(state, limits, at, 10, PROBE, LEASE)

    for number in range(3):
        state = heard(state, News(unsent={NOW + number * SECOND: 10}), limits, late)
        assert admitted(state, limits, late, 50) == 0


# --- news


NEWS = st.builds(
    News,
    answered=st.booleans(),
    failures=st.integers(0, 5),
    cooldown=st.none() | st.integers(0, 100).map(lambda seconds: seconds * SECOND),
)


@settings(deadline=None)
@given(st.lists(NEWS, min_size=1, max_size=6))
def test_news_at_once_make_of_a_calm_destination_what_they_make_one_by_one(reported: list[News]) -> None:
    assume(not any(news.answered and index for index, news in enumerate(reported)))  # an opened breaker would stay so
    apart, together = CALM, reported[0]
    for news in reported:
        apart = heard(apart, news, THREE, NOW)
    for news in reported[1:]:
        together = together.then(news)

    assert heard(CALM, together, THREE, NOW) == apart


def test_of_news_reported_together_the_latest_answer_counts() -> None:
    reported = News(failures=9).then(News(answered=True, failures=1)).then(News(failures=1))

    assert (reported.answered, reported.failures) == (True, 2)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(NEWS, st.floats(0, 200), st.sampled_from(["tell", "claim", "claim nothing", "end"])), max_size=30
    )
)
def test_no_history_has_two_probes_or_never_opens_again(history: list[tuple[News, float, str]]) -> None:
    state, now, probes = CALM, NOW, {}
    for number, (news, pause, move) in enumerate(history):
        now += timedelta(seconds=pause)
        if move == "tell":
            state = heard(state, news, THREE, now)
        elif move == "end" and state.breaker_token in probes:
            passed = bool(news.failures)
            state = heard(state, News(probe=state.breaker_token, passed=passed), THREE, now)
        elif move.startswith("claim") and (entries := admitted(state, THREE, now, 50)):
            under_trial = state.breaker != "closed"
            if under_trial:
                assert entries == 1
                assert all(until <= now for token, until in probes.items() if token == state.breaker_token)
                probes[UUID(int=number)] = now + LEASE
            state = claimed(state, THREE, now, 0 if move == "claim nothing" else entries, UUID(int=number), LEASE)
        assert (state.breaker == "half_open") == (state.breaker_token is not None)
        until = closed_until(state, now)
        assert until is None or now < until <= now + MAX_COOLDOWN


# --- what cannot be meant


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Limits(concurrency=0), "Limits.concurrency must be a whole number of at least 1: 0"),
        (lambda: Limits(concurrency=1.5), "Limits.concurrency must be a whole number of at least 1: 1.5"),
        (
            lambda: Limits(total_concurrency=0),
            "Limits.total_concurrency must be a whole number of at least 1: 0",
        ),
        (
            lambda: Limits(total_concurrency="3"),
            "Limits.total_concurrency must be a whole number of at least 1: '3'",
        ),
        (lambda: Limits(rate=0), "Limits.rate must be a number of sends per second, 0.0001 to 1000000: 0"),
        (lambda: Limits(rate=math.nan), "Limits.rate must be a number of sends per second, 0.0001 to 1000000: nan"),
        (lambda: Limits(rate=math.inf), "Limits.rate must be a number of sends per second, 0.0001 to 1000000: inf"),
        (lambda: Limits(rate="80/s"), "Limits.rate must be a number of sends per second, 0.0001 to 1000000: '80/s'"),
        (lambda: Limits(rate=5, burst=0), "Limits.burst must be a whole number of at least 1: 0"),
        (lambda: Limits(burst=5), "Limits.burst needs a rate: Limits(rate=..., burst=5)"),
        (lambda: Limits(breaker=10), "Limits.breaker must be a Breaker, or None for no circuit breaker: 10"),
        (lambda: Breaker(failures=True), "Breaker.failures must be a whole number of at least 1: True"),
        (
            lambda: Breaker(wait=timedelta(0)),
            "Breaker.wait must be a timedelta of more than 0 and at most a day: datetime.timedelta(0)",
        ),
        (lambda: Breaker(max_wait=5), "Breaker.max_wait must be a timedelta of more than 0 and at most a day: 5"),
        (
            lambda: Breaker(wait=timedelta(hours=1)),
            "Breaker.wait, 1:00:00, must not be longer than max_wait, 0:05:00",
        ),
    ],
)
def test_limits_that_cannot_be_meant_are_refused(make: Any, text: str) -> None:
    with pytest.raises(outbox.ConfigurationError) as refused:
        make()

    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (None, "limits must be a mapping of destinations to Limits, not None"),
        ({"crm": 5}, "the limits of 'crm' must be Limits(...), not 5"),
        ({"": Limits()}, "the keys of limits must be destinations, texts of 1 to 255 bytes: ''"),
        ({7: Limits()}, "the keys of limits must be destinations, texts of 1 to 255 bytes: 7"),
    ],
)
def test_a_dispatcher_refuses_limits_of_nothing(limits: Any, text: str) -> None:
    with pytest.raises(outbox.ConfigurationError) as refused:
        Dispatcher("sqlite://", adapters={"crm": MemoryAdapter()}, limits=limits)

    assert str(refused.value) == text


def test_a_limit_that_ends_while_others_are_asked_is_not_slept_through() -> None:
    destinations = Destinations(permits=1, permits_in_all=1)
    monitor = FlowMonitor({}, destinations, clock=lambda: 0.0, rng=random.Random(0))
    destinations.of["crm"].shut_until, destinations.of["mail"].shut_until = 5.0, 8.0

    assert monitor.opens_in(4.0, since=4.0) == 1.0
    assert monitor.opens_in(6.0, since=4.0) == 0.0
    assert monitor.opens_in(6.0, since=5.0) == 2.0
    assert monitor.opens_in(9.0, since=9.0) == math.inf


# --- The rule for the permits that dispatchers share, without a database: what a claim takes, and when it is free again.


FIRST_CLAIM, SECOND_CLAIM = UUID(int=1), UUID(int=2)
THREE_PERMITS = Limits(total_concurrency=3)


def test_what_one_claim_takes_no_other_gets_until_its_sends_have_ended() -> None:
    state = claimed(CALM, THREE_PERMITS, NOW, 2, FIRST_CLAIM, LEASE)
    assert admitted(state, THREE_PERMITS, NOW, 50) == 1
    state = claimed(state, THREE_PERMITS, NOW, 1, SECOND_CLAIM, LEASE)
    assert admitted(state, THREE_PERMITS, NOW, 50) == 0

    state = heard(state, News(left={FIRST_CLAIM: 1}), THREE_PERMITS, NOW)
    assert admitted(state, THREE_PERMITS, NOW, 50) == 1
    state = heard(state, News(left={FIRST_CLAIM: 0}), THREE_PERMITS, NOW)

    assert admitted(state, THREE_PERMITS, NOW, 50) == 2
    assert [each.token for each in state.permits_taken] == [SECOND_CLAIM]


def test_of_news_reported_together_what_is_left_last_counts() -> None:
    reported = News(left={FIRST_CLAIM: 2, SECOND_CLAIM: 1}).then(News(left={FIRST_CLAIM: 1}))

    assert reported.left == {FIRST_CLAIM: 1, SECOND_CLAIM: 1}


def test_a_smaller_limit_counts_what_was_taken_under_a_larger_one() -> None:
    state = claimed(CALM, Limits(total_concurrency=10), NOW, 10, FIRST_CLAIM, LEASE)

    assert admitted(state, THREE_PERMITS, NOW, 50) == 0
    assert admitted(heard(state, News(left={FIRST_CLAIM: 2}), THREE_PERMITS, NOW), THREE_PERMITS, NOW, 50) == 1


def test_without_a_permit_it_is_worth_asking_again_soon_but_not_at_once() -> None:
    state = claimed(CALM, THREE_PERMITS, NOW, 3, FIRST_CLAIM, LEASE)

    assert opens_at(state, THREE_PERMITS, NOW) == NOW + PERMITS_WAIT
    assert opens_at(claimed(CALM, THREE_PERMITS, NOW, 2, FIRST_CLAIM, LEASE), THREE_PERMITS, NOW) is None


def test_a_claim_gets_what_both_rate_and_permits_leave() -> None:
    both = Limits(total_concurrency=3, rate=1, burst=2)

    assert admitted(CALM, both, NOW, 50) == 2
    once = claimed(CALM, both, NOW, 2, FIRST_CLAIM, LEASE)
    assert admitted(once, both, NOW, 50) == 0
    assert opens_at(once, both, NOW) == NOW + SECOND
    assert admitted(once, both, NOW + 2 * SECOND, 50) == 1


def test_a_probe_needs_a_permit_too() -> None:
    limits = Limits(total_concurrency=3, breaker=Breaker(failures=1, wait=SECOND))
    state = heard(claimed(CALM, limits, NOW, 3, FIRST_CLAIM, LEASE), News(failures=1), limits, NOW)

    assert admitted(state, limits, NOW + 2 * SECOND, 50) == 0
    assert admitted(heard(state, News(left={FIRST_CLAIM: 1}), limits, NOW), limits, NOW + 2 * SECOND, 50) == 1


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["claim", "end", "tell", "report again", "crash"]), st.integers(0, 9), st.floats(0, 20)
        ),
        max_size=40,
    )
)
def test_no_history_sees_more_sends_at_once_than_there_are_permits(history: list[tuple[str, int, float]]) -> None:
    """`under_way`: how many sends of each claim really are, and until when its lease lasts; reported is all news so far."""
    state, now = CALM, NOW
    under_way: dict[UUID, tuple[int, datetime]] = {}
    gone: set[UUID] = set()
    reported: list[News] = []
    for number, (move, chosen, pause_seconds) in enumerate(history):
        now += timedelta(seconds=pause_seconds)
        living = [token for token, (sends, until) in under_way.items() if token not in gone and sends and until > now]
        token = living[chosen % len(living)] if living else None
        if move == "claim" and (entries := admitted(state, THREE_PERMITS, now, 1 + chosen % 3)):
            state = claimed(state, THREE_PERMITS, now, entries, UUID(int=number), LEASE)
            under_way[UUID(int=number)] = entries, now + LEASE
        elif move in ("end", "tell") and token is not None:
            under_way[token] = under_way[token][0] - 1, under_way[token][1]
            reported.append(News(left={token: under_way[token][0]}))
            if move == "tell":
                state = heard(state, reported[-1], THREE_PERMITS, now)
        elif move == "report again" and reported:
            state = heard(state, reported[chosen % len(reported)], THREE_PERMITS, now)
        elif move == "crash" and token is not None:
            gone.add(token)
        assert sum(sends for sends, until in under_way.values() if until > now) <= 3

    assert admitted(state, THREE_PERMITS, now + LEASE, 50) == 3


def test_what_is_taken_is_read_as_it_was_written() -> None:
    taken = (Taken(FIRST_CLAIM, 2, NOW), Taken(SECOND_CLAIM, 1, NOW + 0.000001 * SECOND))

    assert on_record(as_record(taken)) == taken
    assert (as_record(()), on_record(None)) == (None, ())
