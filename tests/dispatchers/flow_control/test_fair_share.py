"""How a claim's permits are shared out: no scope gets more than another of equal demand, and every one has its turn."""

from collections import Counter
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st
from support.entries import quota

from dispatchers.flow_control import fair_share
from dispatchers.flow_control.fair_share import Backlog, FairCursor, Waiting, deal, max_counted, share_out
from dispatchers.transitions import DUE_FROM_SLACK
from outbox.times import EPOCH, NEVER

MANY = 1_000_000
rings = st.lists(st.integers(0, 40), min_size=1, max_size=30)


def ring(*entries: int) -> list[Waiting]:
    return [Waiting(f"{number:03}", count) for number, count in enumerate(entries)]


def backlog(*entries: int, after: str | None = None, unscoped: int = 0, permits: int) -> Backlog:
    """What a walk from `after` on finds in a ring where so many entries of each scope wait."""
    scopes = [scope for scope in ring(*entries) if scope.entries]
    following = [scope for scope in scopes if after is None or (scope.scope or "") > after]
    before = [scope for scope in scopes if scope not in following]
    del before[max(permits - len(following), 0) :]
    found = [*following[:permits], *before]
    counted = [Waiting(name, min(count, max_counted(permits, len(found)))) for name, count in found]
    split = len(following[:permits])
    return Backlog(EPOCH, sum(entries) + unscoped, unscoped, counted[:split], counted[split:])


# --- one claim


def test_a_scope_with_little_gets_all_of_it_whatever_another_has() -> None:
    assert share_out(50, backlog(10_000, 3, permits=50), None).of == {"000": 47, "001": 3}


def test_what_some_do_not_need_goes_to_the_others_in_equal_parts() -> None:
    assert share_out(50, backlog(10_000, 1, 1, 500, permits=50), None).of == {"000": 24, "001": 1, "002": 1, "003": 24}


def test_of_more_scopes_than_permits_the_next_ones_get_one_each() -> None:
    assert share_out(3, backlog(9, 9, 9, 9, 9, after="001", permits=3), "001") == (
        {"002": 1, "003": 1, "004": 1},
        "004",
    )


def test_where_a_claim_stops_the_next_one_continues() -> None:
    first = share_out(3, backlog(9, 9, permits=3), None)
    second = share_out(3, backlog(9, 9, after="000", permits=3), "000")

    assert first == ({"000": 2, "001": 1}, "000")
    assert second == ({"000": 1, "001": 2}, "001")


def test_entries_without_a_scope_are_as_one_scope_more_at_the_rings_end() -> None:
    together = share_out(30, backlog(100, 2, unscoped=31, permits=30), None)
    alone = share_out(1, backlog(100, 100, after="001", unscoped=1, permits=1), "001")
    afterwards = share_out(1, backlog(100, 100, unscoped=1, permits=1), None)

    assert together.of == {"000": 14, "001": 2}  # 14 are left for them
    assert alone == ({}, None)
    assert afterwards == ({"000": 1}, "000")


def test_a_walk_that_was_cut_short_is_continued_after_all_that_it_saw() -> None:
    seen = [Waiting("a", 3), *(Waiting(f"b{number:03}", 0) for number in range(fair_share.MAX_SCOPES - 1))]

    cut = share_out(50, Backlog(EPOCH, 51, 0, seen), None)

    assert cut == ({"a": 3}, "b498")


@given(entries=rings, permits=st.integers(1, 60))
def test_no_scope_gets_more_than_another_that_had_more(entries: list[int], permits: int) -> None:
    dealt = Counter(deal(permits, ring(*entries), MANY))

    assert sum(dealt.values()) == min(permits, sum(entries))
    for number, has in enumerate(entries):
        got = dealt[f"{number:03}"]
        assert got <= has
        assert got == has or got >= max(dealt.values()) - 1


@given(entries=rings, permits=st.integers(1, 60))
def test_to_count_no_further_than_needed_changes_no_smaller_share(entries: list[int], permits: int) -> None:
    """Only what may be many can be dealt more than there is."""
    exact = Counter(deal(permits, ring(*entries), MANY))
    many = max_counted(permits, sum(count > 0 for count in entries))
    counted = Counter(deal(permits, ring(*(min(count, many) for count in entries)), many))

    for number, has in enumerate(entries):
        scope = f"{number:03}"
        assert counted[scope] == exact[scope] if has < many else counted[scope] >= min(many - 1, exact[scope])


# --- one claim after another


@given(scopes=st.integers(1, 12), claims=st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_scopes_that_are_always_busy_get_equal_shares_in_the_long_run(scopes: int, claims: list[int]) -> None:
    got: Counter[str] = Counter({f"{number:03}": 0 for number in range(scopes)})
    after = None
    for permits in claims:
        share = share_out(permits, backlog(*[MANY] * scopes, after=after, permits=permits), after)
        got.update(share.of)
        after = share.after
        assert max(got.values()) - min(got.values()) <= 1


@given(entries=rings, permits=st.integers(1, 10), data=st.data())
def test_everybody_is_served_in_as_many_claims_as_it_takes_to_go_round(
    entries: list[int], permits: int, data: st.DataObject
) -> None:
    after = data.draw(st.sampled_from([None, *(scope.scope for scope in ring(*entries))]))
    waiting = {scope.scope for scope in ring(*entries) if scope.entries}
    claims = -(-len(waiting) // permits)

    served: set[str | None] = set()
    for _ in range(claims):
        share = share_out(permits, backlog(*entries, after=after, permits=permits), after)
        served.update(share.of)
        after = share.after

    assert served == waiting


# --- what a process remembers


def test_only_what_does_not_fit_into_the_permits_is_shared_out() -> None:
    rounds = FairCursor({"crm"})

    assert "crm" in rounds
    assert "mail" not in rounds
    assert rounds.share_out(quota(permits=50), Backlog(EPOCH, 50)) == {}
    assert rounds.after("crm") is None
    assert rounds.share_out(quota(permits=1), backlog(9, 9, permits=1)) == {"000": 1}
    assert rounds.after("crm") == "000"


def test_a_due_time_cursor_is_never_later_than_the_oldest_that_was_left() -> None:
    rounds = FairCursor({"crm"})
    at = EPOCH + timedelta(days=1)

    assert rounds.due_from(quota(due_from=NEVER)) == EPOCH  # nothing was seen yet
    rounds.share_out(quota(permits=50), Backlog(at, 1))
    assert rounds.due_from(quota(due_from=NEVER)) == at - DUE_FROM_SLACK
    rounds.share_out(quota(permits=50), Backlog(None))
    assert rounds.due_from(quota(due_from=NEVER)) == at - DUE_FROM_SLACK
    assert rounds.due_from(quota(due_from=EPOCH)) == EPOCH  # a sweep searches for all
