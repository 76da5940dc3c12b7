"""The dashboard with the rights of `outbox db roles`: it reads as one role, and decides as another."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.cli_runner import PRIVATE, put_ended, put_uncertain
from support.dashboard import Browser, put_heartbeat, signed_in
from support.database import TABLES, Database
from support.entries import change, put_one, queue_row
from support.schedules import HOUR, Reports

import outbox
from dispatchers.admin.decide.again import UNCOMPARED
from dispatchers.dashboard import Dashboard
from dispatchers.dashboard.pages import VIEWS
from dispatchers.stored_outcome import read_outcome
from outbox.sql.clock import clock_plus


@pytest.fixture
def urls(postgresql: Database) -> dict[str, sa.URL]:
    """The database's URL as each role."""
    granted = sa.text(
        "SELECT rolname FROM pg_roles WHERE NOT rolsuper AND has_any_column_privilege(rolname, 'outbox_queue', 'SELECT')"
    )
    with postgresql.observer.connect() as connection:
        names = connection.execute(granted).scalars().all()
    found = {name.partition("_")[0]: name for name in names}
    return {
        kind: postgresql.owners_url.update_query_dict({"options": f"-c role={found[kind]}"})
        for kind in ("dashboard", "operator")
    }


@pytest.fixture
def sites(urls: dict[str, sa.URL]) -> Iterator[dict[str, Browser]]:
    """A viewer's browser and an operator's, of dashboards that read as one role and decide as the other."""
    made = {
        role: Dashboard(urls["operator"], read_url=urls["dashboard"], authenticate=signed_in(*roles))
        for role, roles in (("viewer", ["viewer"]), ("operator", ["operator", "payload_reader"]))
    }
    yield {role: Browser(app) for role, app in made.items()}
    for app in made.values():
        app.close()


def put_case(database: Database, ob: outbox.Outbox) -> str:
    id = put_uncertain(database, ob, parent="order:1")
    change(database, id, in_doubt_since=clock_plus(-timedelta(hours=1)))
    put_heartbeat(database)
    return str(id)


def test_every_page_is_read_with_the_rights_of_the_dashboards_role(
    sites: dict[str, Browser], postgresql: Database, ob: outbox.Outbox
) -> None:
    reports = Reports(postgresql, ob)
    reports.run_once()
    reports.since(2 * HOUR)
    reports.run_once(beats=True)
    id = put_case(postgresql, ob)
    put_ended(postgresql, ob)
    named = ("group", "schedule", "search", "bulk")
    pages = [view.path for view in VIEWS if "{" not in view.path and view.name not in named]
    pages += [f"/entries/{id}", "/schedule?name=report", "/search?text=order%3A1", "/entries?state=delivered"]

    for browser in sites.values():
        for path in pages:
            assert browser.get(path).status_code == 200, (path, browser.page)
            assert "4242" not in browser.page


def test_an_operator_decides_and_reveals_with_the_rights_of_that_role(
    sites: dict[str, Browser], postgresql: Database, ob: outbox.Outbox
) -> None:
    id, waiting = put_case(postgresql, ob), put_one(postgresql, ob)
    browser = sites["operator"]

    browser.text("/")
    decided = browser.send(f"/entries/{id}/decide", decision="same_key", reason="they have nothing")
    browser.text(f"/entries/{waiting}")
    cancelled = browser.send(f"/entries/{waiting}/decide", decision="cancel", reason="wrong order")
    revealed = browser.api(f"/entries/{id}/reveal", {"reason": "asked"}, Authorization="Bearer t")

    assert (decided.status_code, cancelled.status_code) == (303, 303)
    known = read_outcome(queue_row(postgresql, waiting).outcome).known
    assert known is not None
    assert known.state == "cancelled"
    assert revealed.json()["payload"] == PRIVATE
    assert [row.action for row in postgresql.rows(TABLES.audit)] == ["resolve", "cancel", "reveal_payload"]


def test_two_operators_decide_with_the_rights_of_that_role(
    sites: dict[str, Browser], postgresql: Database, ob: outbox.Outbox
) -> None:
    put_one(postgresql, ob)
    browser, bearer = sites["operator"], {"Authorization": "Bearer t"}
    counted = browser.api("/bulk?decision=cancel").json()
    body = {**counted["parameters"], "entries": counted["entries"], "reason": "wrong order"}

    made = browser.api("/bulk/propose", body, **bearer).json()
    postgresql.execute(sa.update(TABLES.proposal).values(actor="grace"))
    done = browser.api(f"/proposals/{made['id']}/confirm", {}, **bearer).json()
    decided = browser.api("/bulk/decide", body, **bearer).json()

    assert (made["actor"], done["done"]) == ("ada", 1)
    assert (decided["done"], decided["left"]) == (0, 0)


def test_an_operator_asks_again_with_the_rights_of_that_role(
    urls: dict[str, sa.URL], postgresql: Database, ob: outbox.Outbox
) -> None:
    one, *rest = (str(put_ended(postgresql, ob, good=False)) for _ in range(3))
    settings: dict[str, Any] = {"authenticate": signed_in("operator"), "outbox": ob}
    deciding, reading = Dashboard(urls["operator"], **settings), Dashboard(urls["dashboard"], **settings)
    browser, bearer = Browser(deciding), {"Authorization": "Bearer t"}

    asked = browser.api(f"/entries/{one}/decide", {"decision": "again", "reason": "it exists now"}, **bearer).json()
    (offer,) = Browser(reading).api(f"/entries/{rest[0]}").json()["offers"]
    counted = browser.api("/bulk?decision=again&state=failed").json()
    body = {**counted["parameters"], "entries": counted["entries"], "reason": "it exists now"}
    done = browser.api("/bulk/decide", body, **bearer).json()
    for app in (deciding, reading):
        app.close()

    assert (asked["is_new"], done["done"], len(postgresql.entries)) == (True, 2, 6)
    assert offer == {"decision": "again", "why_not": UNCOMPARED}


def test_a_dashboard_that_may_only_read_explains_a_refused_decision(
    urls: dict[str, sa.URL], postgresql: Database, ob: outbox.Outbox
) -> None:
    id = put_one(postgresql, ob)
    app = Dashboard(urls["dashboard"], authenticate=signed_in("operator"))
    browser = Browser(app)

    page = browser.text("/")
    answer = browser.api(f"/entries/{id}/decide", {"decision": "retry", "reason": "now"}, Authorization="Bearer t")
    app.close()

    assert "Nothing is uncertain" in page
    assert (answer.status_code, answer.json()["code"]) == (403, "database_role")
