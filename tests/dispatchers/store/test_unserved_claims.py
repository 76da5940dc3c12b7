"""Entries that a process does not serve cost it next to nothing, and delay no other entry: it passes over them."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database
from support.entries import age, dispatcher, put, put_one, queue_row, run_once, states

import outbox
from dispatchers import Delivered, Delivery, Operations
from dispatchers.adapters import MemoryAdapter
from dispatchers.decide import CANCELLED_DELAY
from dispatchers.pipeline.destinations import Destinations
from dispatchers.pipeline.scheduler import LATE_SECONDS, UNSERVED_SECONDS, Scheduler
from dispatchers.stored_outcome import Known, write_outcome
from outbox.sql.schema.tables import SCHEMA_VERSION


def serving(operation: str) -> Operations:
    effects = Operations()

    @effects.operation(operation)
    def send(delivery: Delivery) -> Delivered:
        return Delivered()

    return effects


def versions(database: Database) -> dict[Any, str]:
    """Which transaction wrote each row of the queue last."""
    with database.engine.connect() as connection:
        found = connection.execute(sa.text("SELECT id, CAST(xmin AS text) AS writer FROM outbox_queue"))
        return {row.id: row.writer for row in found}


def test_a_backlog_that_is_not_served_is_not_written_to_again_and_again(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    put(postgresql, ob, "crm.gone", count=500)
    working = dispatcher(postgresql, ob, include=[serving("crm.upsert")])

    async def work() -> list[dict[Any, str]]:
        seen = [versions(postgresql)]
        for _ in range(4):
            await working.run_once()
            seen.append(versions(postgresql))
        await working.close()
        return seen

    before, first, *later = asyncio.run(work())

    assert 0 < sum(before[id] != writer for id, writer in first.items()) <= 100, (
        "those by which it learns of the operation"
    )
    assert later == [first] * 3


@pytest.mark.parametrize("newer", [False, True], ids=["another operation", "a newer release's"])
def test_what_is_served_goes_out_after_a_backlog_that_is_not(
    database: Database, ob: outbox.Outbox, newer: bool
) -> None:
    put(database, ob, "crm.upsert" if newer else "crm.gone", count=300)
    if newer:
        database.execute(sa.update(TABLES.entry).values(schema_version=SCHEMA_VERSION + 1))
    age(database, timedelta(hours=1))
    served = put_one(database, ob, parent="order:served")
    service = MemoryAdapter()
    effects = Operations()

    @effects.operation("crm.upsert")
    def send(delivery: Delivery) -> Delivered:
        service.effects[delivery.key] = 1
        return Delivered()

    assert run_once(database, ob, include=[effects]) == 1
    assert len(service.effects) == 1
    assert served not in [row.id for row in waiting(database)]
    assert {row.deliveries for row in waiting(database)} == {0}


def waiting(database: Database) -> list[Any]:
    with database.begin() as session:
        return list(session.execute(sa.select(TABLES.queue)).all())


def test_another_process_sends_what_this_one_passed_over(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "crm.late", count=60)
    run_once(database, ob, include=[serving("crm.upsert")])

    assert run_once(database, ob, include=[serving("crm.late")]) == 60


def decide_to_cancel(database: Database, id: Any, at: datetime) -> None:
    known = write_outcome("a slip", known=Known(state="cancelled", reason="a slip", decided_at=at))
    database.execute(sa.update(TABLES.queue).where(TABLES.queue.c.id == id).values(outcome=known))


@pytest.mark.parametrize("newer", [False, True], ids=["another operation", "a newer release's"])
def test_a_decision_about_a_passed_over_entry_is_carried_out(
    database: Database, ob: outbox.Outbox, newer: bool
) -> None:
    (id, *_) = put(database, ob, "crm.upsert" if newer else "crm.gone", count=3)
    if newer:
        database.execute(sa.update(TABLES.entry).values(schema_version=SCHEMA_VERSION + 1))
    working = dispatcher(database, ob, include=[serving("crm.upsert")])

    async def work() -> None:
        await working.run_once()
        decide_to_cancel(database, id, datetime(2020, 1, 1, tzinfo=UTC))
        await working.run_once()
        await working.close()

    asyncio.run(work())

    assert states(database) == {"pending": 2, "cancelled": 1}
    assert queue_row(database, id) is None


@pytest.mark.parametrize("newer", [False, True], ids=["another operation", "a newer release's"])
def test_a_decision_that_others_are_to_carry_out_first_is_looked_at_seldom(
    database: Database, ob: outbox.Outbox, newer: bool
) -> None:
    """Claims do not pass over it, and it is given back as it was: at once, it would be claimed again without a pause."""
    id = put_one(database, ob, "crm.upsert" if newer else "crm.gone")
    if newer:
        database.execute(sa.update(TABLES.entry).values(schema_version=SCHEMA_VERSION + 1))
    decided_at = datetime.now(UTC)
    decide_to_cancel(database, id, decided_at)

    assert run_once(database, ob, include=[serving("crm.upsert")]) == 0

    row = queue_row(database, id)
    assert (row.state, row.deliveries) == ("pending", 0)
    assert row.due_at >= decided_at + CANCELLED_DELAY


# --- when everything that is due is read again


def test_a_destination_with_unserved_entries_is_read_whole_only_at_times() -> None:
    scheduler = Scheduler(["crm"], Destinations(permits=10, permits_in_all=100))
    scheduler.skip_operation("crm.gone", "crm")

    def asked(now: float) -> timedelta | None:
        (quota,) = scheduler.next_quotas(now)
        scheduler.note_claim([quota], [])
        return quota.recent

    seen = [asked(100.0), asked(101.0), asked(100.0 + UNSERVED_SECONDS)]

    assert seen == [None, timedelta(seconds=1 + LATE_SECONDS), None]


def test_a_destination_that_serves_all_it_has_is_always_read_whole() -> None:
    scheduler = Scheduler(["crm"], Destinations(permits=10, permits_in_all=100))

    assert scheduler.unserved is None
    for now in (100.0, 101.0):
        (quota,) = scheduler.next_quotas(now)
        scheduler.note_claim([quota], [])
        assert quota.recent is None


def test_a_claim_that_failed_is_no_read_of_all_that_is_due() -> None:
    scheduler = Scheduler(["crm"], Destinations(permits=10, permits_in_all=100))
    (early,) = scheduler.next_quotas(100.0)  # before anything unserved was met
    scheduler.skip_operation("crm.gone", "crm")
    scheduler.release([early])
    (failed,) = scheduler.next_quotas(100.0)
    scheduler.release([failed])

    (quota,) = scheduler.next_quotas(101.0)
    assert quota.recent is None


def test_a_claim_from_before_anything_unserved_is_no_full_read() -> None:
    scheduler = Scheduler(["crm"], Destinations(permits=10, permits_in_all=100))
    (early,) = scheduler.next_quotas(100.0)
    scheduler.skip_operation("crm.gone", "crm")
    scheduler.note_claim([early], [])

    (quota,) = scheduler.next_quotas(101.0)
    assert quota.recent is None
