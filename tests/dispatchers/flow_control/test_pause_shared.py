"""An operator's pause of a destination: all dispatchers obey it and its end, and nothing ages meanwhile.

Each dispatcher here has connections of its own, as a process would.

"""

import asyncio

import pytest
from support.database import Database
from support.entries import HOUR, age, dispatcher, pumping, put, put_one, queue_row, run_once, state, until_true
from support.flow_control import DAY, FRAGILE, MINUTE, Crm, crm_row, decide, work
from support.lookups import awaiting_lookup

import outbox
from dispatchers import Absent, CannotTell, Deferred, Delivered, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import pause, resume
from dispatchers.delivery import Finding
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Survey
from outbox.times import NEVER

pytestmark = pytest.mark.on_mariadb


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
