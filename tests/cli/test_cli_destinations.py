"""`outbox destinations`, `pause` and `resume`."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy.orm import Session
from support.cli_runner import document, error_of, set_row, succeeded
from support.dashboard import put_heartbeat
from support.database import TABLES, Database
from support.entries import HOUR, age, put, queue_row, run_once

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.flow_control.state import Taken, as_record
from outbox.sql.clock import clock, clock_plus

CALM = {"paused": False, "breaker": "closed", "breaker_failures": 0}


def throttle(database: Database, name: str, **values: Any) -> None:
    set_row(database, TABLES.destination, name=name, changed_at=clock(), **CALM | values)


def test_a_cooldown_that_is_over_is_none(database: Database) -> None:
    throttle(database, "crm", cooldown_until=clock_plus(-HOUR))

    printed = [
        document(name, database=database)["destinations"][0]["cooldown_until"] for name in ("status", "destinations")
    ]

    assert printed == [None, None]


def test_destinations_shows_what_is_due_and_what_throttles_each(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)
    age(database, 2 * HOUR)
    put(database, ob, "mail.send", due=HOUR)
    throttle(
        database, "stripe", breaker="open", breaker_until=clock_plus(HOUR), breaker_failures=12, rate_per_second=80.0
    )
    throttle(database, "crm", cooldown_until=clock_plus(HOUR))

    printed = document("destinations", database=database)

    crm, mail, stripe = printed["destinations"]
    assert (crm["name"], crm["due"], crm["paused"], crm["breaker"]) == ("crm", 3, False, "closed")
    assert 7200 <= crm["oldest_due_seconds"] < 7300
    assert crm["cooldown_until"] > printed["at"]
    assert (mail["name"], mail["due"], mail["oldest_due_seconds"], mail["cooldown_until"]) == ("mail", 0, None, None)
    assert (stripe["breaker"], stripe["breaker_failures"], stripe["rate_per_second"]) == ("open", 12, 80.0)
    assert stripe["breaker_until"] > printed["at"]


def test_destinations_for_people_is_a_table_with_the_reasons(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=2)
    throttle(database, "hooks", cooldown_until=clock_plus(timedelta(minutes=10.5)))
    throttle(database, "stripe", breaker="open", breaker_until=clock_plus(timedelta(minutes=3.5)), breaker_failures=12)
    succeeded("pause", "crm", "--actor", "ada", "--reason", "they move house", database=database)

    lines = succeeded("destinations", database=database).splitlines()

    assert lines[0].split() == ["DESTINATION", "DUE", "OLDEST", "DUE", "RATE", "NOTE"]
    assert lines[1].split()[:2] == ["crm", "2"]
    assert lines[1].endswith("by ada: they move house")
    assert lines[2].endswith("cooldown for another 10m")
    assert lines[3].endswith("breaker open for 3m after 12 failures")


def test_destinations_shows_how_many_of_the_shared_permits_are_taken(database: Database) -> None:
    now = datetime.now(UTC)
    taken = as_record([Taken(uuid4(), 2, now + HOUR), Taken(uuid4(), 1, now + HOUR), Taken(uuid4(), 5, now - HOUR)])
    throttle(database, "crm", max_permits=30, permits_taken=taken)
    throttle(database, "mail")

    crm, mail = document("destinations", database=database)["destinations"]
    lines = succeeded("destinations", database=database).splitlines()

    assert (crm["max_permits"], crm["permits_taken"]) == (30, 3)
    assert (mail["max_permits"], mail["permits_taken"]) == (None, 0)
    assert lines[1].endswith("3 of 30 permits in use")


def test_destinations_without_any_says_so(database: Database) -> None:
    assert succeeded("destinations", database=database) == "the queue is empty\n"


def test_pause_and_resume_are_on_record_with_who_and_why(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob)

    paused = document("pause", "crm", "--actor", "ada", "--reason", "they move house", database=database)
    (then,) = document("destinations", database=database)["destinations"]
    resumed = document("resume", "--reason", "asked", "crm", "--actor", "bob", database=database)
    (now,) = document("destinations", database=database)["destinations"]

    assert paused == {"destination": "crm", "decision": "pause", "actor": "ada", "is_known": True}
    assert (then["paused"], then["paused_reason"], then["decided_by"]) == (True, "they move house", "ada")
    assert resumed == {"destination": "crm", "decision": "resume", "actor": "bob"}
    assert (now["paused"], now["paused_reason"], now["decided_by"]) == (False, None, "bob")
    assert now["decided_at"] >= then["decided_at"]


def test_a_paused_destination_is_sent_nothing_until_it_is_resumed(database: Database, ob: outbox.Outbox) -> None:
    (id,) = put(database, ob)
    adapters = {"crm": MemoryAdapter()}

    assert (
        succeeded("pause", "--reason", "asked", "crm", "--actor", "ada", database=database)
        == "destination crm paused\n"
    )
    assert run_once(database, ob, adapters=adapters) == 0
    assert queue_row(database, id).deliveries == 0
    assert (
        succeeded("resume", "--reason", "asked", "crm", "--actor", "ada", database=database)
        == "destination crm resumed\n"
    )
    assert run_once(database, ob, adapters=adapters) == 1


def test_a_pause_of_what_has_no_entries_asks_whether_that_is_its_name(database: Database) -> None:
    printed = succeeded("pause", "--reason", "asked", "strpie", "--actor", "ada", database=database)

    assert (
        printed
        == "destination strpie paused; no entry waits for it and no running dispatcher serves it: check its name\n"
    )


@pytest.mark.parametrize("known", [True, False])
def test_what_nothing_holds_back_cannot_be_resumed(database: Database, known: bool) -> None:
    if known:
        throttle(database, "crm")

    status, code, text = error_of("resume", "--reason", "asked", "crm", "--actor", "ada", database=database)

    assert (status, code) == (4, "wrong_state")
    assert text == "destination 'crm' is not paused or throttled: `outbox destinations` lists all"


def test_every_name_that_an_entry_may_have_can_be_paused(database: Database, ob: outbox.Outbox) -> None:
    name = "https://hooks.example.com:8443/\u001b[31m"
    put(database, ob, destination=name)

    printed = succeeded("pause", "--reason", "asked", name, "--actor", "ada", database=database)

    assert printed == "destination https://hooks.example.com:8443/\\x1b[31m paused\n"


def test_a_served_destination_without_entries_is_listed_and_known(database: Database) -> None:
    put_heartbeat(database, "mail.send")

    before = document("destinations", database=database)["destinations"]
    paused = succeeded("pause", "mail", "--reason", "asked", database=database)
    of_account = document("pause", "mail:eu", "--reason", "asked", database=database)

    assert [(each["name"], each["due"]) for each in before] == [("mail", 0)]
    assert paused == "destination mail paused\n"
    assert of_account["is_known"]


@pytest.mark.parametrize("name", ["status", "destinations"])
def test_of_1000_destinations_the_30_that_need_attention_are_printed(
    database: Database, ob: outbox.Outbox, name: str
) -> None:
    with Session(database.engine) as session, session.begin():
        for number in range(1000):
            ob.enqueue(session, f"d{number:03}.send", {}, parent="order:1")
    paused = [f"d{number:03}" for number in (0, 500, 999)]
    for destination in paused:
        throttle(database, destination, paused=True, decided_by="ada", decided_at=clock())

    printed, whole = (succeeded(name, *option, database=database) for option in ((), ("--all",)))

    shown = [line.split()[0] for line in printed.splitlines() if line.startswith("d")]
    assert len(shown) == 30
    assert set(paused) < set(shown)
    assert shown == sorted(shown)
    assert "and 970 more destinations: --all or --json shows them" in printed
    assert sum(line.startswith("d") for line in whole.splitlines()) == 1000
    assert " more destinations" not in whole
    assert len(document(name, database=database)["destinations"]) == 1000
