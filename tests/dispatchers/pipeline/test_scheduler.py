"""Whose turn it is: permits are never given out twice, and no destination waits for another one's."""

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchers.flow_control.quota import max_entries
from dispatchers.pipeline.destinations import MAX_REMEMBERED, CallbackPace, Destinations
from dispatchers.pipeline.scheduler import MAX_BATCH_ENTRIES, MAX_DESTINATIONS, MAX_LOOKED_AT, Scheduler
from dispatchers.stored_outcome import NOTHING_STORED
from dispatchers.transitions import DUE_FROM_SLACK, ClaimedEntry
from outbox.times import EPOCH

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def claimed(destination: str, queued_at: datetime = NOW) -> ClaimedEntry:
    blank = ClaimedEntry._make([None] * len(ClaimedEntry._fields))
    return blank._replace(id=uuid4(), destination=destination, queued_at=queued_at, outcome=NOTHING_STORED)


def test_a_claim_takes_half_of_a_destinations_permits_another_the_rest() -> None:
    scheduler = Scheduler(["stripe"], Destinations(permits=10, permits_in_all=100))

    assert [(quota.destination, quota.permits) for quota in scheduler.next_quotas(0)] == [("stripe", 5)]
    assert [(quota.destination, quota.permits) for quota in scheduler.next_quotas(0)] == [("stripe", 5)]
    assert scheduler.next_quotas(0) == []


def test_a_claim_of_few_entries_has_brought_all_unless_hints_are_lost() -> None:
    scheduler = Scheduler(["stripe"], Destinations(permits=10, permits_in_all=100))

    scheduler.note_claim(scheduler.next_quotas(0), [claimed("stripe")], hints_follow=True)
    has_all = scheduler.has_all
    scheduler.begin_round()
    scheduler.note_claim(scheduler.next_quotas(0), [claimed("stripe")], hints_follow=False)
    scheduler.note_claim(scheduler.next_quotas(0), [])

    assert has_all
    assert not scheduler.has_all


@pytest.mark.parametrize("limits", [{"permits": 2, "permits_in_all": 100}, {"permits": 10, "permits_in_all": 2}])
def test_what_was_not_asked_for_want_of_permits_is_asked_after_an_outcome(limits: dict[str, int]) -> None:
    scheduler = Scheduler(["stripe"], Destinations(**limits))
    for _ in range(2):
        quotas = scheduler.next_quotas(0)
        scheduler.note_claim(quotas, [claimed("stripe")] * max_entries(quotas), hints_follow=True)

    assert scheduler.next_quotas(0) == []
    assert not scheduler.has_all

    scheduler.destinations.release(claimed("stripe"))
    scheduler.begin_round()
    scheduler.note_claim(scheduler.next_quotas(0), [], hints_follow=True)

    assert scheduler.has_all


def test_permits_that_a_claim_left_unused_are_free_again() -> None:
    scheduler = Scheduler(["stripe"], Destinations(permits=1, permits_in_all=1))

    scheduler.note_claim(scheduler.next_quotas(0), [])

    assert [quota.permits for quota in scheduler.next_quotas(0)] == [1]


def test_the_permits_of_all_destinations_together_are_limited() -> None:
    scheduler = Scheduler(["a", "b", "c"], Destinations(permits=10, permits_in_all=7))

    quotas = scheduler.next_quotas(0)

    assert max_entries(quotas) == 7
    assert scheduler.next_quotas(0) == []
    scheduler.note_claim(quotas, [])
    assert max_entries(scheduler.next_quotas(0)) == 7


def test_many_destinations_are_asked_at_once_as_each_may_have_little() -> None:
    scheduler = Scheduler([f"d{number:03}" for number in range(500)], Destinations(permits=100, permits_in_all=1000))

    of_one_loop, of_another = scheduler.next_quotas(0), scheduler.next_quotas(0)

    assert [len(of_one_loop), len(of_another)] == [MAX_DESTINATIONS, MAX_DESTINATIONS]
    assert [max_entries(of_one_loop), max_entries(of_another)] == [MAX_BATCH_ENTRIES, MAX_BATCH_ENTRIES]
    assert scheduler.next_quotas(0) == []


def test_a_destination_that_a_full_claim_did_not_reach_is_asked_first() -> None:
    scheduler = Scheduler(["a", "b", "c", "d"], Destinations(permits=10, permits_in_all=5))

    quotas = scheduler.next_quotas(0)
    scheduler.note_claim(quotas, [claimed("a")] * 5)
    for _ in range(5):
        scheduler.destinations.release(claimed("a"))

    assert [quota.destination for quota in quotas] == ["a", "b", "c", "d"]
    assert [quota.destination for quota in scheduler.next_quotas(0)] == ["b", "c", "d", "a"]


def test_what_was_passed_over_can_fill_a_claim_too() -> None:
    scheduler = Scheduler(["a", "b", "c"], Destinations(permits=10, permits_in_all=5))

    scheduler.note_claim(scheduler.next_quotas(0), [claimed("a")] * 2, passed_over=3)

    assert [quota.destination for quota in scheduler.next_quotas(0)] == ["b", "c", "a"]


