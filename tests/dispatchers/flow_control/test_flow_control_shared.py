"""A throttled destination is throttled in all dispatchers, through the database, and costs the others nothing.

Each dispatcher here has connections of its own, as a process would.
"""

import asyncio
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from threading import Barrier
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database, statements_of
from support.entries import (
    HOUR,
    age,
    change,
    claim_request,
    dispatcher,
    pumping,
    put,
    put_one,
    queue_row,
    quota,
    run_once,
    state,
    states,
    until_true,
)
from support.flow_control import (
    DAY,
    FRAGILE,
    LASTING,
    MINUTE,
    ONE_AT_A_TIME,
    Crm,
    crm_row,
    decide,
    news,
    untouched,
    work,
)
from support.late_answers import begun_and_held
from support.lookups import awaiting_lookup

import outbox
from dispatchers import Absent, Breaker, CannotTell, Deferred, Delivered, Limits, Operations, Outcome, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import pause, resume
from dispatchers.delivery import Finding
from dispatchers.flow_control.state import News
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Survey
from outbox.sql.clock import clock_plus
from outbox.times import NEVER

pytestmark = pytest.mark.on_mariadb

# --- cooldown


@pytest.mark.parametrize(
    "answer",
    [Deferred("HTTP 429", after=HOUR, cooldown=True), Unknown("HTTP 503", after=HOUR, cooldown=True)],
    ids=["429 with Retry-After", "503 with Retry-After"],
)
def test_one_answer_that_asks_for_quiet_stops_the_whole_fleet(
    database: Database, ob: outbox.Outbox, answer: Outcome
) -> None:
    put(database, ob, count=10)
    crm = Crm(answer)

    assert work(database, ob, crm, limits=ONE_AT_A_TIME) == 1
    assert [work(database, ob, crm) for _ in range(3)] == [0, 0, 0]

    assert len(untouched(database)) == 9
    crm.answer = Delivered()
    age(database, 30 * MINUTE)
    assert work(database, ob, crm) == 0
    age(database, 31 * MINUTE)
    assert work(database, ob, crm) == 10


def test_an_answer_about_one_entry_holds_back_no_other(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=5)
    crm = MemoryAdapter([Deferred("not before tomorrow", after=DAY)])

    work(database, ob, crm, limits=ONE_AT_A_TIME)

    assert states(database) == {"delivered": 4, "retry": 1}


def test_quiet_without_a_time_is_short_and_counts_as_a_failure(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=5)

    sent = work(database, ob, Crm(Deferred("HTTP 401", cooldown=True)), limits=ONE_AT_A_TIME)

    row = crm_row(database)
    assert (row.breaker, row.breaker_failures) == ("closed", sent)
    assert row.cooldown_until > row.changed_at
    assert row.cooldown_until <= row.changed_at + timedelta(seconds=1)


# --- the rate


def test_all_dispatchers_together_keep_to_a_rate(database: Database, ob: outbox.Outbox) -> None:
    limits = {"crm": Limits(rate=0.001, burst=5)}
    put(database, ob, count=20)
    crm = Crm(Delivered())

    assert sum(work(database, ob, crm, limits=limits) for _ in range(3)) == 5
    age(database, timedelta(seconds=3100))
    assert sum(work(database, ob, crm, limits=limits) for _ in range(3)) == 3

    assert len(untouched(database)) == 12
    assert crm_row(database).rate_per_second == 0.001


@pytest.mark.every_value
@pytest.mark.parametrize(
    ("limits", "claimed"),
    [
        (Limits(rate=0.001, burst=7), 7),
        (Limits(total_concurrency=7), 7),
        (Limits(breaker=Breaker(failures=3, wait=HOUR, max_wait=DAY)), 1),
    ],
    ids=["rate", "permits", "probe"],
)
def test_dispatchers_that_claim_at_once_keep_to_a_limit_too(
    database: Database, ob: outbox.Outbox, limits: Limits, claimed: int
) -> None:
    flow_update = news({}, decided=frozenset({"crm"}), limits={"crm": limits})
    put(database, ob, count=30)
    if limits.rate is None and limits.total_concurrency is None:
        work(database, ob, Crm(Unknown("HTTP 500")), limits={"crm": replace(limits, concurrency=1)})
        age(database, 2 * HOUR)
    stores = [DatabaseStore(database.new_engine(), ob.configuration) for _ in range(4)]
    barrier = Barrier(len(stores))

    def claim_until_none(store: DatabaseStore) -> int:
        asyncio.run(store.survey())
        barrier.wait()
        requests = (claim_request(quota(permits=4), flow_update=flow_update, token=uuid4()) for _ in range(6))
        return sum(len(asyncio.run(store.exchange([], request)).claimed) for request in requests)

    with ThreadPoolExecutor(len(stores)) as threads:
        counts = list(threads.map(claim_until_none, stores))

    assert sum(counts) == claimed


