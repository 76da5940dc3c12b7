"""What the dashboard refuses of browsers, and what it logs instead of showing it."""

from typing import Any

import pytest
from support.cli_runner import block, put_uncertain
from support.dashboard import SITE, Browser, dashboard, signed_in
from support.database import TABLES, Database
from support.entries import put_one

import outbox
from dispatchers.dashboard.pages import ACTIONS


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, 303),
        ({"Sec-Fetch-Site": "cross-site"}, 403),  # the same host by another scheme, which anyone on the way can write
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://["}, 403),
    ],
)
def test_a_form_of_another_scheme_or_of_no_origin_is_refused(
    database: Database, ob: outbox.Outbox, headers: dict[str, str], status: int
) -> None:
    id = put_one(database, ob)

    with dashboard(database) as app:
        browser = Browser(app, **headers)
        browser.text(f"/entries/{id}")
        answer = browser.send(
            f"/entries/{id}/decide", origin=headers.get("Origin", SITE), decision="cancel", reason="wrong"
        )

    assert answer.status_code == status


@pytest.mark.parametrize("answer", [True, "ada", lambda: None])
def test_a_wrong_authenticator_is_an_error_that_is_logged(sqlite: Database, answer: Any, caplog: Any) -> None:
    with dashboard(sqlite, authenticate=lambda request: answer) as app:
        page, document = Browser(app).get("/"), Browser(app).api("/entries")

    assert (page.status_code, document.json()["code"]) == (500, "error")
    assert "authenticator" not in page.text
    assert "the dashboard's authenticator returned" in caplog.text


def test_a_static_file_that_does_not_exist_links_to_nothing(sqlite: Database) -> None:
    with dashboard(sqlite) as app:
        answer = Browser(app).get("/static/app.py")

    assert (answer.status_code, answer.text) == (404, "there is no such file\n")


@pytest.mark.parametrize("reason", [None, "", " \t", "\u200b\u2060", "\u3000"])
def test_no_decision_is_made_without_a_reason(sqlite: Database, ob: outbox.Outbox, reason: str | None) -> None:
    id, lost = put_one(sqlite, ob), put_uncertain(sqlite, ob)
    block(sqlite, lost, "invoice:7")
    given = {} if reason is None else {"reason": reason}
    bodies: dict[str, dict[str, Any]] = {
        f"/entries/{id}/decide": {"decision": "retry"},
        f"/entries/{lost}/decide": {"decision": "happened"},
        f"/entries/{id}/propose": {"decision": "cancel"},
        f"/entries/{id}/reveal": {},
        "/destinations/pause": {"name": "crm"},
        "/destinations/resume": {"name": "crm"},
        "/groups/release": {"key": "invoice:7"},
        "/schedules/pause": {"name": "report"},
        "/schedules/resume": {"name": "report"},
        "/schedules/trigger": {"name": "report"},
        "/bulk/decide": {"decision": "cancel", "entries": [str(id)]},
        "/bulk/propose": {"decision": "cancel", "entries": [str(id)]},
    }

    with dashboard(sqlite, authenticate=signed_in("operator", "payload_reader")) as app:
        answers = {
            path: Browser(app).api(path, {**body, **given}, Authorization="Bearer t") for path, body in bodies.items()
        }

    assert {path: answer.json().get("field") for path, answer in answers.items()} == dict.fromkeys(bodies, "reason")
    assert {answer.status_code for answer in answers.values()} == {422}
    assert sqlite.rows(TABLES.audit) == []
    assert {action.path for action in ACTIONS} - {
        each.replace(str(id), "{id}").replace(str(lost), "{id}") for each in bodies
    } == {
        "/proposals/{id}/confirm",
        "/proposals/{id}/withdraw",
    }
