"""The charts of the overview: the values of each minute, with the mouse, with the keyboard, and without JavaScript."""

import re
from datetime import timedelta

import pytest
import sqlalchemy as sa
from playwright.sync_api import Page, expect
from support.database import TABLES

from dashboard_browser.conftest import Browse

SENDS = "figure:has(#sends) .minute"


@pytest.fixture(autouse=True)
def sends(engine: sa.Engine) -> None:
    """Seven sends in each of two minutes, with minutes between them without any."""
    count = TABLES.send_count
    with engine.begin() as connection:
        (now,) = connection.execute(sa.select(sa.func.date_trunc("minute", sa.func.now()))).one()
        connection.execute(sa.delete(count))
        row = {"destination": "crm", "result": "delivered", "bucket": 3, "sends": 7}
        connection.execute(sa.insert(count), [row | {"minute": now - timedelta(minutes=each)} for each in (20, 30)])


def test_a_minute_shows_its_values_under_the_mouse(page: Page, home: str) -> None:
    page.goto(f"{home}/overview")
    minute = page.locator(SENDS).filter(has_text="delivered 7").first
    tip = minute.locator(".tip")
    expect(tip).not_to_be_visible()

    minute.locator("rect").hover()

    expect(tip).to_be_visible()
    assert re.fullmatch(r"\d\d:\d\d delivered 7, other results 0", tip.text_content() or "")


def test_the_arrow_keys_move_from_minute_to_minute(page: Page, home: str) -> None:
    page.goto(f"{home}/overview")
    page.locator(f"{SENDS}[tabindex='0']").focus()
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowRight")

    assert page.locator(SENDS).evaluate_all("all => all.indexOf(document.activeElement)") == 3
    expect(page.locator(f"{SENDS}:focus .tip")).to_be_visible()
    assert page.locator(f"{SENDS}[tabindex='0']").count() == 1
    page.mouse.move(0, 0)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('figure').querySelector('#took') !== null")


def test_a_chart_is_drawn_without_javascript_and_has_a_table(browse: Browse, home: str) -> None:
    with browse("viewer", java_script_enabled=False) as page:
        page.goto(f"{home}/overview")

        assert page.locator(f"{SENDS} .dot.good").count() == page.locator(SENDS).count()
        assert page.locator(".axis").first.is_visible()
        page.get_by_text("As a table").click()
        assert page.get_by_role("table", name="Sends by minute").get_by_role("row").count() == 3