def test_a_dispatcher_resumes_when_its_rate_allows_without_its_poll(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=6)
    crm = Crm(Delivered())
    working = dispatcher(
        database, ob, adapters={"crm": crm}, limits={"crm": Limits(rate=50, burst=1)}, poll=timedelta(hours=1)
    )

    asyncio.run(pumping(working, lambda: len(crm.deliveries) == 6))

    assert states(database) == {"delivered": 6}


# --- whom it costs nothing


def test_a_dead_destination_takes_few_failures_then_no_permit_or_statement(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    dead, mail = Crm(Unknown("timeout")), MemoryAdapter()
    working: Any = {"adapters": {"crm": dead, "mail": mail}, "limits": {"crm": Limits(breaker=LASTING)}}
    put(postgresql, ob, count=1000)
    run_once(postgresql, ob, **working)
    before = len(dead.deliveries)
    put(postgresql, ob, "mail.send", count=50)
    engine = postgresql.new_engine()

    with statements_of(engine) as sent:
        assert run_once(engine, ob, **working, concurrency=60, max_in_flight=60) == 50

    assert before < 200  # what was under way when the breaker opened
    assert len(dead.deliveries) == before
    about = [
        statement
        for statement in sent
        if statement.startswith(("SELECT outbox_d", "UPDATE outbox_d", "INSERT INTO outbox_d"))
    ]
    assert len(about) == 1  # the sweep


def test_a_process_stopped_with_a_destinations_row_locked_stops_no_other(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    limits = {"crm": Limits(rate=1000)}
    put(postgresql, ob, count=3)
    put(postgresql, ob, "mail.send", count=3)
    crm, mail = Crm(Unknown("HTTP 500")), MemoryAdapter()
    decide(postgresql, pause)
    decide(postgresql, resume)  # now there is a row
    working = {"adapters": {"crm": crm, "mail": mail}}

    with postgresql.engine.connect() as stopped:
        row = sa.select(TABLES.destination).where(TABLES.destination.c.name == "crm").with_for_update()
        assert len(stopped.execute(row).all()) == 1
        run_once(postgresql.new_engine(), ob, **working, limits=limits)
        assert (len(crm.deliveries), len(mail.deliveries)) == (0, 3)
        run_once(postgresql.new_engine(), ob, **working)  # it has no rate to share, and fails to report what it met
        assert len(crm.deliveries) == 3

    assert crm_row(postgresql).breaker_failures == 0


# --- what is reported of it


def test_the_log_says_what_stops_a_destination_and_when_it_resumes(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "outbox.dispatcher")
    put(database, ob, count=6)
    crm = Crm(Unknown("HTTP 500"))

    async def main() -> None:
        working = dispatcher(database.new_engine(), ob, adapters={"crm": crm}, limits=FRAGILE)
        await working.run_once()
        decide(database, resume)
        await working._loops.sweep()
        crm.answer = Deferred("HTTP 429", after=HOUR, cooldown=True)
        age(database, MINUTE)
        await working.run_once()
        decide(database, pause)
        for _ in range(3):
            await working._loops.sweep()
        await working.close()

    asyncio.run(main())

    said = [record.getMessage() for record in caplog.records if "destination" in record.getMessage()]
    assert [re.sub(r"until \d\d:\d\d:\d\dZ", "until 12:05:00Z", line) for line in said] == [
        "destination 'crm' paused: circuit breaker open after repeated failures, the last is 'HTTP 500';"
        " one entry will be sent as a probe",
        "destination 'crm' resumed",
        "destination 'crm' paused until 12:05:00Z: Retry-After cooldown",
        "destination 'crm' paused by an operator, until `outbox resume`",
    ]


def test_the_log_says_if_another_process_has_opened_the_breaker(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    put(database, ob, count=6)

    async def main() -> None:
        sending = dispatcher(database.new_engine(), ob, adapters={"crm": Crm(Unknown("HTTP 500"))}, limits=FRAGILE)
        other = dispatcher(database.new_engine(), ob, adapters={"crm": Crm(Delivered())}, limits=FRAGILE)
        await sending.run_once()
        caplog.clear()
        await other._loops.sweep()
        await sending.close()
        await other.close()

    asyncio.run(main())

    (said,) = [record.getMessage() for record in caplog.records if "paused" in record.getMessage()]
    assert "after repeated failures, reported by another process; one entry" in said


def test_the_late_answer_of_a_sweep_does_not_replace_a_later_sweep(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other claim loop has swept meanwhile. A pause that is over would count again, and entries would age during it."""

    async def main() -> tuple[Mapping[str, str], Mapping[str, str]]:
        working = dispatcher(database.new_engine(), ob, adapters={"crm": Crm(Delivered())})
        await working.run_once()
        decide(database, pause)
        late = await begun_and_held(working._loops.sweep, DatabaseStore, "survey", monkeypatch)
        decide(database, resume)
        await working._loops.sweep()
        before = working._loops._flow.throttled
        await late()
        after = working._loops._flow.throttled
        await working.close()
        return before, after

    assert asyncio.run(main()) == ({}, {})


def test_who_may_not_send_an_entry_leaves_the_rate_to_who_may(database: Database, ob: outbox.Outbox) -> None:
    """Of two deploys at work: the entry may have been sent as the first one sends it, and waits for that one."""
    one_an_hour = {"crm": Limits(rate=1 / 3600)}
    first, second = MemoryAdapter([Unknown("lost")]), MemoryAdapter()
    first.pinned, second.pinned = "version=1", "version=2"
    put(database, ob)
    run_once(database, ob, adapters={"crm": first}, limits=one_an_hour)
    age(database, 2 * HOUR)

    run_once(database, ob, adapters={"crm": second}, limits=one_an_hour)
    age(database, MINUTE)
    run_once(database, ob, adapters={"crm": first}, limits=one_an_hour)

    assert (len(first.deliveries), len(second.deliveries)) == (2, 0)
    assert states(database) == {"delivered": 1}


# --- The breaker of a destination is of all dispatchers: they count its failures together, and one of them probes.


def test_failures_that_several_dispatchers_met_open_the_breaker_for_all(database: Database, ob: outbox.Outbox) -> None:
    limits = {"crm": Limits(concurrency=1, breaker=LASTING)}
    put(database, ob, count=10)
    crm = Crm(Unknown("HTTP 500"))

    for _ in range(2):
        store = DatabaseStore(database.new_engine(), ob.configuration)
        asyncio.run(store.exchange([], claim_request(quota("nobody"), flow_update=news({"crm": News(failures=4)}))))

    assert crm_row(database).breaker_failures == 8
    assert work(database, ob, crm, limits=limits) == 2
    assert crm_row(database).breaker == "open"
    assert work(database, ob, crm, limits=limits) == 0
    assert len(untouched(database)) == 8


@pytest.mark.parametrize("total", [None, 1], ids=["no permits shared", "one permit for all"])
def test_a_probe_that_gets_through_lets_everything_through(
    database: Database, ob: outbox.Outbox, total: int | None
) -> None:
    limits = {"crm": replace(FRAGILE["crm"], total_concurrency=total)}
    put(database, ob, count=20)
    crm = Crm(Unknown("HTTP 500"))
    assert work(database, ob, crm, limits=limits) == 3
    assert work(database, ob, crm, limits=limits) == 0
    age(database, 2 * HOUR)
    crm.answer = Delivered()

    assert work(database, ob, crm, limits=limits) == 20

    assert states(database) == {"delivered": 20}
    assert (crm_row(database).breaker, crm_row(database).breaker_failures) == ("closed", 0)
    assert crm_row(database).permits_taken is None


def test_a_probe_that_no_adapter_here_can_send_leaves_its_place(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=5)
    crm = Crm(Unknown("HTTP 500"))
    work(database, ob, crm, limits=FRAGILE)
    age(database, 2 * HOUR)
    strange = put_one(database, ob, "unserved.operation", destination="crm")
    change(database, strange, due_at=clock_plus(-3 * HOUR))  # it is the first
    crm.answer = Delivered()

    assert work(database, ob, crm, limits=FRAGILE) == 5

    row = queue_row(database, strange)
    assert (row.state, row.deliveries) == ("pending", 0)


def test_a_probe_that_settles_with_its_callback_opens_the_way_too(database: Database, ob: outbox.Outbox) -> None:
    effects = Operations()
    effects.on_settled("crm")(lambda session, settlement: None)
    put(database, ob, count=5)
    crm = Crm(Unknown("HTTP 500"))
    settings: Any = {
        "adapters": {"crm": crm},
        "include": [effects],
        "limits": {"crm": replace(FRAGILE["crm"], total_concurrency=3)},
    }
    run_once(database.new_engine(), ob, **settings)
    age(database, 2 * HOUR)
    crm.answer = Delivered()

    asyncio.run(
        pumping(dispatcher(database.new_engine(), ob, **settings), lambda: states(database) == {"delivered": 5})
    )
    assert crm_row(database).permits_taken is None


# --- An operator's pause of a destination: all dispatchers obey it and its end, and nothing ages meanwhile.


def test_running_dispatchers_obey_a_pause_and_its_end(database: Database, ob: outbox.Outbox) -> None:
    crm, mail = Crm(Delivered()), MemoryAdapter()

    async def main() -> None:
        working = dispatcher(database.new_engine(), ob, adapters={"crm": crm, "mail": mail})
        pump = asyncio.create_task(pumping(working, lambda: len(crm.deliveries) == 3))
        put(database, ob)
        await until_true(lambda: len(crm.deliveries) == 1)
        decide(database, pause)
        put(database, ob, count=2)
        put(database, ob, "mail.send")
        await until_true(lambda: len(mail.deliveries) == 1)
        assert len(crm.deliveries) == 1
        decide(database, resume)
        await pump

    asyncio.run(main())


def test_while_it_is_paused_nothing_ages(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    crm = Crm(Deferred("busy"))
    work(database, ob, crm)
    decide(database, pause)
    age(database, 10 * DAY)  # 3 are allowed
    decide(database, resume)

    assert work(database, ob, crm) == 1

    assert state(database, id) == "retry"
    age(database, 4 * DAY)
    work(database, ob, crm)
    assert state(database, id) == "failed"


def test_nothing_is_claimed_before_it_is_known_whose_age_a_pause_stopped(database: Database, ob: outbox.Outbox) -> None:
    """A dispatcher that has just started, and whose first read of the flow states is slow."""
    id = put_one(database, ob)
    crm = Crm(Deferred("busy"))
    work(database, ob, crm)
    decide(database, pause)
    age(database, 10 * DAY)  # 3 are allowed
    decide(database, resume)

    async def main() -> None:
        answered = asyncio.Event()

        class Slow(DatabaseStore):
            async def survey(self) -> Survey:
                await answered.wait()
                return await super().survey()

        store = Slow(database.new_engine(), ob.configuration)
        working = dispatcher(None, ob, adapters={"crm": crm}, store=store)
        pump = asyncio.create_task(pumping(working, lambda: len(crm.deliveries) == 2))
        await asyncio.sleep(0.2)  # time enough for the other claim loop to claim
        assert len(crm.deliveries) == 1
        answered.set()
        await pump

    asyncio.run(main())

    assert state(database, id) == "retry"


@pytest.mark.parametrize("found", [Absent(), CannotTell("down")])
def test_what_awaits_a_lookup_does_not_age_either_while_it_is_paused(
    database: Database, ob: outbox.Outbox, found: Finding
) -> None:
    id, service = awaiting_lookup(database, ob, "request", finds=[found])
    decide(database, pause)
    age(database, 10 * DAY)
    decide(database, resume)

    run_once(database, ob, adapters={"crm": service})

    row = queue_row(database, id)
    assert row.state == ("pending" if isinstance(found, Absent) else "uncertain")
    assert row.due_at < NEVER  # it is sent again, or looked up


def test_to_resume_ends_a_cool_down_and_closes_a_breaker(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=5)
    crm = Crm(Unknown("HTTP 500"))
    work(database, ob, crm, limits=FRAGILE)
    crm.answer = Deferred("HTTP 429", after=HOUR, cooldown=True)
    age(database, 2 * HOUR)
    work(database, ob, crm, limits=FRAGILE)
    crm.answer = Delivered()

    decide(database, resume)

    age(database, MINUTE)  # the entries' own backoff
    assert work(database, ob, crm) == 4
    assert crm_row(database).breaker == "closed"
