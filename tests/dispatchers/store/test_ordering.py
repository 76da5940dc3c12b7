"""Entries of one ordering key go out one at a time, in commit order."""

import asyncio
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import Database
from support.entries import HOUR, age, change, claim, dispatcher, put, queue_row, run_once, state, until_true
from support.ordering import BUSY, OrderedService, decide, put_in_group, send_all, states_of

import outbox
from dispatchers import Delivered, Delivery, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import decisions
from dispatchers.errors import DecisionRefused
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import ClaimedEntry, Settle
from outbox.sessions.session import flush_all
from outbox.times import NEVER

pytestmark = pytest.mark.on_mariadb

# --- in order


def test_entries_of_one_key_are_sent_in_the_order_in_which_they_committed(
    database: Database, ob: outbox.Outbox
) -> None:
    service = OrderedService()
    names = [f"order:{number}" for number in range(12)]
    ids = put_in_group(database, ob, *names)

    send_all(database, ob, service)

    assert service.came == {"ada": names}
    assert states_of(database, ids) == ["delivered"] * 12


def test_the_entries_of_one_flush_keep_the_order_of_their_enqueues(database: Database, ob: outbox.Outbox) -> None:
    service = OrderedService()
    with database.begin() as session:
        for number in range(8):
            group = f"group {number % 2}"
            payload = {"group": group, "name": str(number)}
            ob.enqueue(session, "crm.upsert", payload, parent=f"order:{number}", ordering_key=group)

    assert run_once(database, ob, adapters={"crm": service}) == 8

    assert service.came == {"group 0": ["0", "2", "4", "6"], "group 1": ["1", "3", "5", "7"]}


