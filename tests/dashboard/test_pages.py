"""The pages beside the entries: overview, destinations, ordering groups, requests, dispatchers, tables and audit log."""

import asyncio
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
import sqlalchemy as sa
from support.accepted import Checkout
from support.cli_runner import put_uncertain
from support.dashboard import Browser, dashboard, signed_in
from support.database import TABLES, Database
from support.entries import age, dispatcher, put, run_once
from support.ordering import OrderedService, put_in_group, send_all

import outbox
from dispatchers import Delivered, Operations, Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import pause
from outbox.sql.clock import clock

pytestmark = pytest.mark.on_mariadb

PAGES = (
    "/overview",
    "/destinations",
    "/groups",
    "/requests",
    "/schedules",
    "/dispatchers",
    "/tables",
    "/audit",
    "/search?text=order:1",
)


def reported(database: Database, ob: outbox.Outbox) -> None:
    """A dispatcher that has sent two entries, and reported that with its heartbeat."""
    put(database, ob, count=2)
    working = dispatcher(database, ob, adapters={"crm": MemoryAdapter()})

    async def main() -> None:
        assert await working.run_once() == 2
        await working.heartbeats.beat()

    asyncio.run(main())


@pytest.mark.parametrize("path", PAGES)
def test_a_page_of_an_empty_outbox_says_that_it_is_empty(database: Database, path: str) -> None:
    with dashboard(database) as app:
        page = Browser(app).text(path)
        document = Browser(app).api(path)

    assert document.status_code == 200
    assert 'aria-current="page"' in page
    assert "empty" in page or path == "/tables"


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_for_viewers_and_shows_them_no_decision(database: Database, ob: outbox.Outbox, path: str) -> None:
    put_uncertain(database, ob)

    with dashboard(database, authenticate=signed_in("viewer")) as app:
        page = Browser(app).text(path)

    assert 'method="post"' not in page


def test_the_overview_shows_what_waits_and_what_was_sent(database: Database, ob: outbox.Outbox) -> None:
    reported(database, ob)
    put(database, ob, "slow.send", count=3)
    put_uncertain(database, ob)

    with dashboard(database) as app:
        page = Browser(app).text("/overview")
        document = Browser(app).api("/overview").json()

    assert document["waiting"] == {"value": 4, "is_exact": True}
    assert document["uncertain"] == {"value": 1, "is_exact": True}
    assert document["throughput"]["total"]["results"] == {"delivered": 2}
    assert [(each["name"], each["due"]) for each in document["destinations"]] == [
        ("crm", 0),  # nothing waits for it, and a live dispatcher serves it
        ("mail", 0),
        ("slow", 3),
    ]
    assert page.count('<svg class="chart"') == 2
    assert "delivered 2, other results 0" in page
    assert "slow" in page


def test_a_destination_is_paused_and_resumed_with_a_reason(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob)

    with dashboard(database, authenticate=signed_in("operator", name="grace")) as app:
        browser = Browser(app)
        browser.text("/destinations")
        paused = browser.send("/destinations/pause", name="crm", reason="their release")
        during = browser.text(paused.headers["location"])
        state = browser.api("/destinations").json()["destinations"][0]
        resumed = browser.send("/destinations/resume", name="crm", reason="it is over")
        after = browser.text(resumed.headers["location"])

    assert (state["paused"], state["decided_by"], state["paused_reason"]) == (True, "grace", "their release")
    assert "by grace: their release" in during
    assert "Pause crm" not in during
    assert "The destination is resumed" in after
    assert [row.action for row in database.rows(TABLES.audit)] == ["pause", "resume"]


def test_a_destination_that_is_not_throttled_cannot_be_resumed(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob)

    with dashboard(database) as app:
        refusal = Browser(app).api("/destinations/resume", {"name": "crm", "reason": "x"}, Authorization="Bearer t")

    assert refusal.status_code == 409
    assert "not paused or throttled" in refusal.json()["detail"]


def test_a_blocked_group_names_its_entry_and_is_released(database: Database, ob: outbox.Outbox) -> None:
    head, second = put_in_group(database, ob, "head", "second")
    service = OrderedService(head=Rejected("declined"))
    send_all(database, ob, service)

    with dashboard(database) as app:
        browser = Browser(app)
        listed = browser.text("/groups")
        shown = browser.text("/group", key="ada")
        other = browser.send("/groups/release", key="ada", reason="the customer left", blocked_by=str(second))
        released = browser.send("/groups/release", key="ada", reason="the customer left")
        after = browser.text(released.headers["location"])

    assert str(head)[:8] in listed
    assert "declined" in shown
    assert str(second)[:8] in shown
    assert (other.status_code, "is no longer blocked by" in other.text) == (409, True)
    assert "The ordering group is released" in after
    assert "Release the group" not in after
    assert database.rows(TABLES.blocked_group) == []
    assert run_once(database, ob, adapters={"crm": service}) == 1


def test_requests_are_filtered_and_one_is_shown_with_its_entries(database: Database, ob: outbox.Outbox) -> None:
    checkout = Checkout(database, ob)
    checkout.accept("bank.charge", key="8e03978e")
    checkout.accept("mail.send", key="9c1f")

    with dashboard(database) as app:
        browser = Browser(app)
        listed = browser.text("/requests", state="accepted", key="8e03978e")
        (request,) = browser.api("/requests?state=accepted&key=8e03978e").json()["requests"]
        shown = browser.text(f"/requests/{request['id']}")

    assert "9c1f" not in listed
    assert "bank.charge" in shown
    assert "mail.send" not in shown


