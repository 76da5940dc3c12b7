"""The pages of the schedules: the list, one of them with its entries, and the decisions about it."""

import pytest
from support.dashboard import Browser, dashboard, signed_in
from support.database import Database
from support.schedules import HOUR, Reports

import outbox

pytestmark = pytest.mark.on_mariadb


@pytest.fixture
def reports(database: Database, ob: outbox.Outbox) -> Reports:
    made = Reports(database, ob)
    made.run_once()
    made.since(HOUR)
    made.run_once(beats=True)
    return made


def test_the_pages_show_what_is_due_and_what_was_enqueued(reports: Reports) -> None:
    with dashboard(reports.database, authenticate=signed_in("viewer")) as app:
        listed, one = Browser(app).text("/schedules"), Browser(app).text("/schedule", name="report")

    assert "@hourly UTC" in listed
    assert "mail.report" in one
    assert "Next instants" in one
    assert str(reports.database.entries[0].id) in one
    assert 'method="post"' not in one


def test_an_operator_pauses_triggers_and_resumes_from_the_page(reports: Reports) -> None:
    with dashboard(reports.database, authenticate=signed_in("operator", name="grace")) as app:
        browser = Browser(app)
        browser.text("/schedule", name="report")
        paused = browser.send("/schedules/pause", name="report", reason="audit")
        during = browser.text(paused.headers["location"])
        browser.send("/schedules/trigger", name="report", reason="asked for")
        resumed = browser.send("/schedules/resume", name="report", reason="audit done")
        after = browser.text(resumed.headers["location"])
        audit = browser.text("/audit")

    reports.run_once()
    assert "by grace: audit" in during
    assert "a dispatcher carries it out" in after
    assert "/schedule?name=report" in audit
    assert [tick.actor for tick in reports.ticks] == [None, "grace"]
    assert not reports.row.paused


def test_an_unknown_schedule_is_not_found(reports: Reports) -> None:
    with dashboard(reports.database) as app:
        refusal = Browser(app).api("/schedule?name=reprot")

    assert refusal.status_code == 404
    assert "did you mean" in refusal.json()["detail"]
