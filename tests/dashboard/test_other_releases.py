"""The pages over tables, or rows, of another release."""

import pytest
from support.cli_runner import put_uncertain
from support.dashboard import Browser, dashboard
from support.database import Database
from support.entries import change

import outbox


@pytest.mark.every_value
@pytest.mark.parametrize(
    "outcome", ["{not json", "[1]", '{"known": {"state": "teleported"}}', '{"reason": {"code": 1}}']
)
def test_a_row_that_cannot_be_read_keeps_no_other_from_sight(
    database: Database, ob: outbox.Outbox, outcome: str
) -> None:
    good, bad = put_uncertain(database, ob, parent="good"), put_uncertain(database, ob, parent="bad")
    change(database, bad, outcome=outcome)

    with dashboard(database) as app:
        browser = Browser(app)
        pages = [browser.text(path) for path in ("/", "/entries", "/overview", f"/entries/{bad}")]
        answer = browser.api(f"/entries/{bad}/decide", {"decision": "look_up", "reason": "x"}, Authorization="Bearer t")

    assert str(good) in pages[0]
    assert str(bad) in pages[0]
    assert answer.status_code == 409


def test_tables_of_another_release_are_named(postgresql: Database, ob: outbox.Outbox) -> None:
    with postgresql.owner() as connection:
        connection.exec_driver_sql("ALTER TABLE outbox_audit DROP COLUMN actor")

    with dashboard(postgresql) as app:
        answer = Browser(app).api("/audit")

    assert (answer.status_code, answer.json()["code"]) == (503, "schema")
    assert "outbox db upgrade" in answer.json()["detail"]