def test_requests_whose_key_came_with_others_are_listed(database: Database, ob: outbox.Outbox) -> None:
    for key in ("8e03978e", "1c9d5f30"):
        with database.begin() as session, ob.idempotent(session, key, scope="ada", content={}) as claim:
            claim.respond(201, {})
    id = claim.id
    counted = {"id": id, "requests": 1250, "first_at": clock(), "last_at": clock()}
    database.execute(sa.insert(TABLES.mismatch).values(counted))
    with dashboard(database) as app:
        browser = Browser(app)
        listed = browser.text("/requests", state="mismatched")
        (request,) = browser.api("/requests?state=mismatched").json()["requests"]
        shown = browser.text(f"/requests/{id}")

    assert (request["key"], request["mismatches"]) == ("1c9d5f30", 1250)
    assert "1c9d5f30" in listed
    assert "8e03978e" not in listed
    assert "1,250" in listed
    assert "1,250 other requests came with this key and were refused" in shown


def test_what_a_customer_quotes_is_found_and_the_page_says_where(database: Database, ob: outbox.Outbox) -> None:
    Checkout(database, ob).accept("bank.charge", key="8e03978e")
    id = put_uncertain(database, ob, parent="order:9")

    with dashboard(database) as app:
        browser = Browser(app)
        asked = browser.text("/search")
        found = browser.text("/search", text="8e03978e")
        other = browser.text("/search", text=id.hex[:10])
        near = browser.text("/search", text="nowhere", rows="1")

    assert "bank.charge" in found
    assert "order:9" in other
    assert "Where it was searched" not in asked
    assert "Nothing was found" in near
    assert "Search ten times as far" in near


def test_dispatchers_are_shown_with_their_settings(database: Database, ob: outbox.Outbox) -> None:
    reported(database, ob)

    with dashboard(database) as app:
        page = Browser(app).text("/dispatchers")
        (seen,) = Browser(app).api("/dispatchers").json()["dispatchers"]

    assert (seen["is_live"], seen["operations"]) == (True, ["crm"])
    assert f"{seen['host']}:{seen['pid']}" in page


def test_the_health_of_the_tables_is_shown(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob)

    with dashboard(postgresql) as app:
        page = Browser(app).text("/tables")

    assert "outbox_queue" in page
    assert "2,000" in page


def test_the_audit_log_shows_who_decided_what_and_why(database: Database, ob: outbox.Outbox) -> None:
    with database.engine.begin() as connection:
        for name in ("crm", "mail"):
            pause(connection, TABLES, name, actor="ada", reason=f"the release of {name}")

    with dashboard(database) as app:
        browser = Browser(app)
        first = browser.text("/audit", limit="1")
        (following,) = [link for link in browser.links() if "after=" in link]
        second = browser.text(following.replace("&amp;", "&"))
        filtered = browser.text("/audit", target="crm")

    assert "the release of mail" in first
    assert "the release of crm" in second
    assert ("the release of crm" in filtered, "the release of mail" in filtered) == (True, False)


def test_a_position_that_is_none_is_refused(database: Database) -> None:
    with dashboard(database) as app:
        answer: Any = Browser(app).api("/audit?after=soon")

    assert (answer.status_code, answer.json()["field"]) == (422, "after")


def test_entries_are_filtered_by_reason_age_and_ordering_key(database: Database, ob: outbox.Outbox) -> None:
    wanted = put_uncertain(database, ob, ordering_key="customer:7")
    put_uncertain(database, ob, ordering_key="customer:8")
    age(database, timedelta(hours=3))
    put_uncertain(database, ob, parent="order:new", ordering_key="customer:7")

    with dashboard(database) as app:
        browser = Browser(app)
        filters = {"ordering_key": "customer:7", "reason_contains": "within 30", "enqueued_before": "2h"}
        page = browser.text("/entries", **filters)
        (entry,) = browser.api(f"/entries?{urlencode(filters)}").json()["entries"]

    assert entry["id"] == str(wanted)
    assert "1 entry matches" in page
    assert "outbox list --ordering-key customer:7 --reason-contains &#39;within 30&#39; --enqueued-before 2h" in page


def test_the_first_page_counts_what_is_uncertain(database: Database, ob: outbox.Outbox) -> None:
    for number in range(3):
        put_uncertain(database, ob, parent=f"order:{number}")

    with dashboard(database) as app:
        page = Browser(app).text("/", limit="1")
        document = Browser(app).api("/uncertain?limit=1").json()

    assert document["uncertain"] == {"value": 3, "is_exact": True}
    assert len(document["cases"]) == 1
    assert "3 uncertain" in page


@pytest.mark.parametrize("path", ["/overview", "/destinations"])
def test_a_page_says_which_entries_no_dispatcher_reads(database: Database, ob: outbox.Outbox, path: str) -> None:
    effects = Operations()
    effects.handles(outbox.Effect("receipts.send", dict[str, int]))(lambda delivery: Delivered())
    put(database, ob, "receipts.send", payload={"to": "ada"}, count=2)
    run_once(database, ob, include=[effects])
    age(database, timedelta(minutes=2))

    with dashboard(database) as app:
        page, document = Browser(app).text(path), Browser(app).api(path).json()

    why = "receipts.send: payload.*: must be a valid int; it does not fit the dict[str, int] of this process"
    (waiting,) = document["unserved"]
    assert (waiting["operation"], waiting["entries"], waiting["reason"]) == ("receipts.send", 2, why)
    assert f"2 of receipts.send cannot be read by any dispatcher: {why}" in page
