"""The instruments of the browser's tests: each reports a page that is wrong."""

import pytest
from playwright.sync_api import Browser
from support.browser import browsing, is_wider_than_screen, violations
from support.loopback import closed_port

PAGE = "<html lang=en><title>A page</title><main><h1>A page</h1>{}</main></html>"


def test_axe_reports_a_picture_without_a_text_and_weak_contrast(chromium: Browser) -> None:
    with browsing(chromium, "http://shop.example") as page:
        page.set_content(PAGE.format("<p>Fine</p>"))
        assert violations(page) == []

        page.set_content(PAGE.format("<img src='data:,'><p style='color: #bbb; background: #fff'>Pale</p>"))

        assert [found.partition(":")[0] for found in violations(page)] == ["color-contrast", "image-alt"]


def test_a_page_that_needs_to_be_scrolled_sideways_is_found(chromium: Browser) -> None:
    with browsing(chromium, "http://shop.example", viewport={"width": 360, "height": 740}) as page:
        page.set_content(PAGE.format("<p style='width: 300px'>Narrow</p>"))
        assert not is_wider_than_screen(page)

        page.set_content(PAGE.format("<p style='width: 400px'>Wide</p>"))

        assert is_wider_than_screen(page)


@pytest.mark.parametrize("script", ["console.error('broken')", "throw new Error('broken')"])
def test_an_error_on_the_console_fails_the_test_that_caused_it(chromium: Browser, script: str) -> None:
    with pytest.raises(AssertionError, match="broken"), browsing(chromium, "http://shop.example") as page:
        page.set_content(PAGE.format(f"<script>{script}</script>"))


def test_a_request_to_another_host_fails_the_test_that_caused_it(chromium: Browser) -> None:
    elsewhere = f"{closed_port()}/elsewhere"
    with pytest.raises(AssertionError, match="elsewhere"), browsing(chromium, "http://shop.example") as page:
        page.set_content(PAGE.format(f"<link rel=stylesheet href={elsewhere}>"))
