"""The dashboard of several databases: one page over all, and the pages of each below its name."""

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from support.cli_runner import put_uncertain
from support.dashboard import OPERATOR, Browser, by_header, signed_in
from support.database import TABLES, Database
from support.entries import put
from test_outbox_web import serving

import outbox
from dispatchers.dashboard import FleetDashboard


@pytest.fixture
def fleet(postgresql: Database, sqlite: Database) -> Iterator[FleetDashboard]:
    made = FleetDashboard({"east": postgresql.url, "west": sqlite.url}, authenticate=signed_in(OPERATOR))
    yield made
    made.close()


def test_the_first_page_counts_every_database(
    fleet: FleetDashboard, postgresql: Database, sqlite: Database, ob: outbox.Outbox
) -> None:
    put(postgresql, ob, count=3)
    put_uncertain(sqlite, ob)
    browser = Browser(fleet)

    begun = browser.client.get("/", follow_redirects=True)
    found = browser.client.get("/west/api/databases").json()["databases"]

    assert 'href="/east/overview"' in begun.text
    assert 'href="/west/overview"' in begun.text
    assert 'href="/east/entries"' not in begun.text  # the page is of no single database
    counts = {
        each["name"]: (each["summary"]["waiting"]["value"], each["summary"]["uncertain"]["value"]) for each in found
    }
    assert counts == {"east": (3, 0), "west": (1, 1)}


def test_the_pages_of_a_database_are_below_its_name_and_lead_back(
    fleet: FleetDashboard, postgresql: Database, sqlite: Database, ob: outbox.Outbox
) -> None:
    put(postgresql, ob)
    (id,) = put(sqlite, ob, "mail.send")

    page = Browser(fleet).text("/west/entries")

    assert f'href="/west/entries/{id}"' in page
    assert "crm" not in page
    title = "Database: west. All databases: east, west"
    assert (
        f'<a class="database" href="/west/databases" title="{title}"><span class="label">Database: </span>west</a>'
        in page
    )


def test_a_decision_is_written_in_the_database_of_its_page(
    fleet: FleetDashboard, postgresql: Database, sqlite: Database, ob: outbox.Outbox
) -> None:
    (id,) = put(postgresql, ob)
    put(sqlite, ob)

    answer = Browser(fleet).client.post(
        f"/east/api/entries/{id}/decide",
        json={"decision": "cancel", "reason": "by mistake"},
        headers={"Authorization": "Bearer t"},
    )

    assert answer.status_code == 200, answer.text
    assert [row.action for row in postgresql.rows(TABLES.audit)] == ["cancel"]
    assert sqlite.rows(TABLES.audit) == []


def test_a_database_that_is_down_is_shown_beside_the_others(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.dashboard.fleet.ANSWER_SECONDS", 1.0)
    put(postgresql, ob)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hangs = sa.URL.create("postgresql+psycopg", "u", "secret", "127.0.0.1", silent.getsockname()[1], "x")
        down = hangs.set(port=1)
        fleet = FleetDashboard({"down": down, "hangs": hangs, "east": postgresql.url}, authenticate=signed_in(OPERATOR))
        browser = Browser(fleet)

        page = browser.text("/east/databases")
        found = {each["name"]: each for each in browser.client.get("/east/api/databases").json()["databases"]}
        fleet.close()

    assert found["east"]["summary"]["waiting"]["value"] == 1
    assert found["down"]["summary"] is found["hangs"]["summary"] is None
    assert "has not answered for 1 s" in found["hangs"]["error"]
    assert page.count("not read") == 2
    assert "secret" not in page


def test_a_page_over_all_needs_a_sign_in(postgresql: Database) -> None:
    fleet = FleetDashboard({"east": postgresql.url}, authenticate=lambda request: None)

    answers = [Browser(fleet).client.get(f"/east{path}") for path in ("/databases", "/api/databases", "/overview")]
    fleet.close()

    assert [answer.status_code for answer in answers] == [401, 401, 401]
    assert "east" not in answers[0].text.replace("/east/", "/")


def test_outbox_web_serves_all_databases_of_a_file(
    postgresql: Database, sqlite: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    put(sqlite, ob)
    path = tmp_path / "databases.conf"
    urls = {"east": postgresql.url, "west": sqlite.url}
    path.write_text("".join(f"{name} = {url.render_as_string(hide_password=False)}\n" for name, url in urls.items()))

    with serving(postgresql, tmp_path, "--databases", str(path), "--root-path", "/ops") as address:
        page = httpx.get(address, follow_redirects=False)
        found = httpx.get(f"{address}/west/api/databases").json()

    assert page.headers["location"] == "/ops/east/databases"
    assert [each["summary"]["waiting"]["value"] for each in found["databases"]] == [0, 1]


def test_nothing_names_a_database_before_the_sign_in(postgresql: Database, sqlite: Database) -> None:
    fleet = FleetDashboard({"east": postgresql.url, "west": sqlite.url}, authenticate=by_header)
    browser, ada = Browser(fleet), {"X-User": "ada=viewer"}
    paths = ("/", "/east", "/north", "/east/", "/north/x")
    before = [browser.client.get(path) for path in paths]
    after = [browser.client.get(path, headers=ada) for path in paths]
    fleet.close()

    assert [each.status_code for each in before] == [401] * 5
    assert "west" not in "".join(f"{each.text}{each.headers}" for each in before)
    assert [each.status_code for each in after] == [307, 307, 404, 200, 404]
    assert [each.headers["location"] for each in after[:2]] == ["/east/databases", "east/"]
    for each in (*before, *after):
        assert "default-src 'none'" in each.headers["content-security-policy"]
        assert each.headers["cache-control"] == "no-store"