def test_only_what_a_hint_has_named_is_asked_next() -> None:
    scheduler = Scheduler(["crm", "mail", "stripe"], Destinations(permits=4, permits_in_all=100))

    scheduler.hint({"mail", "new"})

    assert sorted(quota.destination for quota in scheduler.next_quotas(0)) == ["mail", "new"]
    assert scheduler.all_asked
    scheduler.begin_round()
    assert {quota.destination for quota in scheduler.next_quotas(0)} == {"crm", "mail", "new", "stripe"}


def test_a_hint_does_not_end_the_round_that_is_under_way() -> None:
    scheduler = Scheduler([f"d{number}" for number in range(120)], Destinations(permits=1, permits_in_all=1000))
    scheduler.begin_round()

    def ask() -> list[str]:
        quotas = scheduler.next_quotas(0)
        scheduler.note_claim(quotas, [])
        return [quota.destination for quota in quotas]

    asked = ask()
    scheduler.hint({"new", "d0"})
    following = ask()

    assert set(following[:2]) == {"new", "d0"}
    asked += following
    while not scheduler.all_asked:
        asked += ask()
    assert len(set(asked)) == 121


def test_a_hinted_destination_outlives_a_sweep_that_began_before() -> None:
    scheduler = Scheduler(["crm"], Destinations(permits=1, permits_in_all=1))
    crm = scheduler.next_quotas(0)
    scheduler.hint({"new"})
    assert scheduler.next_quotas(0) == []  # no permit is free

    scheduler.learn([])  # read before the hinted entry was committed
    scheduler.release(crm)

    assert "new" in {quota.destination for quota in scheduler.next_quotas(0)}


@pytest.mark.parametrize(
    ("brought", "hints_follow", "asks_again"), [(0, False, False), (1, False, True), (4, True, False), (5, True, True)]
)
def test_a_claim_is_followed_by_another_if_more_may_be_due(brought: int, hints_follow: bool, asks_again: bool) -> None:
    scheduler = Scheduler(["mail", "stripe"], Destinations(permits=20, permits_in_all=100))

    quotas = scheduler.next_quotas(0)

    assert scheduler.note_claim(quotas, [claimed("mail")] * brought, hints_follow=hints_follow) == asks_again
    assert scheduler.all_asked == (not asks_again)


def test_a_half_full_batch_of_many_destinations_is_followed_by_another() -> None:
    scheduler = Scheduler([f"d{number}" for number in range(50)], Destinations(permits=40, permits_in_all=2000))

    quotas = scheduler.next_quotas(0)
    entries = [claimed(quota.destination) for quota in quotas for _ in range(5)]

    assert scheduler.note_claim(quotas, entries, hints_follow=True)


def test_a_destination_of_others_is_left_alone_for_a_while() -> None:
    scheduler = Scheduler(["stripe"], Destinations(permits=2, permits_in_all=10))
    scheduler.learn(["mail"])

    scheduler.skip_until("mail", until=5.0)

    assert [quota.destination for quota in scheduler.next_quotas(4.9)] == ["stripe"]
    assert "mail" in [quota.destination for quota in scheduler.next_quotas(5.0)]


def test_a_destination_that_is_shut_takes_no_permit_from_the_others() -> None:
    scheduler = Scheduler(["dead", "stripe"], Destinations(permits=10, permits_in_all=10))
    scheduler.destinations.of["dead"].shut_until = 5.0

    assert [(quota.destination, quota.permits) for quota in scheduler.next_quotas(4.9)] == [("stripe", 5)]
    assert scheduler.all_asked
    quotas = scheduler.next_quotas(5.0)
    assert [(quota.destination, quota.permits) for quota in quotas] == [("dead", 5), ("stripe", 5)]
    assert max_entries(quotas) == 5


def test_each_of_hundreds_that_wait_for_callbacks_is_named() -> None:
    names = [f"d{number:03}" for number in range(500)]
    pace = CallbackPace(1, timedelta(seconds=10))
    scheduler = Scheduler(names, Destinations(permits=1, permits_in_all=1000, pace=pace, called_back=names))

    while scheduler.next_quotas(0):
        pass

    assert len(scheduler.used_up["callback_concurrency"]) > 400


def test_a_half_that_is_used_up_is_named_while_a_claim_asks_for_the_rest() -> None:
    pace = CallbackPace(1, timedelta(seconds=10))
    scheduler = Scheduler(["bank"], Destinations(permits=9, permits_in_all=9, pace=pace, called_back=["bank", "idle"]))
    quotas = scheduler.next_quotas(0)
    scheduler.destinations.reserve_callbacks("bank", max_entries(quotas))  # as a claim's entries do
    scheduler.note_claim(quotas, [claimed("bank")] * max_entries(quotas))
    assert scheduler.used_up["callback_concurrency"] == ["bank"]

    scheduler.hint(["idle"])
    scheduler.next_quotas(0)

    assert not pace.free
    assert "bank" in scheduler.used_up["callback_concurrency"]


