"""The limits that several databases of one process share: they hold over all, and each database gets its part."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.database import TABLES, Database
from support.entries import HOUR, put, states, until_true
from support.fleet import TICK, Slow, delivered, fleet, run_until, urls

import outbox
from dispatchers import Breaker, Deferred, Delivery, Limits, Outcome, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import pause, resume
from dispatchers.flow_control.shared import RESERVED_SECONDS, WANTING_SECONDS, SharedLimits, fair_share
from dispatchers.flow_control.state import FlowState, FlowStates, News
from dispatchers.flow_control.surveys import Share, Survey, Surveys
from dispatchers.process.fleet_work import FleetWork
from outbox.sessions.hints import hint_at_once

LEASE = timedelta(minutes=1)


class Databases:
    """Databases that ask, and a clock that the test moves."""

    def __init__(self, limits: Limits | None = None, *, concurrency: int = 10, max_in_flight: int = 1000) -> None:
        self.now = 1000.0
        self.woken: Counter[str] = Counter()
        limits_of = {} if limits is None else {"crm": limits}
        self.shared = SharedLimits(
            limits_of,
            concurrency=concurrency,
            max_in_flight=max_in_flight,
            clock=lambda: self.now,
            wake=lambda database: self.woken.update([database]),
        )

    def ask(self, database: str, wanted: int, found: int | None = None) -> int:
        """Claim, find so many entries of what was admitted (by default all), and begin to send them; returns how many."""
        admitted, _ = self.shared.take(database, "crm", wanted, self.now)
        sent = admitted if found is None else min(found, admitted)
        if admitted:
            self.shared.end_claim(database, "crm", admitted, [uuid4()] * sent, LEASE)
        for _ in range(sent):
            self.shared.begin(database, "crm")
        return sent

    def end(self, database: str, sends: int = 1) -> None:
        for _ in range(sends):
            self.shared.end(database, "crm")

    def met(self, *databases: str) -> "Databases":
        """Let each of them bring one entry, so that it asks for more than one."""
        for database in databases:
            assert self.ask(database, 1) == 1
            self.end(database)
        return self


@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 20), st.booleans()), max_size=60),
)
def test_never_more_is_sent_than_the_permits_allow(permits: int, steps: list[tuple[str, int, bool]]) -> None:
    databases, sending = Databases(concurrency=permits), Counter[str]()
    for database, number, is_claim in steps:
        databases.now += 0.3
        if is_claim:
            sending[database] += databases.ask(database, number + 1)
        else:
            ended = min(number, sending[database])
            databases.end(database, ended)
            sending[database] -= ended

        assert sending.total() <= permits


@given(st.integers(1, 100), st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_those_who_want_more_come_to_hold_the_same(permits: int, wants: list[int]) -> None:
    """Maximin: the permits are used up, and no database with fewer than another lacks one that it wants."""
    names = [str(number) for number in range(len(wants))]
    held: Counter[str] = Counter()
    for _ in range(3 * len(names)):
        for name, want in zip(names, wants, strict=True):
            wanting = [each for each, its in zip(names, wants, strict=True) if held[each] < its or each == name]
            free = permits - held.total()
            held[name] += fair_share(name, want - held[name], free, held, wanting)

    assert held.total() == min(permits, sum(wants))
    for name, want in zip(names, wants, strict=True):
        assert held[name] == want or all(held[name] >= held[other] - 1 for other in names)


def test_the_only_permit_goes_to_the_databases_in_turn() -> None:
    databases = Databases(concurrency=1).met("a", "b", "c")
    sent = [name for _ in range(4) for name in "abc" if databases.ask(name, 5) and not databases.end(name)]
    assert Counter(sent).keys() == {"a", "b", "c"}

    turns: list[str] = []
    for name in "abc":  # now all three want the permit, and the first asks first each time
        databases.ask(name, 5)
    for _ in range(9):
        holder = next(name for name in "abc" if databases.shared._known("crm").permits.sending[name])
        databases.end(holder)
        turns += [name for name in "abc" if databases.ask(name, 5)]

    assert Counter(turns) == {"a": 3, "b": 3, "c": 3}


def test_a_refused_database_is_woken_when_a_permit_is_free() -> None:
    databases = Databases(concurrency=2).met("a", "b")
    assert databases.ask("a", 2) == 2
    assert databases.ask("b", 2) == 0

    databases.end("a")

    assert databases.woken["b"] == 1


def test_an_idle_database_asks_for_one_entry_only() -> None:
    databases = Databases(concurrency=10)

    admitted, _ = databases.shared.take("idle", "crm", 10, databases.now)

    assert admitted == 1


def test_a_claim_that_hangs_soon_holds_no_permit() -> None:
    databases = Databases(concurrency=2).met("a", "hangs")
    assert databases.shared.take("hangs", "crm", 2, databases.now) == (2, None)
    assert databases.ask("a", 2) == 0

    databases.now += max(RESERVED_SECONDS, WANTING_SECONDS) + 0.1

    assert databases.ask("a", 2) == 2
    assert not databases.shared.is_free("crm")  # for the entries of the late claim, which wait


def test_the_databases_get_equal_parts_of_a_rate() -> None:
    databases = Databases(Limits(rate=100, burst=10), concurrency=1000).met("a", "b")
    sent: Counter[str] = Counter()
    for _ in range(400):
        databases.now += 0.05
        for name in "ab":  # the first asks first each time
            sent[name] += (number := databases.ask(name, 50))
            databases.end(name, number)

    assert sent.total() <= 100 * 400 * 0.05 + 10
    assert sent.total() >= 100 * 400 * 0.05 - 10
    assert abs(sent["a"] - sent["b"]) <= 20


def test_a_claim_that_finds_less_gives_its_part_of_the_rate_back() -> None:
    databases = Databases(Limits(rate=1, burst=10), concurrency=1000).met("a", "b")  # two of ten are used

    assert databases.ask("a", 8, found=3) == 3
    assert databases.ask("b", 8) == 5


def test_one_probe_at_a_time_goes_through_a_breaker() -> None:
    limits = Limits(breaker=Breaker(failures=2, wait=timedelta(seconds=5)))
    databases = Databases(limits).met("a", "b")
    for _ in range(2):
        databases.shared.hear("crm", News(failures=1), uuid4())
    assert databases.ask("a", 5) == 0
    databases.now += 5

    admitted, _ = databases.shared.take("a", "crm", 5, databases.now)
    assert admitted == 1
    assert databases.ask("b", 5) == 0
    databases.shared.end_claim("a", "crm", 1, [], LEASE)  # there was no entry
    admitted, _ = databases.shared.take("b", "crm", 5, databases.now)
    assert admitted == 1
    probe = uuid4()
    databases.shared.end_claim("b", "crm", 1, [probe], LEASE)
    assert databases.ask("a", 5) == 0
    databases.shared.hear("crm", News(answered=True), uuid4())  # an earlier send
    assert databases.ask("a", 5) == 0
    databases.shared.hear("crm", News(answered=True), probe)

    assert databases.ask("a", 5) >= 1


def test_what_waits_for_a_permit_is_not_sent_while_the_breaker_is_open() -> None:
    databases = Databases(Limits(breaker=Breaker(failures=1)))
    assert databases.shared.may_follow("a", "crm")

    databases.shared.hear("crm", News(failures=1), uuid4())

    assert not databases.shared.may_follow("a", "crm")


def test_destinations_without_news_are_forgotten() -> None:
    databases = Databases()
    for number in range(5000):
        databases.shared.begin("a", f"stripe:{number}")
        databases.shared.end("a", f"stripe:{number}")

    assert len(databases.shared._destinations) <= 1000


# --- what a database's rows say of the others


@pytest.mark.parametrize("apart", [timedelta(hours=5), -timedelta(hours=5)], ids=["5 h ahead", "5 h slow"])
def test_another_databases_instants_are_read_by_its_own_clock(apart: timedelta) -> None:
    """The end of a pause starts the age limit of all entries that waited, so it may not lie hours away."""
    now, minute = datetime(2026, 1, 31, 12, tzinfo=UTC), timedelta(minutes=1)
    theirs = FlowState(cooldown_until=now + apart + minute, resumed_at=now + apart - minute)
    surveys = Surveys()
    surveys.learn("apart", Survey(FlowStates(now + apart, {"crm": theirs}), read_at=100.0))

    seen = surveys.over_all("right", "crm", FlowState(), at=now, now=100.0)

    assert (seen.cooldown_until, seen.resumed_at) == (now + minute, now - minute)


def test_a_pause_holds_while_its_database_is_refused() -> None:
    """It is served by one dispatcher after another, and an operator has not resumed."""
    at, surveys = datetime(2026, 1, 31, 12, tzinfo=UTC), Surveys()
    share = Share("refused", Databases().shared, surveys, LEASE)
    surveys.learn("refused", Survey(FlowStates(at, {"crm": FlowState(paused=True)}), read_at=100.0))

    share.detach()
    assert surveys.over_all("right", "crm", FlowState(), at=at, now=100.0).paused

    share.forget()
    assert not surveys.over_all("right", "crm", FlowState(), at=at, now=100.0).paused


def test_the_cooldown_of_a_database_that_went_silent_ends_in_time() -> None:
    """Its last survey gets older with each survey of the others."""
    begin, hour = datetime(2026, 1, 31, 12, tzinfo=UTC), timedelta(hours=1)
    surveys = Surveys()
    theirs = FlowState(cooldown_until=begin + timedelta(minutes=1), resumed_at=begin)
    surveys.learn("silent", Survey(FlowStates(begin, {"crm": theirs}), read_at=100.0))

    seen = surveys.over_all("right", "crm", FlowState(), at=begin + hour, now=100.0 + hour.total_seconds())

    assert (seen.cooldown_until, seen.resumed_at) == (begin + timedelta(minutes=1), begin)


def test_a_pause_refreshes_only_its_destination_in_the_other_databases() -> None:
    """With all destinations again, the pauses of thirty databases with a thousand destinations blocked the loop for minutes."""
    at, surveys = datetime(2026, 1, 31, 12, tzinfo=UTC), Surveys()
    refreshed: list[tuple[str, Collection[str]]] = []
    for each in ("left", "right"):
        surveys.join(each, lambda names, each=each: refreshed.append((each, names)))  # type: ignore[misc]
    rows = {f"stripe:{number}": FlowState(cooldown_until=at + timedelta(hours=1)) for number in range(1000)}
    surveys.learn("left", Survey(FlowStates(at, rows), read_at=100.0))

    paused = {**rows, "stripe:7": FlowState(paused=True)}
    for each in ("left", "right"):  # the second one changes nothing for the first one
        surveys.learn(each, Survey(FlowStates(at, paused), read_at=101.0))

    assert refreshed == [("right", {"stripe:7"})]


def test_what_a_database_has_forgotten_costs_the_others_nothing() -> None:
    at, surveys = datetime(2026, 1, 31, 12, tzinfo=UTC), Surveys()
    rows = {f"stripe:{number}": FlowState(cooldown_until=at + timedelta(hours=1)) for number in range(1000)}
    surveys.learn("left", Survey(FlowStates(at, rows), read_at=100.0))
    assert len(surveys.with_all(FlowStates(at, {})).of) == 1000

    surveys.learn("left", Survey(FlowStates(at, {}), read_at=101.0))

    assert surveys.with_all(FlowStates(at, {})).of == {}


# --- A fleet's flow control: its concurrency, rate, breaker, cooldown and pause hold over all of its databases.


@pytest.fixture
def databases(copies: Any) -> Iterator[list[Database]]:
    taken = [copies.take() for _ in range(3)]
    yield taken
    for each in taken:
        copies.give_back(each)


@pytest.mark.parametrize(
    "limits", [{"concurrency": 4}, {"limits": {"crm": Limits(total_concurrency=4)}}, {"max_in_flight": 4}]
)
def test_the_concurrency_holds_over_all_databases(
    databases: list[Database], ob: outbox.Outbox, limits: dict[str, Any]
) -> None:
    for each in databases:
        put(each, ob, count=10)
    service = Slow(0.1)  # longer than the claims take, so that as many as may be are under way

    run_until(fleet(urls(databases), ob, service, **limits), delivered(databases, 10))

    assert service.most == 4
    assert len(service.deliveries) == 30


@pytest.mark.parametrize(
    "limits", [{"concurrency": 1}, {"concurrency": 4}, {"limits": {"crm": Limits(rate=100, burst=1)}}]
)
def test_a_long_queue_leaves_the_other_databases_their_share(
    databases: list[Database], ob: outbox.Outbox, limits: dict[str, Any]
) -> None:
    for each, count in zip(databases, (300, 20, 20), strict=True):
        put(each, ob, count=count)
    service = Slow()

    run_until(fleet(urls(databases), ob, service, **limits), delivered(databases[1:], 20))

    assert states(databases[0])["delivered"] < 150  # of 300; an equal share is 20, and claims ahead come to it


def until_all_have_asked_again(databases: list[Database], ob: outbox.Outbox, mail: MemoryAdapter) -> Callable[[], bool]:
    """Whether a later entry of each database was sent to another destination: then all have claimed since."""
    for each in databases:
        put(each, ob, "mail.send")
    return lambda: len(mail.deliveries) == len(databases)


def test_failures_in_several_databases_open_one_breaker(databases: list[Database], ob: outbox.Outbox) -> None:
    for each in databases:
        put(each, ob, count=20)
    sends: list[Delivery] = []

    class Broken(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            sends.append(delivery)
            return Unknown("no answer")

    async def then() -> None:
        await until_true(lambda: len(sends) >= 6)
        await until_true(until_all_have_asked_again(databases, ob, mail))

    mail = MemoryAdapter()
    limits = {"crm": Limits(concurrency=2, breaker=Breaker(failures=6, wait=HOUR, max_wait=HOUR))}
    working = FleetWork(urls(databases), adapters={"crm": Broken(), "mail": mail}, outbox=ob, poll=TICK, limits=limits)
    run_until(working, lambda: True, then)

    assert 6 <= len(sends) <= 7  # one may have been in flight


def test_a_cooldown_that_one_database_meets_holds_for_all(databases: list[Database], ob: outbox.Outbox) -> None:
    put(databases[0], ob)
    calls: list[Delivery] = []

    class Busy(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            calls.append(delivery)
            return Deferred("busy", after=HOUR, cooldown=True)

    async def then() -> None:
        await until_true(lambda: calls)
        for each in databases:
            put(each, ob, count=5)
        await until_true(until_all_have_asked_again(databases, ob, mail))

    mail = MemoryAdapter()
    working = FleetWork(urls(databases), adapters={"crm": Busy(), "mail": mail}, outbox=ob, poll=TICK)
    run_until(working, lambda: True, then)

    assert len(calls) == 1


def test_a_pause_in_one_database_holds_for_all(
    databases: list[Database], ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def decide(decision: Callable[..., object]) -> None:
        with databases[1].engine.begin() as connection:
            decision(connection, TABLES, "crm", actor="ada", reason="a test")
        hint_at_once(databases[1].engine, None, "outbox_")

    async def pause_and_resume() -> None:
        await until_true(lambda: all(each.rows(TABLES.dispatcher) for each in databases))
        decide(pause)
        await until_true(lambda: caplog.text.count("'crm' paused by an operator") == 3)
        for each in databases:
            put(each, ob, count=5)
        decide(resume)
        await until_true(lambda: caplog.text.count("'crm' resumed") == 3)

    class Logging(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            logging.info("sent crm")
            return await super().send(delivery)

    run_until(fleet(urls(databases), ob, Logging()), delivered(databases, 5), pause_and_resume)

    assert caplog.text.index("'crm' resumed") < caplog.text.index("sent crm")
