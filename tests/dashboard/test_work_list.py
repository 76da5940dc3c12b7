"""The first page as a work list: the evidence, the window of the key, and the decisions that are safe now."""

import re
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.cli_runner import PRIVATE, put_ended, put_uncertain, set_row
from support.dashboard import Browser, dashboard, put_heartbeat, signed_in
from support.database import TABLES, Database
from support.entries import change, put, put_one, run_once

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import decisions
from dispatchers.admin.read.destinations import NOT_SENT_SHOWN
from outbox.sql.clock import clock, clock_plus


def put_case(database: Database, ob: outbox.Outbox, *, hours: float = 1) -> str:
    """An entry whose only attempt, so long ago, timed out."""
    id = put_uncertain(database, ob, parent="order:1")
    change(database, id, in_doubt_since=clock_plus(-timedelta(hours=hours)))
    put_event(database, str(id), kind="attempt", delivery=1, reason="no answer within 30 s")
    return str(id)


def put_event(database: Database, id: str, **event: Any) -> None:
    set_row(database, TABLES.event, entry_id=UUID(id), at=clock(), **event)


def offered(database: Database, *roles: str) -> dict[str, str | None]:
    with dashboard(database, authenticate=signed_in(*roles or ("operator",))) as app:
        (case,) = Browser(app).api("/uncertain").json()["cases"]
    return {offer["decision"]: offer["why_not"] for offer in case["offers"] or []}


def test_the_work_list_shows_the_evidence_the_key_and_the_countdown(database: Database, ob: outbox.Outbox) -> None:
    id = put_case(database, ob)
    put_heartbeat(database)

    with dashboard(database) as app:
        page = Browser(app).text("/")

    assert ob.child_key("order:1", "mail.send") in page
    assert "attempt, delivery 1" in page
    assert "Closes <time" in page
    assert "in 22 h" in page
    assert "No retry is planned. Send it again before the window closes" in page
    assert f"outbox resend {id} --key same" in page
    assert "27 bytes" in page


def test_what_is_not_safe_is_explained_and_has_no_button(database: Database, ob: outbox.Outbox) -> None:
    put_case(database, ob)
    put_heartbeat(database)

    with dashboard(database) as app:
        page = Browser(app).text("/")

    assert 'value="same_key"' in page
    assert 'value="new_key"' not in page
    assert "Send again under a new key: the service still remembers its key" in page


def test_a_decision_that_is_not_safe_is_refused_also_if_it_is_sent(database: Database, ob: outbox.Outbox) -> None:
    id = put_case(database, ob)
    put_heartbeat(database)

    with dashboard(database) as app:
        browser = Browser(app)
        browser.text("/")
        answer = browser.send(f"/entries/{id}/decide", decision="new_key", reason="impatient")

    assert answer.status_code == 409
    assert "the service still remembers its key" in answer.text


def test_a_decision_about_an_older_version_of_the_entry_is_refused(database: Database, ob: outbox.Outbox) -> None:
    id = put_case(database, ob)
    put_heartbeat(database)
    answers = []

    with dashboard(database) as app:
        browser = Browser(app)
        browser.text("/")
        seen = browser.api(f"/entries/{id}").json()["version"]
        put_event(database, id, kind="lookup", delivery=2, reason="the service found nothing yet")
        answers.append(browser.send(f"/entries/{id}/decide", decision="did_not_happen", reason="asked"))
        answers.append(decided(browser, id, version=seen))
        answers.append(decided(browser, id, "propose", decision="happened", version=seen))
        seen = browser.api(f"/entries/{id}").json()["version"]
        change(database, UUID(id), attempts=2)
        answers.append(decided(browser, id, version=seen))
        (case,) = browser.api("/uncertain").json()["cases"]
        fresh = decided(browser, id, version=case["version"])

    assert [answer.status_code for answer in answers] == [409] * 4
    assert "its last event is the lookup: the service found nothing yet" in answers[0].text
    assert f'<a href="/entries/{id}">Read it again</a>' in answers[0].text
    assert (answers[3].json()["code"], fresh.status_code) == ("changed", 200)


def decided(browser: Browser, id: str, action: str = "decide", **fields: str) -> Any:
    body = {"decision": "did_not_happen", "reason": "asked", **fields}
    return browser.api(f"/entries/{id}/{action}", body, Authorization="Bearer t")


def test_a_viewer_sees_the_evidence_but_no_key_and_no_decision(database: Database, ob: outbox.Outbox) -> None:
    id = put_case(database, ob)
    put_heartbeat(database)
    key = ob.child_key("order:1", "mail.send")

    with dashboard(database, authenticate=signed_in("viewer")) as app:
        browser = Browser(app)
        pages = browser.text("/"), browser.text(f"/entries/{id}"), browser.text("/entries")
        documents = [browser.api(path).text for path in ("/uncertain", f"/entries/{id}", "/entries")]

    assert "attempt, delivery 1" in pages[0]
    assert offered(database, "viewer") == {}
    assert all(key not in text and 'name="decision"' not in text for text in (*pages, *documents))


def test_revealing_needs_its_role_and_a_reason_and_is_recorded(database: Database, ob: outbox.Outbox) -> None:
    id = put_case(database, ob)

    with dashboard(database) as app:
        refusal = Browser(app).api(f"/entries/{id}/reveal", {"reason": "x"}, Authorization="Bearer t")
    with dashboard(database, authenticate=signed_in("payload_reader", name="grace")) as app:
        browser = Browser(app)
        browser.text(f"/entries/{id}")
        page = browser.send(f"/entries/{id}/reveal", reason="the customer asks")
        document = browser.api(f"/entries/{id}/reveal", {"reason": "again"}, Authorization="Bearer t").json()
        without = browser.api(f"/entries/{id}/reveal", {}, Authorization="Bearer t")

    assert (refusal.status_code, without.status_code) == (403, 422)
    assert PRIVATE["card"] in page.text
    assert document["payload"] == PRIVATE
    assert [(row.actor, row.action, row.reason) for row in database.rows(TABLES.audit)] == [
        ("grace", "reveal_payload", "the customer asks"),
        ("grace", "reveal_payload", "again"),
    ]


