"""What the dashboard takes as parameters, and how it refuses the rest."""

import json
from typing import Any
from urllib.parse import quote

import pytest
from support.cli_runner import put_uncertain
from support.dashboard import Browser, dashboard
from support.database import Database
from support.entries import queue_row

import outbox
from dispatchers.stored_outcome import read_outcome

BEARER = {"Authorization": "Bearer t"}


@pytest.mark.parametrize(
    ("path", "name"),
    [("/entries", "operation"), ("/", "destination"), ("/audit", "actor"), ("/group", "key"), ("/requests", "key")],
)
def test_a_filter_that_no_database_can_store_is_refused(database: Database, path: str, name: str) -> None:
    with dashboard(database) as app:
        browser = Browser(app)
        answer = browser.get(f"{path}?{name}={quote(chr(0))}")
        headers = {"Content-Type": "application/json", **BEARER}
        released = browser.client.post(
            "/api/groups/release", content=rb'{"key": "\ud800", "reason": "x"}', headers=headers
        )

    assert answer.status_code == 422
    assert "NUL character" in answer.text
    assert (released.status_code, released.json()["field"]) == (422, "key")


@pytest.mark.parametrize("path", ["/entries?operation=%ff%fe", "/api/entries?operation=%ed%a0%80"])
def test_an_address_that_is_not_utf8_is_refused(sqlite: Database, path: str) -> None:
    with dashboard(sqlite) as app:
        answer = Browser(app).client.get(path)

    assert (answer.status_code, "the address is not valid UTF-8" in answer.text) == (400, True)


def test_a_form_that_is_not_utf8_records_nothing(database: Database, ob: outbox.Outbox) -> None:
    id = put_uncertain(database, ob)

    with dashboard(database) as app:
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        content = b"decision=happened&reason=%ff%fe"
        answer = Browser(app).client.post(f"/entries/{id}/decide", content=content, headers=form)

    assert (answer.status_code, "the form is not valid UTF-8" in answer.text) == (400, True)
    assert read_outcome(queue_row(database, id).outcome).known is None


@pytest.mark.parametrize("after", ["2026-01-01T00:00Z,9223372036854775808", "0001-01-01T00:00+14:00,1", "now,1"])
def test_a_position_that_no_row_has_is_refused(database: Database, after: str) -> None:
    with dashboard(database) as app:
        answer = Browser(app).get("/audit", after=after)

    assert answer.status_code == 422


@pytest.mark.parametrize(
    ("result", "status"),
    [
        ('"[' + "[" * 100_000 + '"', 422),
        ("[" * 100_000, 400),
        ('{"id": 1, "id": 2}', 400),
        ("NaN", 422),
        ("1" * 5000, 400),
    ],
    ids=["text", "deep", "twice", "nan", "digits"],
)
def test_a_result_that_is_no_document_is_refused(
    database: Database, ob: outbox.Outbox, result: str, status: int
) -> None:
    id = put_uncertain(database, ob)
    body = f'{{"decision": "happened", "reason": "seen", "result": {result}}}'

    with dashboard(database) as app:
        headers = {"Content-Type": "application/json", **BEARER}
        answer = Browser(app).client.post(f"/api/entries/{id}/decide", content=body, headers=headers)

    assert answer.status_code == status
    assert read_outcome(queue_row(database, id).outcome).known is None


@pytest.mark.parametrize("result", ["ok", "12", "", {"id": 12345678901234567890123}, [0], False, 0])
def test_a_result_is_recorded_as_it_was_given(database: Database, ob: outbox.Outbox, result: Any) -> None:
    by_api, by_form = put_uncertain(database, ob, parent="a"), put_uncertain(database, ob, parent="b")

    with dashboard(database) as app:
        browser = Browser(app)
        decided = {"decision": "happened", "reason": "seen", "result": result}
        assert browser.api(f"/entries/{by_api}/decide", decided, **BEARER).status_code == 200
        browser.text(f"/entries/{by_form}")
        form = {"decision": "happened", "reason": "seen", "result": json.dumps(result)}
        assert browser.send(f"/entries/{by_form}/decide", **form).status_code == 303

    for id in (by_api, by_form):
        known = read_outcome(queue_row(database, id).outcome).known
        assert known is not None
        assert known.result == result
