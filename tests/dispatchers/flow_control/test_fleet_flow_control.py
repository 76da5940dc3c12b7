"""A fleet's flow control: its concurrency, rate, breaker, cooldown and pause hold over all of its databases."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.database import TABLES, Database
from support.entries import HOUR, put, states, until_true
from support.fleet import TICK, Slow, delivered, fleet, run_until, urls

import outbox
from dispatchers import Breaker, Deferred, Delivery, Limits, Outcome, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import pause, resume
from dispatchers.process.fleet_work import FleetWork
from outbox.sessions.hints import hint_at_once


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
