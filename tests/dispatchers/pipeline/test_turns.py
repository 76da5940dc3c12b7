"""However many destinations share a budget, each one with something due is claimed for."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchers.flow_control.quota import Quota, max_callbacks, max_entries
from dispatchers.flow_control.shared import WANTING_SECONDS, SharedLimits
from dispatchers.flow_control.surveys import Share, Surveys
from dispatchers.pipeline.destinations import MAX_KNOWN, CallbackPace, Destinations
from dispatchers.pipeline.scheduler import MAX_DESTINATIONS, Scheduler, Turns
from dispatchers.stored_outcome import NOTHING_STORED, Known, StoredOutcome
from dispatchers.transitions import ClaimedEntry

BACKLOG = 10**9
BLANK = ClaimedEntry._make([None] * len(ClaimedEntry._fields))
ENTRY = BLANK._replace(queued_at=datetime(2026, 1, 1, tzinfo=UTC), outcome=NOTHING_STORED)
DECIDED = StoredOutcome(known=Known(state="cancelled"))
Order = Callable[[Sequence[Quota]], list[Quota]]


def one_by_one(quotas: Sequence[Quota]) -> list[Quota]:
    """As the claim of SQLite and MariaDB serves them."""
    return list(quotas)


def grouped(quotas: Sequence[Quota]) -> list[Quota]:
    """As the claim of PostgreSQL serves them: those with equal limits together."""
    groups: dict[tuple[bool, int], list[Quota]] = {}
    for quota in quotas:
        groups.setdefault((quota.called_back is not None, quota.permits), []).append(quota)
    return [quota for group in groups.values() for quota in group]


@dataclass
class Queue:
    """What is due of each destination. order: in which a claim serves its quotas. lasts: how many claims an entry lasts."""

    due: dict[str, int]
    order: Order
    lasts: int

    def __post_init__(self) -> None:
        self.sending: deque[list[ClaimedEntry]] = deque([[] for _ in range(self.lasts)])
        self.served: set[str] = set()

    def claim(self, quotas: Sequence[Quota]) -> list[ClaimedEntry]:
        claimed: list[ClaimedEntry] = []
        left, callbacks_left = max_entries(quotas), max_callbacks(quotas)
        for quota in self.order(quotas):
            is_called = quota.called_back is not None
            most = min(quota.permits, left, callbacks_left if is_called else left)
            brought = min(most, self.due.get(quota.destination, 0))
            left -= brought
            callbacks_left -= brought if is_called else 0
            if brought:
                self.due[quota.destination] -= brought
                self.served.add(quota.destination)
                claimed += [ENTRY._replace(id=uuid4(), destination=quota.destination)] * brought
        return claimed

    @property
    def is_done(self) -> bool:
        return not any(0 < due < BACKLOG // 2 for due in self.due.values())


def claims_until_done(scheduler: Scheduler, queue: Queue, called: set[str], most: int) -> int:
    """Claim until everything is claimed that is not a backlog; returns after how many claims, or `most` if it never is."""
    destinations, waiting = scheduler.destinations, {name for name, due in queue.due.items() if due}
    for claims in range(most):
        if queue.is_done and queue.served >= waiting:
            return claims
        quotas = scheduler.next_quotas(0)
        entries = queue.claim(quotas)
        scheduler.note_claim(quotas, entries)
        for entry in entries:
            if entry.destination in called:
                destinations.reserve_callbacks(entry.destination)
        queue.sending.append(entries)
        for entry in queue.sending.popleft():
            scheduler.destinations.release(entry)
            if entry.destination in called:
                destinations.release_callbacks(entry.destination)
    return most


def pace_of(at_once: int, seconds: float | None = None) -> CallbackPace:
    """seconds: the measured duration of a callback."""
    pace = CallbackPace(at_once, timedelta(seconds=55))
    if seconds is not None:
        pace.measure(seconds)
    return pace


@given(
    due=st.lists(st.sampled_from([0, 0, 1, 3, BACKLOG]), min_size=1, max_size=40),
    is_called=st.lists(st.booleans(), min_size=40, max_size=40),
    own=st.lists(st.sampled_from([1, 2, 20, 2000]), min_size=40, max_size=40),
    in_all=st.sampled_from([1, 3, 50, 3000]),
    seconds=st.sampled_from([0.0, 0.5, 30.0]),
    order=st.sampled_from([one_by_one, grouped]),
    lasts=st.integers(0, 3),
)
def test_whatever_is_due_is_claimed_by_so_many_claims_as_its_work_needs(
    due: list[int],
    is_called: list[bool],
    own: list[int],
    in_all: int,
    seconds: float,
    order: Order,
    lasts: int,
) -> None:
    names = [f"d{number:02}" for number in range(len(due))]
    called = {name for name, is_so in zip(names, is_called, strict=False) if is_so}
    permits_of = dict(zip(names, own, strict=False))
    scheduler = Scheduler(
        names,
        Destinations(
            permits=1, permits_in_all=in_all, permits_of=permits_of, pace=pace_of(1, seconds), called_back=called
        ),
    )
    finite = sum(count for count in due if count < BACKLOG)
    most = 10 + (lasts + 1) * 4 * (len(names) + finite)

    claims = claims_until_done(scheduler, Queue(dict(zip(names, due, strict=True)), order, lasts), called, most)

    assert claims < most


@pytest.mark.parametrize("order", [one_by_one, grouped])
@pytest.mark.parametrize("at_once", [1, 4, 1000])
@pytest.mark.parametrize("count", [1, 4, 30, 1000])
def test_one_due_entry_of_the_last_of_many_with_callbacks_is_claimed(count: int, at_once: int, order: Order) -> None:
    """With the assumed duration of a callback: nothing was measured yet, and only a claim can change that."""
    names = [f"d{number:03}" for number in range(count)]
    destinations = Destinations(permits=100, permits_in_all=1000, pace=pace_of(at_once), called_back=names)
    scheduler = Scheduler(names, destinations)
    queue = Queue({names[-1]: 1}, order, lasts=0)

    claims = claims_until_done(scheduler, queue, set(names), most=100)

    assert claims <= -(-count // MAX_DESTINATIONS)


def test_destinations_with_callbacks_get_no_more_than_the_pace_leaves() -> None:
    names = {f"d{number:02}" for number in range(30)}
    pace = pace_of(4)
    scheduler = Scheduler([*names, "crm"], Destinations(permits=100, permits_in_all=1000, pace=pace, called_back=names))

    quotas = scheduler.next_quotas(0)

    assert max_callbacks(quotas) == pace.max_entries
    assert {quota.destination for quota in quotas} == {*names, "crm"}
    assert {quota.destination for quota in scheduler.next_quotas(0)} == {"crm"}, (
        "the other claim may bring as many callbacks"
    )
    scheduler.note_claim(quotas, [])
    assert {quota.destination for quota in scheduler.next_quotas(0)} == {*names, "crm"}


def test_a_round_lasts_while_those_that_waited_for_callbacks_can_be_asked() -> None:
    pace = pace_of(1)
    destinations = Destinations(permits=10, permits_in_all=100, pace=pace, called_back={"bank"})
    scheduler = Scheduler(["bank"], destinations)
    scheduler.begin_round()
    destinations.reserve_callbacks("mail", pace.max_entries)

    assert scheduler.next_quotas(0) == []
    assert scheduler.all_asked, "nothing can be asked now"
    destinations.release_callbacks("mail", pace.max_entries)
    assert not scheduler.all_asked
    assert [quota.destination for quota in scheduler.next_quotas(0)] == ["bank"]
    assert scheduler.all_asked


def test_many_shut_destinations_do_not_keep_an_open_one_waiting() -> None:
    shut = [f"a{number}" for number in range(10 * MAX_DESTINATIONS)]
    scheduler = Scheduler([*shut, "z"], Destinations(permits=1, permits_in_all=100))
    for name in shut:
        scheduler.destinations.of[name].shut_until = 9.0

    assert [quota.destination for quota in scheduler.next_quotas(0)] == ["z"]


def test_the_destinations_of_a_failed_claim_are_asked_first() -> None:
    scheduler = Scheduler([f"d{number:03}" for number in range(150)], Destinations(permits=1, permits_in_all=1000))
    failed = scheduler.next_quotas(0)

    scheduler.release(failed)

    assert [quota.destination for quota in scheduler.next_quotas(0)] == [quota.destination for quota in failed]


def test_hints_for_one_destination_do_not_keep_the_others_waiting() -> None:
    scheduler = Scheduler(["busy", "crm"], Destinations(permits=4000, permits_in_all=500))
    queue = Queue({"busy": BACKLOG, "crm": 1}, one_by_one, lasts=0)

    for _ in range(3):
        scheduler.hint(["busy"])
        scheduler.begin_round()
        quotas = scheduler.next_quotas(0)
        entries = queue.claim(quotas)
        scheduler.note_claim(quotas, entries)
        for entry in entries:
            scheduler.destinations.release(entry)

    assert queue.served == {"busy", "crm"}


def test_hinted_destinations_are_named_in_the_order_of_their_hints() -> None:
    turns = Turns([])
    turns.hint(["m"])
    turns.hint(["z", "a"])

    assert list(turns.next(with_held=True)) == ["m", "a", "z"]


@pytest.mark.parametrize(
    ("count", "max_in_flight"), [(1, 1), (4, 1), (4, 4), (4, 30), (30, 1), (30, 4), (30, 30), (150, 30)]
)
def test_databases_that_share_a_total_serve_all_their_destinations(count: int, max_in_flight: int) -> None:
    """More destinations than the total has permits, in two databases whose claims alternate."""
    names = [f"d{number:03}" for number in range(count)]
    shared = SharedLimits(
        {}, concurrency=10, max_in_flight=max_in_flight, clock=lambda: 0.0, wake=lambda database: None
    )
    schedulers = {
        database: Scheduler(
            names,
            Destinations(
                permits=10,
                permits_in_all=max_in_flight,
                share=Share(database, shared, Surveys(), timedelta(minutes=1)),
            ),
        )
        for database in "ab"
    }
    queues = {database: Queue({names[-1]: 3}, one_by_one, lasts=0) for database in "ab"}
    most = 20 + 6 * -(-count // min(max_in_flight, MAX_DESTINATIONS))

    while most and not all(queue.is_done for queue in queues.values()):
        most -= 1
        quotas = {database: scheduler.next_quotas(0) for database, scheduler in schedulers.items()}
        for database, scheduler in schedulers.items():
            entries = queues[database].claim(quotas[database])
            scheduler.note_claim(quotas[database], entries)
            for entry in entries:
                shared.begin(database, entry.destination)
                shared.end(database, entry.destination)
                scheduler.destinations.release(entry)

    assert most


def test_what_waits_for_the_limits_of_a_fleet_is_named() -> None:
    now = 0.0
    shared = SharedLimits({}, concurrency=1, max_in_flight=10, clock=lambda: now, wake=lambda database: None)
    ours, theirs = (
        Scheduler(["crm", "mail"], Destinations(permits=10, permits_in_all=10, share=share))
        for share in (Share(each, shared, Surveys(), timedelta(minutes=1)) for each in ("ours", "theirs"))
    )
    shared.begin("theirs", "crm")

    ours.begin_round()
    ours.next_quotas(now)

    assert ours.used_up["fleet"] == ["crm"]
    assert "fleet" not in theirs.used_up
    now += WANTING_SECONDS
    assert "fleet" not in ours.used_up


def test_a_database_that_finds_the_total_used_up_is_woken_when_a_send_ends() -> None:
    woken: list[str] = []
    shared = SharedLimits({}, concurrency=10, max_in_flight=1, clock=lambda: 0.0, wake=woken.append)
    shared.begin("a", "crm")

    assert shared.take("b", "mail", 1, 0.0) == (0, None)
    assert woken == []
    shared.end("a", "crm")

    assert woken == ["b"]


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("in_all", [1, 4, 1000])
@pytest.mark.parametrize("count", [1, 4, 30, 200])
def test_each_destination_with_stored_ends_is_asked(count: int, in_all: int, is_called: bool) -> None:
    """No claim brings anything, and one sweep follows the other."""
    names = [f"d{number:03}" for number in range(count)]
    called = names if is_called else ()
    destinations = Destinations(permits=1, permits_in_all=in_all, pace=pace_of(1, 30.0), called_back=called)
    scheduler = Scheduler(["home"], destinations)
    asked: set[str] = set()

    for _ in range(2 * count):
        scheduler.learn(names, known=names)
        quotas = scheduler.next_quotas(0)
        asked |= {quota.destination for quota in quotas if quota.known}
        scheduler.note_claim(quotas, [])

    assert asked == set(names)


def brought_by(quotas: Sequence[Quota]) -> list[ClaimedEntry]:
    """Each quota is used up."""
    return [
        ENTRY._replace(destination=quota.destination, outcome=DECIDED if quota.known else NOTHING_STORED)
        for quota in quotas
        for _ in range(quota.permits)
    ]


@pytest.mark.parametrize("in_all", [1, 10, 249, 1000])
@pytest.mark.parametrize("decided", [1, 4, 30, 1000])
def test_decisions_and_sends_get_every_other_claim(decided: int, in_all: int) -> None:
    scheduler = Scheduler(["crm"], Destinations(permits=10, permits_in_all=in_all))
    scheduler.learn(["crm"], known=["crm"])
    sent, left, claims = 0, decided, 0

    while left:
        quotas = scheduler.next_quotas(0)
        brought = brought_by(quotas)
        if quotas[0].known:
            brought = brought[:left]
            left -= len(brought)
        else:
            sent += len(brought)
        scheduler.note_claim(quotas, brought)
        for entry in brought:
            scheduler.destinations.release(entry)
        claims += 1
        assert sent >= claims // 2 * min(5, in_all)

    assert claims <= 2 * -(-decided // MAX_KNOWN)


@pytest.mark.parametrize("in_all", [1, 10, 249, 1000])
def test_sends_that_hang_and_decisions_keep_no_permit_from_each_other(in_all: int) -> None:
    names = [f"d{number:04}" for number in range(in_all)]
    scheduler = Scheduler(names, Destinations(permits=1, permits_in_all=in_all))
    scheduler.learn(names, known=["d0000"])
    sending, known = 0, 0

    while quotas := scheduler.next_quotas(0):
        brought = brought_by(quotas)
        scheduler.note_claim(quotas, brought)  # no entry ends
        known += sum(entry.is_known for entry in brought)
        sending += sum(not entry.is_known for entry in brought)

    assert (sending, known) == (in_all, MAX_KNOWN)