def test_the_answer_of_the_service_is_hidden_until_it_is_revealed(database: Database, ob: outbox.Outbox) -> None:
    id = put_ended(database, ob)

    with dashboard(database, authenticate=signed_in("payload_reader")) as app:
        browser = Browser(app)
        page, entry = browser.text(f"/entries/{id}"), browser.api(f"/entries/{id}").json()
        revealed = browser.api(f"/entries/{id}/reveal", {"reason": "x"}, Authorization="Bearer t").json()

    assert "ch_1" not in page + str(entry)
    assert entry["has_result"] is True
    assert revealed["result"] == {"id": "ch_1"}


@pytest.mark.parametrize("depth", [400, 100_000])
def test_what_is_nested_deeply_is_revealed_as_text(database: Database, ob: outbox.Outbox, depth: int) -> None:
    id, nested = put_ended(database, ob), "[" * depth + "]" * depth
    database.execute(sa.update(TABLES.entry).values(payload=nested.encode(), options=nested))
    database.execute(sa.update(TABLES.settlement).values(result=nested))

    with dashboard(database, authenticate=signed_in("payload_reader")) as app:
        browser = Browser(app)
        entry = browser.api(f"/entries/{id}").json()
        revealed = browser.api(f"/entries/{id}/reveal", {"reason": "x"}, Authorization="Bearer t").json()
        browser.text(f"/entries/{id}")
        page = browser.send(f"/entries/{id}/reveal", reason="x")

    assert [entry["options"], revealed["payload"], revealed["result"]] == [nested] * 3
    assert page.status_code == 200


def test_an_entry_lists_its_siblings(database: Database, ob: outbox.Outbox) -> None:
    id = put_case(database, ob)
    sibling = put_one(database, ob, "crm.upsert", parent="order:1")
    put_one(database, ob, "crm.upsert", parent="order:2")

    with dashboard(database) as app:
        found = Browser(app).api(f"/entries/{id}").json()["siblings"]

    assert {each["id"] for each in found} == {id, str(sibling)}


@pytest.mark.parametrize("decision", ["retry", "cancel"])
def test_a_waiting_entry_is_offered_what_its_state_allows(database: Database, ob: outbox.Outbox, decision: str) -> None:
    id = put_one(database, ob)

    with dashboard(database) as app:
        browser = Browser(app)
        page = browser.text(f"/entries/{id}")
        answer = browser.send(f"/entries/{id}/decide", decision=decision, reason="now")

    assert f'value="{decision}"' in page
    assert f"outbox {decision} {id}" in page
    assert 'value="happened"' not in page
    assert answer.status_code == 303


# --- what is not sent


def test_the_first_page_shows_what_is_not_sent_if_nothing_is_uncertain(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob)
    until = clock_plus(timedelta(minutes=2))
    throttled: dict[str, dict[str, Any]] = {
        "bank": {"breaker": "open", "breaker_until": until, "breaker_failures": 10},
        "carrier": {"breaker": "half_open", "breaker_failures": 1},
        "crm": {},
        "mail": {"cooldown_until": until},
        "sms": {"cooldown_until": clock_plus(-timedelta(minutes=2))},
    }
    with database.engine.begin() as connection:
        for name, values in throttled.items():
            row = {"name": name, "changed_at": clock(), "paused": False, "breaker": "closed", "breaker_failures": 0}
            connection.execute(sa.insert(TABLES.destination).values(row | values))
        decisions.pause(connection, TABLES, "crm", actor="ada", reason="they move house")

    with dashboard(database, authenticate=signed_in("viewer")) as app:
        page = Browser(app).text("/")
        found = Browser(app).api("/uncertain").json()["not_sent"]

    assert "Nothing is uncertain." in page
    for text in ("Not everything is sent now", ">breaker open<", ">paused<", ">cooling<", "they move house"):
        assert text in page
    assert [each["name"] for each in found["destinations"]] == ["bank", "carrier", "crm", "mail"]
    assert re.findall(r"after \d+ \w+", page) == ["after 10 failures", "after 1 failure"]
    assert "until in" not in page


@pytest.mark.parametrize("count", [0, 1, 5, 30])
def test_the_first_page_names_a_few_of_many_stopped_destinations(sqlite: Database, count: int) -> None:
    with sqlite.engine.begin() as connection:
        for number in range(count):
            decisions.pause(connection, TABLES, f"shop {number:02}", actor="ada", reason="asked")

    with dashboard(sqlite) as app:
        page, found = Browser(app).text("/"), Browser(app).api("/uncertain").json()["not_sent"]

    assert (len(found["destinations"]), found["destinations_in_all"]) == (min(count, NOT_SENT_SHOWN), count)
    assert ("Not everything is sent now" in page) == (count > 0)
    assert ("All 30 of them" in page) == (count == 30)


def test_a_suspended_database_is_named_on_the_first_page(database: Database, ob: outbox.Outbox) -> None:
    run_once(database, ob, adapters={"crm": MemoryAdapter()})
    database.execute(sa.update(TABLES.meta).values(suspended_reason="restored from a backup"))

    with dashboard(database) as app:
        page = Browser(app).text("/")

    assert "Nothing is sent: restored from a backup" in page
