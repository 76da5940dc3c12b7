"""The dashboard's pages and JSON answers, on PostgreSQL and SQLite."""

from uuid import uuid4

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from support.cli_runner import put_ended, put_uncertain
from support.dashboard import Browser, dashboard, signed_in
from support.database import TABLES, Database
from support.entries import put, put_one, queue_row

import outbox
from dispatchers.stored_outcome import read_outcome


def test_the_first_page_lists_what_is_uncertain(database: Database, ob: outbox.Outbox) -> None:
    id = put_uncertain(database, ob, parent="order:uncertain")
    put_one(database, ob, "mail.send", parent="order:waiting")

    with dashboard(database) as app:
        page = Browser(app).text("/")

    assert str(id)[:8] in page
    assert "order:uncertain" in page
    assert "no answer within 30 s" in page
    assert "order:waiting" not in page


def test_the_list_of_entries_keeps_its_filter_in_the_address(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "mail.send", count=3)
    put(database, ob, "crm.upsert", count=3)

    with dashboard(database) as app:
        browser = Browser(app)
        first = browser.text("/entries", operation="mail", limit="2")
        (following,) = [link for link in browser.links() if "after=" in link]
        second = browser.text(following.replace("&amp;", "&"))

    assert first.count("mail.send") == 2
    assert second.count("mail.send") == 1
    assert "crm.upsert" not in first + second
    assert "outbox list --operation mail" in first


def test_a_parameter_that_does_not_exist_is_refused_by_name(database: Database) -> None:
    with dashboard(database) as app:
        page = Browser(app).get("/entries", operatoin="mail")
        document = Browser(app).api("/entries?operatoin=mail")

    assert page.status_code == 400
    assert "operatoin" in page.text
    assert document.headers["content-type"] == "application/problem+json"
    assert (document.json()["code"], document.json()["field"]) == ("unknown_parameter", "operatoin")


@pytest.mark.parametrize(
    ("query", "field"), [("limit=0", "limit"), ("since=soon", "since"), ("state=lost", "state"), ("after=1,2", "after")]
)
def test_a_wrong_value_names_its_field(database: Database, query: str, field: str) -> None:
    with dashboard(database) as app:
        answer = Browser(app).api(f"/entries?{query}")

    assert (answer.status_code, answer.json()["field"]) == (422, field)


def test_an_entry_shows_everything_but_what_was_sent(database: Database, ob: outbox.Outbox) -> None:
    id = put_uncertain(database, ob, parent="order:1", discriminator="line-1")

    with dashboard(database) as app:
        page = Browser(app).text(f"/entries/{id}")
        entry = Browser(app).api(f"/entries/{id}").json()

    assert "line-1" in page
    assert "4242" not in page + str(entry)
    assert (entry["entry"]["state"], entry["payload_bytes"]) == ("uncertain", len('{"card":"4242424242424242"}'))


def test_an_ended_entry_offers_no_decision(database: Database, ob: outbox.Outbox) -> None:
    id = put_ended(database, ob)

    with dashboard(database) as app:
        page = Browser(app).text(f"/entries/{id}")

    assert "<form" not in page


def test_a_page_that_does_not_exist_says_so(database: Database) -> None:
    missing = uuid4()

    with dashboard(database) as app:
        browser = Browser(app)
        answers = [browser.get("/nothing"), browser.get(f"/entries/{missing}"), browser.api(f"/entries/{missing}")]

    assert [answer.status_code for answer in answers] == [404, 404, 404]
    assert f"entry {missing} does not exist" in answers[1].text
    assert answers[2].json()["detail"].startswith(f"entry {missing} does not exist")


def test_a_decision_is_recorded_with_a_name_and_a_reason(database: Database, ob: outbox.Outbox) -> None:
    id = put_uncertain(database, ob)

    with dashboard(database, authenticate=signed_in("operator", name="grace")) as app:
        browser = Browser(app)
        browser.text(f"/entries/{id}")
        answer = browser.send(
            f"/entries/{id}/decide", decision="happened", result='{"id": "ch_1"}', reason="seen there"
        )
        page = browser.text(answer.headers["location"])

    known = read_outcome(queue_row(database, id).outcome).known
    assert known is not None
    assert (answer.status_code, known.state, known.result) == (303, "delivered", {"id": "ch_1"})
    (event,) = [row for row in database.rows(TABLES.event) if row.entry_id == id]
    assert (event.actor, event.reason) == ("grace", "happened: seen there")
    assert "The decision is recorded" in page


def test_the_api_decides_as_the_form_does(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    path = f"/entries/{id}/decide"

    with dashboard(database) as app:
        browser = Browser(app)
        answer = browser.api(path, {"decision": "cancel", "reason": "wrong order"}, Authorization="Bearer t")
        again = browser.api(path, {"decision": "happened", "reason": "x"}, Authorization="Bearer t")

    assert {name: value for name, value in answer.json().items() if value is not None} == {
        "id": str(id),
        "decision": "cancel",
        "actor": "ada",
    }
    assert again.status_code == 409
    assert again.json()["code"] == "wrong_state"


def test_the_api_is_described_by_a_valid_openapi_document(database: Database) -> None:
    with dashboard(database) as app:
        document = Browser(app).api("/openapi.json").json()

    OpenAPIV31SpecValidator(document).validate()
    assert {"/uncertain", "/entries", "/entries/{id}", "/entries/{id}/decide", "/entries/{id}/reveal"} <= set(
        document["paths"]
    )
