"""What was sent within the last hour: counted by each dispatcher, written with its heartbeats, summed up for operators."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.cli_runner import Choosy
from support.database import TABLES, Database
from support.entries import dispatcher, put

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.read.throughput import percentile, read_throughput
from dispatchers.maintenance.jobs import forget_dead_dispatchers
from dispatchers.process.dispatcher_work import DispatcherWork
from dispatchers.store.records.send_counts import KEPT_FOR
from dispatchers.telemetry.measures import MAX_NAMES, OTHER
from dispatchers.telemetry.tally import BOUNDS, Tally

HOUR = timedelta(hours=1)


def throughput(database: Database) -> Any:
    with database.engine.begin() as connection:
        return read_throughput(connection, TABLES)


def sent(database: Database, ob: outbox.Outbox) -> DispatcherWork:
    """A dispatcher that has sent three good and one bad, and has not reported them."""
    put(database, ob, "stripe.refunds.create", count=2, payload={"good": True})
    put(database, ob, "stripe.refunds.create", payload={"good": False})
    put(database, ob)
    working = dispatcher(database, ob, adapters={"stripe": Choosy(), "crm": MemoryAdapter()})

    async def main() -> None:
        assert await working.run_once() == 4

    asyncio.run(main())
    return working


def test_a_heartbeat_reports_what_was_sent_since_the_last(database: Database, ob: outbox.Outbox) -> None:
    working = sent(database, ob)
    before = throughput(database)

    asyncio.run(working.heartbeats.beat())
    once = throughput(database)
    asyncio.run(working.heartbeats.beat())
    twice = throughput(database)

    assert (before.total.results, before.destinations) == ({}, {})
    assert once.total.results == twice.total.results == {"delivered": 3, "rejected": 1}
    stripe, crm = once.destinations.values()
    assert (stripe.destination, stripe.results) == ("stripe", {"delivered": 2, "rejected": 1})
    assert (crm.destination, crm.results) == ("crm", {"delivered": 1})
    assert once.total.per_second == pytest.approx(4 / 3600, rel=0.05)
    assert once.total.took.p95 in BOUNDS
    assert once.total.waited.p50 in BOUNDS


def test_every_minute_of_the_hour_is_listed(database: Database, ob: outbox.Outbox) -> None:
    asyncio.run(sent(database, ob).heartbeats.beat())

    found = throughput(database)

    assert len(found.minutes) == 60
    assert sum(sum(minute.results.values()) for minute in found.minutes) == 4
    assert found.minutes[0].minute == found.since
    assert found.minutes[-1].minute <= found.at


def test_the_counts_of_several_dispatchers_add_up(database: Database, ob: outbox.Outbox) -> None:
    for _ in range(2):
        asyncio.run(sent(database, ob).heartbeats.beat())

    assert throughput(database).total.results == {"delivered": 6, "rejected": 2}


def test_counts_outlive_the_dispatcher_that_stops_cleanly(database: Database, ob: outbox.Outbox) -> None:
    working = sent(database, ob)

    asyncio.run(working.heartbeats.leave())

    assert throughput(database).total.results == {"delivered": 3, "rejected": 1}


def test_counts_that_could_not_be_written_are_written_later(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = sent(database, ob)

    def refuse(*arguments: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as broken:
        broken.setattr("dispatchers.process.heartbeat.add_counts", refuse)
        asyncio.run(working.heartbeats.beat())
    failed = throughput(database)
    asyncio.run(working.heartbeats.beat())

    assert failed.total.results == {}
    assert throughput(database).total.results == {"delivered": 3, "rejected": 1}


def test_old_counts_are_not_shown_and_are_deleted(database: Database, ob: outbox.Outbox) -> None:
    working = sent(database, ob)
    asyncio.run(working.heartbeats.beat())
    table = TABLES.send_count
    (minute, *_) = [row.minute for row in database.rows(table)]

    database.execute(sa.update(table).values(minute=minute - HOUR))
    shown = throughput(database)
    asyncio.run(forget_dead_dispatchers(working.store.run, TABLES))
    kept = len(database.rows(table))
    database.execute(sa.update(table).values(minute=minute - KEPT_FOR - timedelta(minutes=1)))
    asyncio.run(forget_dead_dispatchers(working.store.run, TABLES))

    assert (shown.total.results, kept > 0, database.rows(table)) == ({}, True, [])


def test_a_percentile_is_the_bound_of_its_bucket() -> None:
    assert percentile({0: 90, 3: 9, 15: 1}, 0.50) == BOUNDS[0]
    assert percentile({0: 90, 3: 9, 15: 1}, 0.95) == BOUNDS[3]
    assert percentile({0: 90, 3: 9, 15: 1}, 0.999) == BOUNDS[15]
    assert percentile({len(BOUNDS): 1}, 0.5) == BOUNDS[-1]
    assert percentile({}, 0.5) is None


def test_a_duration_is_counted_in_the_bucket_that_holds_it() -> None:
    tally = Tally()
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] + 0.001, BOUNDS[-1] * 2):
        tally.add("crm", "delivered", seconds)

    assert {key.bucket: count for key, count in tally.take().items()} == {0: 2, 1: 1, len(BOUNDS): 1}
    assert tally.take() == {}


def test_the_number_of_counted_destinations_is_bounded() -> None:
    tally = Tally()
    for number in range(MAX_NAMES + 5):
        tally.add(f"host-{number}", "delivered", 0.1)

    counts = {key.destination: count for key, count in tally.take().items()}
    assert len(counts) == MAX_NAMES + 1
    assert counts[OTHER] == 5
