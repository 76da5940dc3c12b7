"""Maintenance as the schedule calls it: bounded runs, failures, the drain, how long entries have been due."""

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from apscheduler.job import Job
from support.daemons import daemon, wait_for, write_factory
from support.database import TABLES, Database
from support.entries import change, claim, dispatcher, put, put_one, quota
from support.retention import A_MOMENT, RETENTION, elapse, kept, maintenance, settle_all, shift

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.maintenance.jobs import Maintenance, report_lag, retain
from dispatchers.maintenance.retention import Retention
from dispatchers.process import daemon as daemon_module
from dispatchers.store.database import DatabaseStore
from outbox.times import NEVER

pytestmark = pytest.mark.on_mariadb

OFTEN = """
import dispatchers.process.daemon

dispatchers.process.daemon.RETENTION_SECONDS = 0.1
dispatchers.process.daemon.RETENTION_JITTER_SECONDS = None

def make():
    return Dispatcher(url, outbox=ob, adapters={"crm": MemoryAdapter()}, retention=timedelta(days=40))
"""

DRAINED = """
import signal

import dispatchers.maintenance

class Drained(dispatchers.maintenance.jobs.Maintenance):
    def __init__(self, *given, **settings):
        super().__init__(*given, max_rows=5, **settings)

    async def run_once(self, stopping):
        self.stopping = stopping
        return await super().run_once(stopping)

    async def _batch(self, name):
        batch = await super()._batch(name)
        if batch.deleted:
            os.kill(os.getpid(), signal.SIGTERM)
            await self.stopping.wait()
        return batch

dispatchers.process.daemon.Maintenance = Drained
"""


def settled_long_ago(database: Database, ob: outbox.Outbox, count: int) -> None:
    put(database, ob, count=count)
    settle_all(database)
    elapse(database, RETENTION + A_MOMENT)


def jobs(database: Database, ob: outbox.Outbox, stopping: asyncio.Event, **settings: Any) -> dict[str, Job]:
    """The scheduled jobs, by what they do."""
    working = dispatcher(database, ob, adapters={"crm": MemoryAdapter(window=timedelta(days=1))}, **settings)
    schedule = daemon_module._schedule(working, stopping)
    return {job.args[0].__name__: job for job in schedule.get_jobs()}


# --- bounded runs


def test_a_run_is_bounded_and_the_next_one_continues_where_it_stopped(database: Database, ob: outbox.Outbox) -> None:
    settled_long_ago(database, ob, 10)
    working = maintenance(database, max_rows=2)

    deleted = [asyncio.run(working.run_once(max_batches=2))["entries"] for _ in range(4)]

    assert deleted == [4, 4, 2, 0]


def test_what_may_not_go_yet_is_looked_at_again_after_the_end(database: Database, ob: outbox.Outbox) -> None:
    (id, *_) = put(database, ob, count=3, ordering_key="acct_1")
    settle_all(database)
    elapse(database, RETENTION + A_MOMENT)
    blocked = {"ordering_key": "acct_1", "entry_id": id, "reason": "declined", "since": NEVER}
    database.execute(sa.insert(TABLES.blocked_group).values(blocked))
    working = maintenance(database)
    assert asyncio.run(working.run_once())["entries"] == 2
    database.execute(sa.delete(TABLES.blocked_group))

    assert asyncio.run(working.run_once())["entries"] == 1


def test_a_run_stops_after_the_batch_in_which_the_drain_begins(database: Database, ob: outbox.Outbox) -> None:
    settled_long_ago(database, ob, 6)
    stopping = asyncio.Event()
    inner = maintenance(database)._run

    async def run(work: Callable[[sa.Connection], Any]) -> Any:
        batch = await inner(work)
        if batch.deleted:
            stopping.set()
        return batch

    working = Maintenance(run, TABLES, Retention.of(RETENTION, []), max_rows=2, pause_ratio=0)

    assert asyncio.run(working.run_once(stopping))["entries"] == 2
    assert kept(database)["entry"] == 4


