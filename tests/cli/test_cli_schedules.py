"""`outbox schedules`: what it lists and shows, and the decisions about a schedule."""

import json
from datetime import timedelta

from support.cli_runner import command, document, error_of, refused, succeeded
from support.database import TABLES, Database
from support.schedules import HOUR, Reports

import outbox


def test_the_schedules_are_listed_with_their_state(database: Database, ob: outbox.Outbox) -> None:
    assert "no schedule is recorded" in succeeded("schedules", "list", database=database)
    reports = Reports(database, ob, jitter=timedelta(seconds=5))
    reports.run_once(beats=True)

    text = succeeded("schedules", "list", database=database)
    (listed,) = document("schedules", "list", database=database)["schedules"]

    assert "@hourly UTC" in text
    assert "on time" in text
    assert (listed["name"], listed["catch_up"], listed["jitter_seconds"]) == ("report", "latest", 5)
    assert len(listed["served_by"]) == 1


def test_a_schedule_is_shown_with_the_entries_of_its_last_instants(database: Database, ob: outbox.Outbox) -> None:
    reports = Reports(database, ob)
    reports.run_once()
    reports.since(HOUR)
    reports.run_once(beats=True)

    found = document("schedules", "show", "report", database=database)
    text = succeeded("schedules", "show", "report", database=database)

    (recent,) = found["recent"]
    assert [(entry["operation"], entry["state"]) for entry in recent["entries"]] == [("mail.report", "delivered")]
    assert len(found["upcoming"]) == 5
    assert "mail.report" in text


def test_a_schedule_is_paused_triggered_and_resumed(database: Database, ob: outbox.Outbox) -> None:
    reports = Reports(database, ob)
    reports.run_once(beats=True)
    given = {"database": database}

    said = [
        succeeded("schedules", verb, "report", "--reason", "audit", "--actor", "ada", **given)
        for verb in ("pause", "trigger", "resume")
    ]
    reports.run_once()

    assert [line.strip() for line in said] == [
        "schedule report paused",
        "schedule report triggered: a dispatcher carries it out",
        "schedule report resumed",
    ]
    assert [tick.actor for tick in reports.ticks] == ["ada"]
    audited = document("audit", **given)["decisions"]
    assert [row["action"] for row in audited] == ["resume", "trigger", "pause"]
    assert "is not paused" in refused("schedules", "resume", "report", "--reason", "audit", **given)[1]


def test_a_misspelt_schedule_is_refused_with_its_likely_name(database: Database, ob: outbox.Outbox) -> None:
    Reports(database, ob).run_once()

    status, code, text = error_of("schedules", "pause", "reprot", "--reason", "audit", database=database)

    assert (status, code) == (3, "not_found")
    assert "did you mean 'report'?" in text


def test_a_schedule_that_is_not_served_is_found_and_forgotten(database: Database, ob: outbox.Outbox) -> None:
    reports = Reports(database, ob)
    reports.run_once()

    assert "not served" in succeeded("schedules", "list", database=database)
    findings = json.loads(command("doctor", "--json", database=database).stdout)["findings"]
    assert "no live dispatcher has the schedules report" in [each["text"] for each in findings]
    succeeded("schedules", "forget", "report", "--reason", "removed", database=database)

    assert database.rows(TABLES.schedule) == []


def test_the_doctor_finds_a_schedule_that_is_late(database: Database, ob: outbox.Outbox) -> None:
    reports = Reports(database, ob)
    reports.run_once(beats=True)
    reports.change(next_at=reports.since(2 * HOUR))

    findings = json.loads(command("doctor", "--json", database=database).stdout)["findings"]

    (found,) = [each for each in findings if each["check"] == "schedules"]
    assert found["severity"] == "error"
    assert found["text"].startswith("the schedule report has been due for 2:")


def test_a_schedule_that_fails_is_named_with_what_has_failed(database: Database, ob: outbox.Outbox) -> None:
    reports = Reports(database, ob)
    reports.run_once()
    reports.since(HOUR)
    reports.change(next_at=None)

    def failing(session: object, tick: object) -> None:
        raise ValueError("a customer's name")

    reports.work = failing
    reports.run_once(beats=True)
    reports.change(next_at=None)

    assert "failing" in succeeded("schedules", "list", database=database)
    shown = succeeded("schedules", "show", "report", database=database)
    findings = json.loads(command("doctor", "--json", database=database).stdout)["findings"]
    (found,) = [each for each in findings if each["check"] == "schedules"]
    assert "its function raised ValueError" in shown
    assert "its function raised ValueError" in found["text"]
    assert "a customer's name" not in shown + found["text"]
