"""The live part of a page: it refreshes by itself, but not in a hidden tab, while paused, or while it is used."""

import re
from datetime import timedelta

import pytest
import sqlalchemy as sa
from playwright.sync_api import Page, expect
from support.database import TABLES

from dashboard_browser.conftest import Browse
from dispatchers.admin.decide import decisions
from dispatchers.admin.read.incidents import read_incidents
from dispatchers.dashboard.alerts import RecentIncidents
from outbox.sql.clock import clock_plus

A_WHILE = 60_000  # milliseconds of the page's clock: several refreshes
COUNT_REQUESTS = """() => {
  window.requests = 0;
  window.realSend ??= XMLHttpRequest.prototype.send;
  XMLHttpRequest.prototype.send = function (...body) { window.requests += 1; return window.realSend.apply(this, body); };
}"""


def refreshes_in_a_while(page: Page) -> int:
    """How many requests the page sends while its clock runs."""
    page.evaluate(COUNT_REQUESTS)
    page.clock.run_for(A_WHILE)
    return int(page.evaluate("window.requests"))


def refreshes_at_last(page: Page) -> bool:
    """Whether it asks in one of several such times: the script may begin, or an answer come, only after the first."""
    return any(refreshes_in_a_while(page) for _ in range(20))


def test_a_page_shows_what_has_changed_without_being_loaded_again(browse: Browse, home: str, engine: sa.Engine) -> None:
    with browse("viewer") as page:
        page.clock.install()
        page.goto(f"{home}/destinations")
        page.evaluate("window.isTheFirst = true")
        with engine.begin() as connection:
            decisions.pause(connection, TABLES, "warehouse", actor="mara", reason="stocktaking")

        with page.expect_response(f"{home}/destinations"):
            page.clock.run_for(A_WHILE)
        page.clock.resume()

        expect(page.get_by_text("by mara: stocktaking")).to_be_visible()
        assert page.evaluate("window.isTheFirst")


def test_the_line_on_top_and_the_badges_follow_the_refresh(
    browse: Browse, home: str, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        RecentIncidents, "read", lambda self, connection, tables: read_incidents(connection, tables)
    )  # each time
    with browse("viewer") as page:
        page.clock.install()
        page.goto(f"{home}/overview")
        badge = page.locator("#badge-schedules")
        expect(badge).to_have_text("")
        since = {name: clock_plus(-timedelta(minutes=5)) for name in ("since", "enqueued_to", "next_at")}
        late = {"name": "report", "expression": "0 3 * * * UTC", "recent": "[]", "paused": False, **since}
        with engine.begin() as connection:
            connection.execute(sa.insert(TABLES.schedule).values(late))

        with page.expect_response(f"{home}/overview"):
            page.clock.run_for(A_WHILE)
        page.clock.resume()

        expect(badge).to_have_text("1")
        expect(page.locator("#alerts").get_by_role("link", name="1 schedule late")).to_be_visible()


def test_a_hidden_tab_asks_for_nothing_until_it_is_shown_again(browse: Browse, home: str) -> None:
    with browse("viewer") as page:
        page.clock.install()
        page.goto(f"{home}/overview")
        assert refreshes_at_last(page)

        page.evaluate("Object.defineProperty(document, 'hidden', {configurable: true, get: () => true})")
        assert refreshes_in_a_while(page) == 0

        page.evaluate("delete document.hidden")
        assert refreshes_at_last(page)


def test_a_paused_page_asks_for_nothing_and_stays_paused(browse: Browse, home: str) -> None:
    with browse("viewer") as page:
        page.clock.install()
        page.goto(f"{home}/overview")
        page.get_by_role("button", name="Stop refreshing").click()
        assert refreshes_in_a_while(page) == 0

        page.goto(f"{home}/destinations")
        expect(page.get_by_role("button", name="Refreshing stopped")).to_have_attribute("aria-pressed", "true")
        assert refreshes_in_a_while(page) == 0

        page.get_by_role("button", name="Refreshing stopped").click()
        assert refreshes_at_last(page)


def test_an_open_form_is_not_replaced_while_it_is_used(browse: Browse, home: str) -> None:
    with browse("operator") as page:
        page.clock.install()
        page.goto(f"{home}/")
        case = page.locator("article").first
        case.get_by_text("Decide", exact=True).first.click()
        case.get_by_label("Reason").fill("half a sentence")

        assert refreshes_in_a_while(page) == 0
        assert case.get_by_label("Reason").input_value() == "half a sentence"


def test_ages_are_by_the_databases_clock_and_not_the_readers(browse: Browse, home: str) -> None:
    with browse("viewer") as page:
        page.clock.install(time="2040-01-01T00:00:00Z")
        page.goto(f"{home}/audit")
        page.clock.run_for(A_WHILE)

        ages = page.locator("time").all_inner_texts()

        assert ages
        assert all(re.fullmatch(r"\d\d? (s|min|h) ago", age) for age in ages)


def test_a_login_page_takes_the_place_of_the_whole_page(browse: Browse, home: str) -> None:
    with browse("viewer") as page:
        page.clock.install()
        page.goto(f"{home}/overview")
        page.route(
            "**/overview", lambda route: route.fulfill(content_type="text/html", body="<h1>Sign in to the shop</h1>")
        )

        with page.expect_navigation():
            page.clock.run_for(A_WHILE)

        assert page.inner_text("body") == "Sign in to the shop"


def test_the_chosen_colour_scheme_is_kept(browse: Browse, home: str) -> None:
    with browse("viewer", color_scheme="light") as page:
        page.goto(f"{home}/")
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        switch = page.get_by_role("button", name="Theme")
        while "dark" not in switch.inner_text():
            switch.click()

        page.goto(f"{home}/entries")

        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
