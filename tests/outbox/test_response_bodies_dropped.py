"""The layout at scale: a day goes when nothing needs it, and nothing else does; who reads or dies meanwhile loses nothing."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from support.body_partitions import add, days_pass, drop, layout, stored_bodies, switch_on, take_away, today
from support.database import TABLES, Client, Database
from support.entries import dispatcher
from support.retention import DAY, clean, settle_all

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.maintenance import body_partitions
from dispatchers.maintenance.body_partitions import DROPPING_LOCK, Drops
from dispatchers.maintenance.jobs import keep_bodies
from dispatchers.store.database import DatabaseStore
from outbox.sql.schema.body_partitions import DAYS_AHEAD, body_partition

Result = TypeVar("Result")
MONTH = 32  # days: a record's retention, and the two that a partition is kept at least


@pytest.fixture
def by_day(postgresql: Database) -> Database:
    switch_on(postgresql)
    return postgresql


@pytest.fixture
def shop(by_day: Database, ob: outbox.Outbox) -> Client:
    return Client(by_day, ob, is_async=False)


def answer_only(session: Session, claim: outbox.Claim) -> None:
    claim.respond(201, {"order": "placed"})


def past_days(database: Database) -> list[int]:
    """How many days ago those were that have a partition."""
    now = today(database)
    return [(now - day.day).days for day in layout(database).days if day.day < now]


# --- what goes, and what does not


def test_a_day_goes_in_which_everything_is_past_its_time_and_no_other(shop: Client, by_day: Database) -> None:
    for until_the_next in (10, 22, 3):
        shop.request(answer_only, key=f"request-{until_the_next}")
        days_pass(by_day, until_the_next)
    assert past_days(by_day) == [35, 25, 3]
    assert clean(by_day) == {"records": 1}

    drops = drop(by_day)

    assert drops == Drops(dropped=(today(by_day) - 35 * DAY,))
    assert past_days(by_day) == [25, 3]
    assert len(stored_bodies(by_day)) == 2
    assert drop(by_day) == Drops()


def test_a_day_lives_as_long_as_its_longest_kept_record(shop: Client, by_day: Database) -> None:
    shop.request(answer_only, key="short")
    long = shop.request(answer_only, key="long", retention=90 * DAY)
    days_pass(by_day, MONTH)
    clean(by_day)

    assert drop(by_day) == Drops()

    assert shop.request(key="long", retention=90 * DAY) == long


def test_yesterdays_partition_stays_though_no_record_needs_it(shop: Client, by_day: Database) -> None:
    """A transaction that began before midnight may not have committed yet."""
    shop.request(answer_only)
    days_pass(by_day, 1)
    by_day.execute(sa.delete(TABLES.record))

    assert drop(by_day) == Drops()

    days_pass(by_day, 1)
    assert len(drop(by_day).dropped) == 1


def test_a_record_with_an_unsettled_entry_keeps_its_body_when_its_day_goes(shop: Client, by_day: Database) -> None:
    first = shop.request(retention=DAY)
    shop.request(answer_only, key="ended")
    days_pass(by_day, MONTH)
    clean(by_day)

    drops = drop(by_day)

    assert drops.dropped == (today(by_day) - MONTH * DAY,)
    assert [body for _, body in stored_bodies(by_day)] == [first.body]
    (record,) = by_day.records
    assert record.body_day == today(by_day)
    by_day.execute(sa.update(TABLES.record).values(replay_until=sa.func.now() + DAY))
    assert shop.request() == first
    settle_all(by_day)
    assert clean(by_day) == {"records": 1}


def test_with_the_layout_off_what_is_carried_over_goes_into_its_record(shop: Client, by_day: Database) -> None:
    first = shop.request(retention=90 * DAY)
    days_pass(by_day, 3)
    by_day.execute(sa.update(TABLES.record).values(keep_until=sa.func.now() - DAY))
    by_day.execute(sa.text("DROP TRIGGER outbox_move_body ON outbox_record"))

    assert len(drop(by_day).dropped) == 1

    assert by_day.records[0].body == first.body
    assert shop.request(retention=90 * DAY) == first


def test_a_day_with_too_many_records_that_cannot_be_deleted_stays(
    shop: Client, by_day: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_partitions, "MAX_CARRIED", 2)
    for number in range(3):
        shop.request(key=f"stuck-{number}")
    days_pass(by_day, MONTH)
    day = today(by_day) - MONTH * DAY

    assert drop(by_day) == Drops(due=(day,))

    assert [found for found, _ in stored_bodies(by_day)] == [day] * 3


def test_a_dry_run_says_what_would_go(shop: Client, by_day: Database) -> None:
    shop.request(answer_only)
    days_pass(by_day, MONTH)

    assert drop(by_day, dry=True) == Drops(due=(today(by_day) - MONTH * DAY,))

    assert len(stored_bodies(by_day)) == 1


# --- beside everyone else


def wait_until(database: Database, condition: str) -> None:
    deadline = time.monotonic() + 60
    query = sa.text(f"SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND {condition})")
    while True:
        with database.engine.connect() as connection:
            if connection.execute(query).scalar_one():
                return
        assert time.monotonic() < deadline, condition
        threading.Event().wait(0.01)


IS_DETACHING = "query LIKE 'ALTER TABLE%DETACH%' AND wait_event_type = 'Lock'"


@contextmanager
def detaching(database: Database, work: Callable[[], Any]) -> Iterator[list[Any]]:
    """A drop on another thread that waits for the transaction which is open around this block. Its result, or error, is left."""
    left: list[Any] = []

    def run() -> None:
        try:
            left.append(work())
        except OperationalError as error:
            left.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(database, IS_DETACHING)
    yield left
    thread.join(60)
    assert not thread.is_alive()


def test_detaching_waits_for_a_reader_and_no_client_waits_for_it(
    shop: Client, by_day: Database, ob: outbox.Outbox
) -> None:
    shop.request(answer_only)
    days_pass(by_day, MONTH)
    clean(by_day)
    today_s = shop.request(answer_only, key="today")

    with by_day.session() as reader:
        assert len(reader.execute(sa.text("SELECT body FROM outbox_body")).all()) == 2
        with detaching(by_day, lambda: drop(by_day)) as drops:
            assert shop.request(key="today") == today_s  # a replay
            assert shop.request(answer_only, key="meanwhile").status == 201  # a new answer
            assert drops == []
            reader.commit()

    assert drops == [Drops(dropped=(today(by_day) - MONTH * DAY,))]
    assert shop.request(key="today") == today_s


def test_what_a_dead_process_began_to_detach_is_finished_by_the_next(shop: Client, by_day: Database) -> None:
    shop.request(answer_only)
    days_pass(by_day, MONTH)
    clean(by_day)
    with by_day.session() as reader:
        reader.execute(sa.text("SELECT body FROM outbox_body"))
        with detaching(by_day, lambda: drop(by_day)) as left:
            by_day.execute(sa.text(f"SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE {IS_DETACHING}"))
    assert isinstance(left[0], OperationalError)
    assert [day.is_pending for day in layout(by_day).days].count(True) == 1

    drops = drop(by_day)

    assert drops.dropped == (today(by_day) - MONTH * DAY,)
    assert past_days(by_day) == []


def test_what_was_detached_and_not_dropped_is_dropped(shop: Client, by_day: Database) -> None:
    shop.request(answer_only)
    days_pass(by_day, MONTH)
    clean(by_day)
    partition = body_partition(TABLES, today(by_day) - MONTH * DAY)
    by_day.execute(sa.text(f"ALTER TABLE outbox_body DETACH PARTITION {partition}"))

    assert len(drop(by_day).dropped) == 1
    assert past_days(by_day) == []


def test_a_day_that_a_record_names_after_all_is_attached_again(shop: Client, by_day: Database) -> None:
    """A transaction that was open for longer than a day committed its answer while its day was being detached."""
    first = shop.request(answer_only, retention=90 * DAY)
    days_pass(by_day, MONTH)
    day = today(by_day) - MONTH * DAY
    by_day.execute(sa.text(f"ALTER TABLE outbox_body DETACH PARTITION {body_partition(TABLES, day)}"))
    by_day.execute(sa.update(TABLES.record).values(keep_until=sa.func.now() - DAY))

    assert drop(by_day) == Drops(due=(day,))

    assert shop.request(retention=90 * DAY) == first
    assert len(drop(by_day).dropped) == 1  # now carried over
    assert shop.request(retention=90 * DAY) == first


def test_while_one_drops_a_second_leaves_it_to_it(shop: Client, by_day: Database) -> None:
    shop.request(answer_only)
    days_pass(by_day, MONTH)
    clean(by_day)
    with by_day.engine.begin() as first:
        first.execute(sa.text(f"SELECT pg_advisory_xact_lock({DROPPING_LOCK})"))

        assert drop(by_day) == Drops()

    assert len(drop(by_day).dropped) == 1


def test_two_at_once_make_each_partition_once(by_day: Database) -> None:
    for ahead in range(1, DAYS_AHEAD + 1):
        take_away(by_day, today(by_day) + ahead * DAY)
    added: list[int] = []
    start = threading.Barrier(2)

    def work() -> None:
        start.wait()
        added.append(add(by_day))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(added) == [0, DAYS_AHEAD]


# --- what the schedule does


def keep(database: Database, ob: outbox.Outbox, *, is_async: bool = False) -> None:
    async def main() -> None:
        store = DatabaseStore(database.async_engine() if is_async else database.engine, ob.configuration)
        await keep_bodies(store.run, store.run_apart, TABLES)

    asyncio.run(main())


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_dispatcher_makes_days_ahead_and_drops_those_that_are_past(
    shop: Client, by_day: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    caplog.set_level(logging.INFO, "outbox.maintenance")
    shop.request(answer_only)
    days_pass(by_day, MONTH)
    clean(by_day)
    take_away(by_day, today(by_day) + DAY)

    keep(by_day, ob, is_async=is_async)

    assert layout(by_day).ahead == DAYS_AHEAD
    assert past_days(by_day) == []
    assert caplog.messages == [
        "created 1 body partitions for the coming days",
        f"dropped the body partitions of {today(by_day) - MONTH * DAY}",
    ]


def test_a_dispatcher_that_cannot_make_tomorrows_partition_logs_an_alarm(
    by_day: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    take_away(by_day, today(by_day) + DAY)
    by_day.execute(sa.text("DROP FUNCTION outbox_add_body_days"))

    keep(by_day, ob)

    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "cannot create body partitions: 42883; retried later"),
        ("ERROR", layout(by_day).alarm),
    ]


def test_in_the_ordinary_layout_there_is_nothing_to_keep(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    keep(database, ob)

    assert caplog.messages == []


def test_the_schedule_of_a_dispatcher_keeps_bodies(by_day: Database, ob: outbox.Outbox) -> None:
    from dispatchers.process.daemon import _schedule

    working = dispatcher(by_day, ob, adapters={"crm": MemoryAdapter()})

    jobs = _schedule(working, asyncio.Event()).get_jobs()

    assert [keep_bodies in job.args for job in jobs].count(True) == 1