def test_a_pause_is_longer_where_a_batch_takes_longer(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled_long_ago(database, ob, 6)
    inner, now, pauses = maintenance(database)._run, 0.0, list[float]()

    async def run(work: Callable[[sa.Connection], Any]) -> Any:
        nonlocal now
        now += 1.0
        return await inner(work)

    async def pause(seconds: float) -> None:
        nonlocal now
        pauses.append(seconds)
        now += seconds

    monkeypatch.setattr(asyncio, "sleep", pause)
    working = Maintenance(run, TABLES, Retention.of(RETENTION, []), max_rows=2, clock=lambda: now)

    assert asyncio.run(working.run_once())["entries"] == 6
    assert pauses == [4.0] * 3


def test_a_failed_batch_stops_neither_the_ones_before_nor_the_next_run(database: Database, ob: outbox.Outbox) -> None:
    settled_long_ago(database, ob, 6)
    inner = maintenance(database)._run
    calls = 0

    async def run(work: Callable[[sa.Connection], Any]) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:  # records, two entries, then this
            raise sa.exc.OperationalError("DELETE", {}, Exception("the server is unavailable"))
        return await inner(work)

    working = Maintenance(run, TABLES, Retention.of(RETENTION, []), max_rows=2, pause_ratio=0)
    with pytest.raises(sa.exc.OperationalError):
        asyncio.run(working.run_once())
    assert kept(database)["entry"] == 4

    assert asyncio.run(working.run_once())["entries"] == 4


# --- on the schedule


@pytest.mark.parametrize("is_async", [False, True])
def test_the_schedule_deletes_what_is_old_enough_and_logs_it(
    database: Database, ob: outbox.Outbox, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settled_long_ago(database, ob, 3)

    async def main() -> None:
        target = database.async_engine() if is_async else database.engine
        working = dispatcher(target, ob, adapters={"crm": MemoryAdapter()}, retention=RETENTION)
        found = {job.args[0]: job for job in daemon_module._schedule(working, asyncio.Event()).get_jobs()}
        job = found[retain]
        assert (job.max_instances, job.coalesce) == (1, True)
        assert job.trigger.interval == timedelta(minutes=2)
        assert job.trigger.jitter == 30
        await job.func(*job.args)
        await job.func(*job.args)
        await working.store.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(main())

    logged = [record.getMessage() for record in caplog.records if record.name == "outbox.maintenance"]
    assert logged == ["deleted 0 records, 3 entries, 0 tombstones"]
    assert kept(database) == {}


def test_a_run_that_fails_is_reported_without_what_it_was_about(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    database.execute(sa.text("ALTER TABLE outbox_record RENAME TO elsewhere"))
    job = jobs(database, ob, asyncio.Event())["retain"]

    asyncio.run(job.func(*job.args))
    database.execute(sa.text("ALTER TABLE elsewhere RENAME TO outbox_record"))

    (record,) = [record for record in caplog.records if record.name == "outbox.daemon"]
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("job retain failed and will run again at its next time: ")
    assert "SELECT" not in record.getMessage()
    assert record.exc_info is None


def test_a_keep_shorter_than_an_adapters_window_stops_a_dispatchers_start(
    database: Database, ob: outbox.Outbox
) -> None:
    with pytest.raises(
        outbox.ConfigurationError, match=r"retention=1 day, 0:00:00 must be from 2 days, 0:00:00 \(the longest"
    ):
        jobs(database, ob, asyncio.Event(), retention=timedelta(days=1))


def test_a_daemon_cleans_up_beside_its_sending_and_stops_with_the_drain(
    database: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    settled_long_ago(database, ob, 600)
    shift(database, TABLES.settlement.c.settled_at, timedelta(days=40))
    put_one(database, ob, parent="order:new")
    write_factory(tmp_path, OFTEN)

    with daemon(tmp_path, database.url) as process:
        wait_for(lambda: "entries" in process.output, "a run's report", workers=[process])
        wait_for(lambda: len(database.entries) == 1, "the others to go", workers=[process])
        wait_for(lambda: not database.queue, "the new one to be sent", workers=[process])
        process.terminate()
        assert process.wait() == 0, process.output

    assert kept(database) == {"entry": 1, "settlement": 1}
    assert "Traceback" not in process.output
    assert "Error" not in process.output


def test_a_drain_in_the_middle_of_a_run_leaves_the_rest_to_the_next(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    settled_long_ago(postgresql, ob, 20)
    shift(postgresql, TABLES.settlement.c.settled_at, timedelta(days=40))
    write_factory(tmp_path, OFTEN + DRAINED)

    with daemon(tmp_path, postgresql.url) as process:
        assert process.wait() == 0, process.output

    assert len(postgresql.entries) == 15
    assert "Traceback" not in process.output
    assert "Error" not in process.output


# --- how long entries have been due


def test_the_oldest_due_entry_that_is_not_sent_is_the_destinations_lag(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    store = DatabaseStore(database.engine, ob.configuration)
    put(database, ob, "mail.send", count=2)
    elapse(database, timedelta(hours=2))
    shift(database, TABLES.queue.c.due_at, timedelta(hours=2))
    assert len(claim(store, quota("mail", permits=1))) == 1
    change(database, put_one(database, ob, "held.by_hand"), due_at=NEVER, suspended_reason="paused")
    put_one(database, ob, "later.on", due=timedelta(hours=1))
    put_one(database, ob)
    shift(database, TABLES.queue.c.due_at, timedelta(minutes=4), TABLES.queue.c.destination == "crm")

    lags = asyncio.run(report_lag(store.run, TABLES))

    assert set(lags) == {"crm", "mail"}
    assert timedelta(minutes=4) <= lags["crm"] < timedelta(minutes=5)
    assert timedelta(hours=2) <= lags["mail"] < timedelta(hours=3)
    (logged,) = [record for record in caplog.records if record.name == "outbox.maintenance"]
    assert logged.levelname == "WARNING"
    assert logged.getMessage() == (
        f"destination 'mail': its oldest due entry has waited {lags['mail']} and no dispatcher has claimed it"
    )


def test_an_empty_queue_has_no_lag(database: Database, ob: outbox.Outbox) -> None:
    assert asyncio.run(report_lag(DatabaseStore(database.engine, ob.configuration).run, TABLES)) == {}
