"""What the dashboard refuses of browsers, and what it logs instead of showing it."""

from typing import Any

import pytest
from support.dashboard import SITE, Browser, dashboard
from support.database import Database
from support.entries import put_one

import outbox


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
