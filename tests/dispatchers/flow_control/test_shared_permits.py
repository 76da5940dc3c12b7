"""The rule for the permits that dispatchers share, without a database: what a claim takes, and when it is free again."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st
from support.entries import LEASE

from dispatchers import Breaker, Limits
from dispatchers.flow_control.state import (
    PERMITS_WAIT,
    FlowState,
    News,
    Taken,
    admitted,
    as_record,
    claimed,
    heard,
    on_record,
    opens_at,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
FIRST, SECOND_ONE = UUID(int=1), UUID(int=2)
CALM = FlowState()
THREE = Limits(total_concurrency=3)


def test_what_one_claim_takes_no_other_gets_until_its_sends_have_ended() -> None:
    state = claimed(CALM, THREE, NOW, 2, FIRST, LEASE)
    assert admitted(state, THREE, NOW, 50) == 1
    state = claimed(state, THREE, NOW, 1, SECOND_ONE, LEASE)
    assert admitted(state, THREE, NOW, 50) == 0

    state = heard(state, News(left={FIRST: 1}), THREE, NOW)
    assert admitted(state, THREE, NOW, 50) == 1
    state = heard(state, News(left={FIRST: 0}), THREE, NOW)

    assert admitted(state, THREE, NOW, 50) == 2
    assert [each.token for each in state.permits_taken] == [SECOND_ONE]


def test_of_news_reported_together_what_is_left_last_counts() -> None:
    reported = News(left={FIRST: 2, SECOND_ONE: 1}).then(News(left={FIRST: 1}))

    assert reported.left == {FIRST: 1, SECOND_ONE: 1}


def test_a_smaller_limit_counts_what_was_taken_under_a_larger_one() -> None:
    state = claimed(CALM, Limits(total_concurrency=10), NOW, 10, FIRST, LEASE)

    assert admitted(state, THREE, NOW, 50) == 0
    assert admitted(heard(state, News(left={FIRST: 2}), THREE, NOW), THREE, NOW, 50) == 1


def test_without_a_permit_it_is_worth_asking_again_soon_but_not_at_once() -> None:
    state = claimed(CALM, THREE, NOW, 3, FIRST, LEASE)

    assert opens_at(state, THREE, NOW) == NOW + PERMITS_WAIT
    assert opens_at(claimed(CALM, THREE, NOW, 2, FIRST, LEASE), THREE, NOW) is None


def test_a_claim_gets_what_both_rate_and_permits_leave() -> None:
    both = Limits(total_concurrency=3, rate=1, burst=2)

    assert admitted(CALM, both, NOW, 50) == 2
    once = claimed(CALM, both, NOW, 2, FIRST, LEASE)
    assert admitted(once, both, NOW, 50) == 0
    assert opens_at(once, both, NOW) == NOW + SECOND
    assert admitted(once, both, NOW + 2 * SECOND, 50) == 1


def test_a_probe_needs_a_permit_too() -> None:
    limits = Limits(total_concurrency=3, breaker=Breaker(failures=1, wait=SECOND))
    state = heard(claimed(CALM, limits, NOW, 3, FIRST, LEASE), News(failures=1), limits, NOW)

    assert admitted(state, limits, NOW + 2 * SECOND, 50) == 0
    assert admitted(heard(state, News(left={FIRST: 1}), limits, NOW), limits, NOW + 2 * SECOND, 50) == 1


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
        if move == "claim" and (entries := admitted(state, THREE, now, 1 + chosen % 3)):
            state = claimed(state, THREE, now, entries, UUID(int=number), LEASE)
            under_way[UUID(int=number)] = entries, now + LEASE
        elif move in ("end", "tell") and token is not None:
            under_way[token] = under_way[token][0] - 1, under_way[token][1]
            reported.append(News(left={token: under_way[token][0]}))
            if move == "tell":
                state = heard(state, reported[-1], THREE, now)
        elif move == "report again" and reported:
            state = heard(state, reported[chosen % len(reported)], THREE, now)
        elif move == "crash" and token is not None:
            gone.add(token)
        assert sum(sends for sends, until in under_way.values() if until > now) <= 3

    assert admitted(state, THREE, now + LEASE, 50) == 3


def test_what_is_taken_is_read_as_it_was_written() -> None:
    taken = (Taken(FIRST, 2, NOW), Taken(SECOND_ONE, 1, NOW + 0.000001 * SECOND))

    assert on_record(as_record(taken)) == taken
    assert (as_record(()), on_record(None)) == (None, ())