def test_a_group_goes_across_operations_and_destinations(database: Database, ob: outbox.Outbox) -> None:
    came: list[str] = []

    class Service(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            came.append(delivery.operation)
            return Delivered()

    operations = ["stripe.charge", "mail.send", "crm.upsert", "mail.send"]
    for number, operation in enumerate(operations):
        put(database, ob, operation, parent=f"step {number}", ordering_key="order:7")

    service = Service()
    while run_once(database, ob, adapters={"stripe": service, "mail": service, "crm": service}):
        pass

    assert came == operations


def test_groups_do_not_wait_for_each_other_nor_others_for_groups(database: Database, ob: outbox.Outbox) -> None:
    service = OrderedService(slow=BUSY)
    put_in_group(database, ob, "slow", "after")
    put_in_group(database, ob, "first", "second", group="bob")
    (free,) = put_in_group(database, ob, "free", group="none", ordering_key=None)

    send_all(database, ob, service)

    assert service.came == {"ada": ["slow"], "bob": ["first", "second"], "none": ["free"]}
    assert state(database, free) == "delivered"


def test_the_head_is_waited_for_however_late_it_is_due(database: Database, ob: outbox.Outbox) -> None:
    service = OrderedService()
    put_in_group(database, ob, "later", due=HOUR)
    put_in_group(database, ob, "now")

    send_all(database, ob, service)
    assert service.came == {}
    age(database, 2 * HOUR)
    send_all(database, ob, service)

    assert service.came == {"ada": ["later", "now"]}


def test_what_is_due_later_is_not_sent_earlier_for_being_next(database: Database, ob: outbox.Outbox) -> None:
    service = OrderedService()
    with database.begin() as session:
        for name, due in (("now", None), ("later", HOUR)):
            payload = {"group": "ada", "name": name}
            ob.enqueue(session, "crm.upsert", payload, parent=name, ordering_key="ada", due=due)

    send_all(database, ob, service)

    assert service.came == {"ada": ["now"]}
    assert queue_row(database, ids_of(database)["later"]).due_at < NEVER


def ids_of(database: Database) -> dict[str, UUID]:
    return {entry.parent: entry.id for entry in database.entries}


def test_many_due_entries_that_are_no_head_keep_no_other_from_being_sent(database: Database, ob: outbox.Outbox) -> None:
    """More than a claim takes: the claims that bring none that may go are not the end of the work."""
    service = OrderedService(head=BUSY)
    put_in_group(database, ob, "head", *(f"after {number}" for number in range(7)))
    put_in_group(database, ob, "free", group="none", ordering_key=None)

    run_once(database, ob, adapters={"crm": service}, concurrency=2)

    assert service.came == {"ada": ["head"], "none": ["free"]}


def test_a_daemon_sends_the_next_in_the_round_trip_that_settles_the_head(database: Database, ob: outbox.Outbox) -> None:
    """Its poll is an hour: nothing but the settling can bring the next one."""
    service = OrderedService()
    names = [f"order:{number}" for number in range(20)]
    ids = put_in_group(database, ob, *names)

    async def main() -> None:
        working = dispatcher(database, ob, adapters={"crm": service}, poll=HOUR)
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        await until_true(lambda: state(database, ids[-1]) == "delivered")
        stopping.set()
        await pump
        await working.close()

    asyncio.run(main())

    assert service.came == {"ada": names}


# --- what leaves no hole


def test_a_savepoint_rolled_back_takes_its_entries_out_of_the_group(database: Database, ob: outbox.Outbox) -> None:
    service = OrderedService()

    def enqueue(session: Session, name: str) -> None:
        payload = {"group": "ada", "name": name}
        ob.enqueue(session, "crm.upsert", payload, parent=name, ordering_key="ada")
        flush_all(session)

    with database.begin() as session:
        enqueue(session, "first")
        savepoint = session.begin_nested()
        enqueue(session, "undone")
        savepoint.rollback()
        enqueue(session, "second")
    with database.session() as session:
        enqueue(session, "never")
        session.rollback()
    put_in_group(database, ob, "third")

    send_all(database, ob, service)

    assert service.came == {"ada": ["first", "second", "third"]}


def test_a_duplicate_that_is_ignored_is_not_the_head_of_what_comes_with_it(
    database: Database, ob: outbox.Outbox
) -> None:
    service = OrderedService()
    put_in_group(database, ob, "first")
    send_all(database, ob, service)

    with database.begin() as session:
        for name in ("first", "second", "third"):
            payload = {"group": "ada", "name": name}
            ob.enqueue(session, "crm.upsert", payload, parent=name, ordering_key="ada", if_exists="ignore")
    send_all(database, ob, service)

    assert service.came == {"ada": ["first", "second", "third"]}


# --- cancelled


def test_cancelling_the_head_lets_the_next_one_go(database: Database, ob: outbox.Outbox) -> None:
    service = OrderedService(first=BUSY)
    ids = put_in_group(database, ob, "first", "second", "third")
    send_all(database, ob, service)
    assert states_of(database, ids) == ["retry", "blocked", "blocked"]

    with database.begin() as session:
        assert ob.cancel(session, ids[0])
    send_all(database, ob, service)

    assert service.came == {"ada": ["first", "second", "third"]}


# --- whatever makes an entry due too early


def test_retry_refuses_what_waits_for_the_head(database: Database, ob: outbox.Outbox) -> None:
    service = OrderedService(first=BUSY)
    ids = put_in_group(database, ob, "first", "second")
    send_all(database, ob, service)

    with pytest.raises(
        DecisionRefused, match="it is blocked by an earlier entry of its ordering group, which `show` prints"
    ):
        decide(database, decisions.retry, ids[1])


def test_a_suspended_head_keeps_its_group_waiting(database: Database, ob: outbox.Outbox) -> None:
    service = OrderedService()
    ids = put_in_group(database, ob, "first", "second")
    change(database, ids[0], suspended_reason="restored from a backup", due_at=NEVER)

    send_all(database, ob, service)
    assert service.came == {}
    decide(database, decisions.release, ids[0])
    send_all(database, ob, service)

    assert service.came == {"ada": ["first", "second"]}


# --- what it costs


def statements(database: Database, work: Any) -> list[str]:
    """The first words of what `work` has executed."""
    found: list[str] = []

    def executed(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        found.append(" ".join(statement.split()[:3]))

    sa.event.listen(database.engine, "before_cursor_execute", executed)
    try:
        work()
    finally:
        sa.event.remove(database.engine, "before_cursor_execute", executed)
    return found


@pytest.mark.parametrize(("groups", "count"), [([None] * 6, 1), (["a", "b", "a", "c"], 2), ([None, "a", None, "b"], 3)])
def test_a_flush_takes_so_many_statements(
    postgresql: Database, ob: outbox.Outbox, groups: list[str | None], count: int
) -> None:
    def flush() -> None:
        with postgresql.begin() as session:
            for number, group in enumerate(groups):
                ob.enqueue(session, "crm.upsert", {}, parent=f"order:{number}", ordering_key=group)

    flush_once = statements(postgresql, flush)

    assert len(flush_once) == count


def test_without_an_ordering_key_claim_and_settling_are_one_statement_each(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    put(postgresql, ob, count=5)
    store = DatabaseStore(postgresql.engine, ob.configuration)
    asyncio.run(store.exchange([], None))  # it asks for the isolation level, once
    claimed: list[ClaimedEntry] = []
    first = statements(postgresql, lambda: claimed.extend(claim(store)))
    second = statements(
        postgresql,
        lambda: asyncio.run(store.exchange([(entry, Settle("delivered", 1)) for entry in claimed], None)),
    )

    assert len(claimed) == 5
    assert (len(first), len(second)) == (2, 1)  # the claim after the guards of its transaction
