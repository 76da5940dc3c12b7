"""What operators decide about a schedule: pause, resume, trigger and forget."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import TABLES, Database
from support.schedules import HOUR, Reports

import outbox
from dispatchers import DecisionRefused, Tick
from dispatchers.admin.decide.audit import read_audit
from dispatchers.admin.decide.schedules import forget_schedule, pause_schedule, resume_schedule, trigger_schedule
from dispatchers.admin.read.schedules import list_schedules

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb, pytest.mark.in_portable_mode]


@pytest.fixture(params=["sync", "async"])
def reports(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Reports:
    return Reports(database, ob, is_async=request.param == "async")


def test_a_paused_schedule_enqueues_nothing_and_continues_from_its_resume(reports: Reports) -> None:
    reports.run_once()
    reports.since(5 * HOUR)
    decide(reports, pause_schedule)

    assert reports.run_once() == 0

    decide(reports, resume_schedule)
    assert reports.run_once() == 0
    assert (reports.ticks, reports.row.paused, reports.row.decided_by) == ([], False, "ada")
    with reports.database.observer.connect() as connection:
        audited = [(row.action, row.kind, row.target) for row in read_audit(connection, TABLES, max_rows=9).rows]
    assert audited == [("resume", "schedule", "report"), ("pause", "schedule", "report")]


def test_a_trigger_has_a_parent_of_its_own(reports: Reports) -> None:
    reports.run_once(beats=True)
    decide(reports, pause_schedule)  # it is triggered all the same
    decide(reports, trigger_schedule)
    with pytest.raises(DecisionRefused, match="no dispatcher has carried out yet"):
        decide(reports, trigger_schedule)

    assert reports.run_once() == 1

    (tick,) = reports.ticks
    assert (tick.actor, reports.row.triggered_at) == ("ada", None)
    assert reports.parents == [f"report manual:{tick.at.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}:ada"]
    assert reports.run_once() == 0


def test_a_trigger_at_a_local_time_that_occurs_twice_is_carried_out(database: Database, ob: outbox.Outbox) -> None:
    """Python compares such a time as unequal to every time of another zone."""
    reports = Reports(database, ob, timezone="Europe/Berlin")
    reports.run_once()
    at = datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    reports.change(triggered_at=at, triggered_by="ada")

    reports.run_once()

    assert [(tick.at.astimezone(UTC), tick.actor) for tick in reports.ticks] == [(at, "ada")]
    assert reports.row.triggered_at is None


def test_a_trigger_that_fails_stops_no_instant_and_is_withdrawn(database: Database, ob: outbox.Outbox) -> None:
    reports = Reports(database, ob)

    def work(session: Session, tick: Tick) -> None:
        if tick.actor is not None:
            raise ValueError("not by hand")

    reports.work = work
    reports.run_once(beats=True)
    decide(reports, trigger_schedule)
    reports.since(HOUR)

    reports.run_once()

    assert [tick.actor for tick in reports.ticks] == ["ada", None]
    assert reports.row.triggered_by == "ada"
    decide(reports, pause_schedule)
    assert reports.row.triggered_by is None


def test_the_jitter_of_an_instant_is_no_lag(postgresql: Database, ob: outbox.Outbox) -> None:
    reports = Reports(postgresql, ob, jitter=timedelta(minutes=30))
    reports.run_once(beats=True)
    now = datetime.now(UTC)
    reports.change(next_at=now - timedelta(seconds=1), enqueued_to=now - HOUR)

    with postgresql.observer.connect() as connection:
        (state,) = list_schedules(connection, TABLES).schedules
    assert state.behind_seconds == 0


def test_a_trigger_that_no_dispatcher_would_carry_out_is_refused(reports: Reports) -> None:
    reports.run_once()

    with pytest.raises(DecisionRefused, match="no running dispatcher has the schedule"):
        decide(reports, trigger_schedule)


def test_a_schedule_is_forgotten_only_when_no_dispatcher_has_it(reports: Reports) -> None:
    reports.run_once(beats=True)
    with pytest.raises(DecisionRefused, match="remove it from the code first"):
        decide(reports, forget_schedule)

    with reports.database.observer.begin() as connection:
        connection.execute(sa.delete(TABLES.dispatcher))
    decide(reports, forget_schedule)

    assert reports.database.rows(TABLES.schedule) == []


def decide(reports: Reports, decision: Any) -> None:
    with reports.database.observer.begin() as connection:
        decision(connection, TABLES, "report", actor="ada", reason="asked for")
