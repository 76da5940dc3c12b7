"""The schedules of an app on each database: what is enqueued, once, by however many dispatchers of whatever releases."""

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
from apscheduler.triggers.combining import AndTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger
from sqlalchemy.orm import Session
from support.database import TABLES, Database, Order
from support.entries import dispatcher, pumping
from support.retention import maintenance
from support.schedules import DAY, HOUR, FailingTrigger, Reports

import outbox
from dispatchers import Fleet, Operations, Suspended, Tick
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.read.schedules import list_schedules

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb, pytest.mark.in_portable_mode]

NOON = datetime(2026, 11, 2, 12, tzinfo=UTC)


@pytest.fixture(params=["sync", "async"])
def reports(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Reports:
    return Reports(database, ob, is_async=request.param == "async")


def stamp(at: datetime) -> str:
    return f"report {at:%Y-%m-%dT%H:%M:00Z}"


def test_a_new_schedule_enqueues_nothing_of_its_past(reports: Reports) -> None:
    assert reports.run_once() == 0

    row = reports.row
    assert (row.name, row.expression, row.paused) == ("report", "@hourly UTC", False)
    assert timedelta(0) < row.next_at - row.enqueued_to <= HOUR
    assert (reports.ticks, reports.parents) == ([], [])


def test_a_due_instant_is_enqueued_and_sent_with_its_parent(reports: Reports) -> None:
    reports.run_once()
    reports.since(HOUR)

    assert reports.run_once() == 1

    (tick,) = reports.ticks
    assert (tick.schedule, tick.actor, tick.at.second, tick.parent.source) == ("report", None, 0, "schedule")
    assert reports.parents == [stamp(tick.at)]
    assert (reports.row.enqueued_to, reports.row.next_at) == (tick.at, tick.at + HOUR)
    assert reports.run_once() == 0
    assert len(reports.ticks) == 1


def test_a_year_of_downtime_enqueues_one_instant_and_says_so(
    reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    reports.run_once()
    reports.since(365 * DAY)

    assert reports.run_once() == 1

    assert len(reports.parents) == 1
    assert "skipped more than 1000 instants that were missed" in caplog.text


def test_an_entry_that_retention_deleted_is_not_enqueued_again(reports: Reports) -> None:
    reports.run_once()
    reports.since(HOUR)
    reports.run_once()
    with reports.database.observer.begin() as connection:
        connection.execute(sa.update(TABLES.settlement).values(settled_at=datetime.now(UTC) - 400 * DAY))

    deleted = asyncio.run(maintenance(reports.database).run_once())

    assert (deleted["entries"], reports.parents) == (1, [])
    assert reports.run_once() == 0
    assert len(reports.ticks) == 1


def test_a_lost_row_enqueues_no_instant_again_that_has_entries(reports: Reports) -> None:
    """For example after a restore of this table alone, or `outbox schedules forget`."""
    reports.run_once()
    reports.since(HOUR)
    reports.run_once()
    reports.since(HOUR)

    assert reports.run_once() == 0
    assert len(reports.ticks) == 1
    assert reports.row.enqueued_to == reports.ticks[0].at


def test_a_failing_function_leaves_nothing_and_is_called_again(
    reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    good = reports.work

    def failing(session: Session, tick: Tick) -> None:
        session.add(Order(customer="ada", amount=1))
        good(session, tick)
        raise ValueError("no figures")

    reports.run_once()
    before = reports.since(HOUR)
    reports.work = failing

    assert reports.run_once() == 0

    assert (reports.parents, reports.database.orders, reports.row.enqueued_to) == ([], [], before)
    assert "its function raised ValueError" in caplog.text
    reports.work = good
    assert reports.run_once() == 1


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_function_must_not_end_its_transaction(reports: Reports, ends: str) -> None:
    def ending(session: Session, tick: Tick) -> None:
        reports.ob.enqueue(session, "mail.report", {})
        session.flush()
        getattr(session, ends)()

    reports.run_once()
    before = reports.since(HOUR)
    reports.work = ending

    assert reports.run_once() == 0
    assert (reports.parents, reports.row.enqueued_to) == ([], before)


def test_a_function_may_enqueue_typed_effects(reports: Reports) -> None:
    effect = outbox.Effect("mail.report", list[str])
    reports.work = lambda session, tick: effect.enqueue(session, [tick.schedule], outbox=reports.ob)
    reports.run_once()
    reports.since(HOUR)

    assert reports.run_once() == 1
    assert reports.parents == [stamp(reports.ticks[0].at)]


def test_a_function_may_enqueue_nothing(reports: Reports) -> None:
    reports.run_once()
    reports.since(HOUR)
    reports.work = lambda session, tick: None

    reports.run_once()

    assert (len(reports.ticks), reports.row.enqueued_to) == (1, reports.ticks[0].at)


# --- a schedule does not stop the others


def test_a_trigger_that_raises_stops_only_its_own_schedule(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    trigger = FailingTrigger()
    reports = Reports(database, ob, name="a.report", trigger=trigger)
    others: list[Tick] = []
    reports.effects.periodic("@hourly", name="b.other")(lambda session, tick: others.append(tick))
    reports.run_once()
    reports.since(HOUR)
    trigger.fails = True

    reports.run_once(beats=True)

    assert (len(others), reports.ticks) == (1, [])
    assert "schedule 'a.report': its trigger raised LookupError" in caplog.text
    with database.observer.connect() as connection:
        found = {each.name: each.failures for each in list_schedules(connection, TABLES).schedules}
    (failure,) = found["a.report"]
    assert (failure.endswith(": its trigger raised LookupError"), found["b.other"]) == (True, [])
    trigger.fails = False
    reports.run_once()
    assert len(reports.ticks) == 1


def test_a_trigger_that_raises_at_its_first_start_is_recorded(database: Database, ob: outbox.Outbox) -> None:
    trigger = FailingTrigger()
    reports = Reports(database, ob, trigger=trigger)
    trigger.fails = True

    reports.run_once()
    assert (reports.row.name, reports.row.next_at) == ("report", None)

    trigger.fails = False
    reports.run_once()
    assert reports.row.next_at is not None


def test_a_slow_function_does_not_delay_the_other_schedules(postgresql: Database, ob: outbox.Outbox) -> None:
    other_is_done = threading.Event()
    reports = Reports(postgresql, ob, name="a.slow")
    reports.effects.periodic("@hourly", name="b.other")(lambda session, tick: other_is_done.set())
    reports.work = lambda session, tick: waited.append(other_is_done.wait(20))
    waited: list[bool] = []
    reports.run_once()
    reports.since(HOUR)

    reports.run_once()

    assert waited == [True]


def test_a_function_that_meets_a_lock_does_not_stop_the_others(postgresql: Database, ob: outbox.Outbox) -> None:
    reports = Reports(postgresql, ob, name="a.locked")
    reports.work = lambda session, tick: session.execute(sa.text("LOCK TABLE shop_order NOWAIT"))
    others: list[Tick] = []
    reports.effects.periodic("@hourly", name="b.other")(lambda session, tick: others.append(tick))
    reports.run_once()
    reports.since(HOUR)

    with postgresql.observer.begin() as connection:
        connection.execute(sa.text("LOCK TABLE shop_order"))
        with pytest.raises(sa.exc.OperationalError):
            reports.run_once()

    assert len(others) == 1


# --- several dispatchers


def test_three_dispatchers_enqueue_each_instant_once(database: Database, ob: outbox.Outbox) -> None:
    apps = [Reports(database, ob, catch_up="all") for _ in range(3)]
    apps[0].run_once()
    missed = apps[0].since(9 * HOUR)

    barrier = threading.Barrier(3, action=lambda: apps[0].change(paused=False))

    def work(app: Reports) -> None:
        async def main() -> None:
            working = app.dispatcher()
            try:
                await working.run_once()  # nothing is due, and from now on it is at work
                barrier.wait(30)
                await working.run_once()
            finally:
                await working.close()

        asyncio.run(main())

    apps[0].change(paused=True)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, apps))
    apps[0].run_once()  # what each has left to the others

    called = sorted({tick.at for app in apps for tick in app.ticks})  # what a conflict undid was called again
    assert called == [missed + n * HOUR for n in range(1, len(called) + 1)]
    assert len(called) >= 9
    assert apps[0].parents == [stamp(at) for at in called]


def test_a_locked_row_is_left_to_the_dispatcher_that_has_it(postgresql: Database, ob: outbox.Outbox) -> None:
    reports = Reports(postgresql, ob)
    reports.run_once()
    reports.since(HOUR)

    with postgresql.observer.begin() as connection:
        connection.execute(sa.select(TABLES.schedule).with_for_update())
        assert reports.run_once() == 0

    assert reports.run_once() == 1


def test_a_function_is_not_called_while_another_dispatcher_calls_it(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = Reports(postgresql, ob), Reports(postgresql, ob)
    begun, may_end = threading.Event(), threading.Event()

    def slow(session: Session, tick: Tick) -> None:
        one.enqueue(session, tick)
        begun.set()
        may_end.wait(20)

    one.work = slow
    one.run_once()
    one.since(5 * HOUR)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(one.run_once)
        assert begun.wait(20)
        try:
            assert other.run_once() == 0
        finally:
            may_end.set()
        assert running.result() == 1

    assert (len(one.ticks), other.ticks) == (1, [])
    assert caplog.text.count("skipped 4 instants that were missed") == 1  # by the one that has recorded it


# --- two releases


def test_a_changed_expression_counts_from_its_first_start(database: Database, ob: outbox.Outbox) -> None:
    """From weekly to each hour: no burst, and nothing twice."""
    Reports(database, ob, trigger="0 9 * * MON").run_once()
    changed = Reports(database, ob, catch_up="all")
    changed.since(20 * DAY)
    changed.change(next_at=changed.row.enqueued_to + 7 * DAY)

    assert changed.run_once() == 0

    assert (changed.row.expression, changed.ticks) == ("@hourly UTC", [])
    changed.since(HOUR)
    assert changed.run_once() == 1


def test_an_instant_that_is_being_enqueued_is_left_to_the_older_release(database: Database, ob: outbox.Outbox) -> None:
    older = Reports(database, ob)
    older.run_once()
    older.since(HOUR)
    older.change(next_at=datetime.now(UTC) - timedelta(seconds=5))
    newer = Reports(database, ob, trigger="0 9 * * MON")

    newer.run_once()
    assert newer.row.expression == "@hourly UTC"

    assert older.run_once() == 1
    newer.run_once()
    assert newer.row.expression == "0 9 * * MON UTC"


def test_the_newer_release_has_the_schedule_while_it_lives(database: Database, ob: outbox.Outbox) -> None:
    async def main() -> None:
        older, newer = Reports(database, ob), Reports(database, ob, trigger="0 */2 * * *")
        working = [older.dispatcher(), newer.dispatcher()]
        try:
            for each in working:
                await each.run_once()
                await each.heartbeats.beat()
            older.since(3 * HOUR)

            await working[0].run_once()
            await working[0].run_once()
            assert (older.ticks, older.row.expression) == ([], "0 */2 * * * UTC")

            await working[1].heartbeats.leave()  # the deploy is rolled back
            await working[0].run_once()
            assert older.ticks == []  # a heartbeat may come late
            await working[0].run_once()
            assert (len(older.ticks), older.row.expression) == (1, "@hourly UTC")
        finally:
            for each in working:
                await each.close()

    asyncio.run(main())


# --- clocks


def test_a_clock_that_was_far_ahead_stops_no_schedule(reports: Reports, caplog: pytest.LogCaptureFixture) -> None:
    """What it has enqueued ahead is not enqueued again."""
    reports.run_once()
    reports.since(HOUR)
    reports.run_once()
    at = reports.ticks[0].at
    reports.since(-365 * DAY)

    reports.run_once()
    assert "the database's clock was set back" in caplog.text
    reports.change(enqueued_to=at - HOUR)

    assert reports.run_once() == 0
    assert len(reports.ticks) == 1


def test_a_clock_that_is_a_little_ahead_enqueues_nothing_twice(reports: Reports) -> None:
    reports.run_once()
    ahead = datetime.now(UTC) + timedelta(minutes=30)
    reports.change(enqueued_to=ahead)

    assert reports.run_once() == 0
    assert reports.row.enqueued_to == ahead


# --- the timer


def test_a_running_dispatcher_wakes_at_each_instant_and_does_not_poll(postgresql: Database, ob: outbox.Outbox) -> None:
    statements: list[str] = []
    reports = Reports(postgresql, ob, trigger=IntervalTrigger(seconds=2, start_date=NOON))
    late: list[timedelta] = []
    reports.work = lambda session, tick: late.append(datetime.now(UTC) - tick.at)

    @sa.event.listens_for(postgresql.dispatchers_engine, "before_cursor_execute")
    def record(connection: object, cursor: object, statement: str, *rest: object) -> None:
        statements.append(statement)

    working = reports.dispatcher()
    asyncio.run(pumping(working, lambda: len(late) >= 3))

    looks = [each for each in statements if "FROM outbox_schedule" in each and " IN (" in each]
    assert len(looks) <= 2 * len(late) + 3
    assert min(late) < timedelta(seconds=1)
    assert len({tick.at for tick in reports.ticks}) == len(reports.ticks)


# --- who has no schedules


def test_without_schedules_no_statement_is_sent(postgresql: Database, ob: outbox.Outbox) -> None:
    from support.entries import run_once

    statements: list[str] = []
    engine = postgresql.dispatchers_engine

    @sa.event.listens_for(engine, "before_cursor_execute")
    def record(connection: object, cursor: object, statement: str, *rest: object) -> None:
        statements.append(statement)

    run_once(postgresql, ob, adapters={"mail": MemoryAdapter()})

    assert statements
    assert not [each for each in statements if "outbox_schedule" in each]


def test_a_suspended_database_enqueues_nothing(postgresql: Database, ob: outbox.Outbox) -> None:
    """A copy of the database must not send the reports of the original."""
    reports = Reports(postgresql, ob)
    reports.run_once()
    reports.since(HOUR)
    with postgresql.observer.begin() as connection:
        connection.execute(sa.update(TABLES.meta).values(suspended_reason="restored"))

    async def main() -> None:
        working = reports.dispatcher()
        try:
            with pytest.raises(Suspended):
                await working.run_once()
            await working._schedules.run_once()  # as a running dispatcher does
        finally:
            await working.close()

    asyncio.run(main())
    assert (reports.ticks, reports.parents) == ([], [])


def test_the_database_of_an_async_function_needs_an_async_engine(postgresql: Database, ob: outbox.Outbox) -> None:
    reports = Reports(postgresql, ob, is_async=True)
    reports.is_async = False

    with pytest.raises(outbox.ConfigurationError, match=r"periodic\('report'\) is async"):
        reports.dispatcher()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"trigger": "0 9 * *"}, "has 4 fields"),
        ({"trigger": "0 9 * * 8"}, "must be 0 to 7"),
        ({"trigger": "0 9 * * sat-mon"}, "wrong order"),
        ({"trigger": "0 9 * * 1/0"}, "must be a number above 0"),
        ({"trigger": "61 9 * * *"}, "no crontab expression"),
        ({"trigger": "0 0 30 2 *"}, "is never due"),
        ({"timezone": "Europe/Berlim"}, "pip install tzdata"),
        ({"timezone": "Europe"}, "is unknown"),
        ({"trigger": IntervalTrigger(minutes=5)}, "give it a start_date"),
        ({"trigger": IntervalTrigger(minutes=5, start_date=NOON, jitter=3)}, "random in each process"),
        ({"trigger": IntervalTrigger(minutes=5, start_date=NOON), "timezone": "UTC"}, "its own timezone"),
        ({"trigger": object()}, "give a crontab expression"),
        ({"trigger": CalendarIntervalTrigger(months=1, timezone="UTC")}, "counts from its previous instant"),
        ({"trigger": AndTrigger([CronTrigger(hour=9), CronTrigger(hour=10)])}, "may search without end"),
        ({"jitter": HOUR}, "must be shorter than the time between two instants, which is 1:00:00"),
        ({"jitter": 5}, "must be a timedelta"),
        ({"catch_up": "every"}, "must be one of latest, all, none"),
        ({"name": "Weekly"}, "lower-case words joined by dots"),
    ],
)
def test_a_wrong_declaration_is_refused_with_the_way_out(
    settings: dict[str, Any], text: str, postgresql: Database, ob: outbox.Outbox
) -> None:
    with pytest.raises((outbox.ConfigurationError, outbox.InvalidValue), match=re.escape(text)):
        Reports(postgresql, ob, **settings)


def test_a_function_of_other_arguments_is_refused() -> None:
    with pytest.raises(outbox.ConfigurationError, match=r"two arguments, \(session, tick\), not \(tick\)"):
        Operations().periodic("@daily", name="report")(lambda tick: None)


def test_a_fleet_refuses_an_async_function(postgresql: Database, ob: outbox.Outbox) -> None:
    reports = Reports(postgresql, ob, is_async=True)

    with pytest.raises(outbox.ConfigurationError, match="a fleet has synchronous drivers"):
        Fleet({"shop": postgresql.url}, include=[reports.effects], adapters={"mail": MemoryAdapter()}, outbox=ob)


def test_two_schedules_of_one_name_are_refused(postgresql: Database, ob: outbox.Outbox) -> None:
    one, other = Reports(postgresql, ob), Reports(postgresql, ob)

    with pytest.raises(outbox.ConfigurationError, match="registered twice"):
        one.effects.periodic("@daily", name="report")(lambda session, tick: None)
    with pytest.raises(outbox.ConfigurationError, match="registered twice"):
        dispatcher(postgresql, ob, include=[one.effects, other.effects], adapters={"mail": MemoryAdapter()})
