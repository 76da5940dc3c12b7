"""The dashboard beside a database that hangs, is locked, or is set up unusually."""

import socket
from datetime import timedelta

import pytest
import sqlalchemy as sa
from support.cli_runner import put_uncertain
from support.dashboard import Browser, dashboard, signed_in
from support.database import Database
from support.entries import put_one, queue_row

import outbox
from dispatchers.dashboard import Dashboard

BEARER = {"Authorization": "Bearer t"}
DECISION = {"decision": "cancel", "reason": "x"}


def test_a_database_that_hangs_is_answered_within_a_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes the connection, and never answers
        url = f"postgresql+psycopg://ada@127.0.0.1:{silent.getsockname()[1]}/shop?connect_timeout=60"
        app = Dashboard(url, authenticate=signed_in("operator"))
        app._databases.answer_seconds = 0.1
        page = Browser(app).get("/overview")
        id = "7d444840-9dc0-41d1-9f4d-0a3a0b3c1e11"
        decision = Browser(app).api(f"/entries/{id}/decide", DECISION, **BEARER)

    assert (page.status_code, decision.status_code) == (503, 503)
    assert "the database has not answered" in page.text
    assert "whether this was recorded is unknown" in decision.json()["detail"]


@pytest.mark.parametrize("kind", ["postgresql", "portable"])
def test_a_decision_does_not_wait_long_for_a_locked_entry(
    request: pytest.FixtureRequest, ob: outbox.Outbox, kind: str
) -> None:
    database: Database = request.getfixturevalue(kind)
    id = put_one(database, ob)

    with dashboard(database, statement_timeout=timedelta(seconds=1)) as app, database.owner() as connection:
        connection.execute(sa.text("SELECT FROM outbox_queue FOR UPDATE"))
        answer = Browser(app).api(f"/entries/{id}/decide", DECISION, **BEARER)

    assert (answer.status_code, answer.json()["code"]) == (503, "locked")
    assert "nothing was changed" in answer.json()["detail"]
    assert queue_row(database, id).outcome is None


def test_a_database_set_to_another_encoding_is_shown(postgresql: Database, ob: outbox.Outbox) -> None:
    put_uncertain(postgresql, ob, parent="注文-1")
    with postgresql.owner() as connection:
        connection.exec_driver_sql(f'ALTER DATABASE "{postgresql.url.database}" SET client_encoding = LATIN1')
    app = Dashboard(postgresql.url, authenticate=signed_in("viewer"))

    page = Browser(app).text("/")
    app.close()

    assert "注文-1" in page


def test_an_engine_of_another_encoding_is_refused_with_the_way_out(postgresql: Database) -> None:
    app = Dashboard(postgresql.new_engine(client_encoding="latin1"), authenticate=signed_in("viewer"))

    answer = Browser(app).api("/entries")

    assert (answer.status_code, answer.json()["code"]) == (503, "encoding")
    assert "client_encoding is LATIN1, and the outbox needs UTF8" in answer.json()["detail"]


def test_no_date_style_of_the_database_keeps_a_page_from_being_read(postgresql: Database, ob: outbox.Outbox) -> None:
    id = put_uncertain(postgresql, ob)
    with postgresql.owner() as connection:
        connection.exec_driver_sql(f"ALTER DATABASE \"{postgresql.url.database}\" SET DateStyle = 'German'")
    app = Dashboard(postgresql.url, authenticate=signed_in("operator"))

    browser = Browser(app)
    browser.text("/")
    bulk = browser.api("/bulk?decision=happened").json()
    body = {"decision": "happened", "reason": "asked", "entries": bulk["entries"]}
    decided = browser.api("/bulk/decide", body, **BEARER)
    entry = browser.api(f"/entries/{id}")
    app.close()

    assert (decided.json()["done"], entry.json()["entry"]["known"]) == (1, "delivered")
