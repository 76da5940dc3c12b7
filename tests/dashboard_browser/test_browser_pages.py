"""Every page: without violations in both colour schemes, on a narrow screen, and without JavaScript."""

import pytest
from playwright.sync_api import Page, expect
from support.browser import CONTRAST, NARROW, is_wider_than_screen, violations

from dashboard_browser.conftest import Browse
from dispatchers.dashboard.pages import VIEWS


@pytest.mark.parametrize("name", [view.name for view in VIEWS])
def test_a_page_is_accessible_and_fits_every_screen(page: Page, pages: dict[str, str], name: str) -> None:
    page.goto(pages[name])
    page.locator("main details").evaluate_all("all => all.forEach(details => { details.open = true })")
    assert violations(page) == []

    page.emulate_media(color_scheme="dark")
    assert violations(page, CONTRAST) == []  # the colours only have changed

    page.set_viewport_size(NARROW)
    assert not is_wider_than_screen(page)
    assert violations(page, without=[CONTRAST]) == []  # the layout only has changed; that rule costs most


@pytest.mark.parametrize(("width", "header", "filter_height"), [(1280, 50, 200), (768, 50, 260), (390, 50, 360)])
def test_the_header_and_the_filter_leave_room_for_the_entries(
    page: Page, home: str, width: int, header: int, filter_height: int
) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(f"{home}/entries")

    heights = page.evaluate("['.top', '.filter'].map(name => document.querySelector(name).offsetHeight)")

    assert (heights[0] <= header, heights[1] <= filter_height) == (True, True), heights
    assert not is_wider_than_screen(page)


def test_the_menu_of_a_narrow_screen_needs_no_javascript(browse: Browse, home: str) -> None:
    with browse("viewer", java_script_enabled=False, viewport=NARROW) as page:
        page.goto(f"{home}/overview")
        link = page.get_by_role("navigation", name="Pages").get_by_role("link", name="Audit log")
        assert not link.is_visible()
        page.get_by_role("button", name="Menu").click()
        expect(link).to_be_visible()
        page.keyboard.press("Escape")
        expect(link).not_to_be_visible()
        page.get_by_role("button", name="Menu").click()
        link.click()

        assert page.get_by_role("heading", level=1).inner_text() == "Audit log"


def test_every_page_can_be_read_without_javascript(browse: Browse, home: str) -> None:
    with browse("viewer", java_script_enabled=False) as page:
        page.goto(f"{home}/")
        names = page.get_by_role("navigation", name="Pages").get_by_role("link").all_inner_texts()

        for name in names:
            page.get_by_role("navigation", name="Pages").get_by_role("link", name=name, exact=True).click()
            assert page.locator("a[aria-current=page]").inner_text() == name
            assert page.locator("main table, main .empty, main article, main .cards, main form").count() > 0
            assert page.get_by_role("button", name="Stop refreshing").count() == 0