def test_callbacks_of_entries_that_are_not_sent_use_up_the_budget_too() -> None:
    pace = CallbackPace(1, timedelta(seconds=10))
    scheduler = Scheduler(["bank"], Destinations(permits=9, permits_in_all=9, pace=pace, called_back=["bank"]))

    scheduler.destinations.reserve_callbacks("bank", pace.max_entries)

    assert scheduler.used_up == {"callback_concurrency": ["bank"]}


def test_a_claim_looks_at_some_only_of_very_many_that_are_shut() -> None:
    names = [f"d{number:05}" for number in range(3 * MAX_LOOKED_AT)]
    destinations = Destinations(permits=10, permits_in_all=10)
    scheduler = Scheduler(names, destinations)
    for name in names[1:-1]:
        destinations.of[name].shut_until = 60.0

    scheduler.begin_round()

    first, second = scheduler.next_quotas(0), scheduler.next_quotas(0)

    assert [[quota.destination for quota in quotas] for quotas in (first, second)] == [[names[0]], [names[-1]]]
    assert scheduler.all_asked


def test_a_destination_with_a_concurrency_of_its_own_has_so_many_permits() -> None:
    scheduler = Scheduler(
        ["mail", "stripe"], Destinations(permits=10, permits_in_all=100, permits_of={"mail": 1, "stripe": 30})
    )

    quotas = [(quota.destination, quota.permits) for _ in range(3) for quota in scheduler.next_quotas(0)]

    assert sorted(quotas) == [("mail", 1), ("stripe", 15), ("stripe", 15)]


def test_the_hint_follows_the_latest_due_time_with_slack_until_a_sweep() -> None:
    scheduler = Scheduler(["stripe"], Destinations(permits=4, permits_in_all=10))

    scheduler.note_claim(
        scheduler.next_quotas(0), [claimed("stripe", NOW), claimed("stripe", NOW - timedelta(hours=1))]
    )
    assert [quota.due_from for quota in scheduler.next_quotas(0)] == [NOW - DUE_FROM_SLACK]
    scheduler.learn(["stripe"])

    assert scheduler.destinations.of["stripe"].due_from == EPOCH


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60), st.integers(1, 9), st.integers(1, 20))
def test_no_history_gives_out_more_permits_than_there_are(
    moves: list[tuple[int, int]], permits: int, in_all: int
) -> None:
    scheduler = Scheduler(["a", "b", "c"], Destinations(permits=permits, permits_in_all=in_all))
    asked, under_way = [], []

    for move, number in moves:
        if move == 0:
            asked.append(scheduler.next_quotas(0))
        elif move == 1 and asked:
            quotas = asked.pop(number % len(asked))
            entries = [claimed(quota.destination) for quota in quotas for _ in range(min(quota.permits, number))]
            entries = entries[: max_entries(quotas)]
            scheduler.note_claim(quotas, entries)
            under_way += entries
        elif move == 2 and under_way:
            scheduler.destinations.release(under_way.pop(number % len(under_way)))
        taken = [quota.destination for quotas in asked for quota in quotas for _ in range(quota.permits)]
        taken += [entry.destination for entry in under_way]
        assert all(taken.count(name) <= permits for name in "abc")
        assert sum(max_entries(quotas) for quotas in asked) + len(under_way) <= in_all


def test_a_destination_without_entries_is_forgotten_unless_it_is_in_use() -> None:
    """The names come from rows, so their number needs a limit."""
    scheduler = Scheduler(["stripe"], Destinations(permits=4, permits_in_all=10))
    scheduler.learn(["gone", "sending", "shut"])
    quotas = scheduler.next_quotas(0)
    scheduler.note_claim(quotas, [claimed("sending")])
    scheduler.destinations.of["shut"].shut_until = 5.0

    scheduler.learn([])

    assert sorted(scheduler.destinations.of) == ["sending", "shut", "stripe"]
    scheduler.destinations.release(claimed("sending"))
    scheduler.learn([])
    assert sorted(scheduler.destinations.of) == ["shut", "stripe"]


def test_of_destinations_with_callbacks_not_all_are_remembered() -> None:
    """Their names come from rows: an app may name a destination after each of its customers."""
    destinations = Destinations(permits=10, permits_in_all=10)
    scheduler = Scheduler(["crm"], destinations)
    for number in range(3 * MAX_REMEMBERED):
        destinations.reserve_callbacks(f"crm_{number}")
        if number:
            destinations.release_callbacks(f"crm_{number}")

    scheduler.learn([])

    assert len(destinations.of) <= MAX_REMEMBERED + 2
    assert {"crm_0", f"crm_{3 * MAX_REMEMBERED - 1}"} <= destinations.of.keys()  # in use, and the newest


def test_a_sweep_does_not_compare_each_destination_with_all_others() -> None:
    destinations = Destinations(permits=10, permits_in_all=10)
    scheduler, compared = Scheduler(["crm"], destinations), 0

    class Name(str):
        """Counts its comparisons."""

        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return super().__eq__(other)

    names = [Name(f"stripe:acct_{number}") for number in range(2000)]
    scheduler.learn(names)
    for name in names:
        destinations.of[str(name)].due_from = NOW
    compared = 0

    scheduler.learn(names)

    assert compared < 20 * len(names)
