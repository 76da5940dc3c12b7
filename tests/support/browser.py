"""A real Chromium, the system's own, driven by Playwright: for the tests of the dashboard and the pictures of the documents."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

AXE = Path(__file__).parents[1] / "dashboard_browser" / "vendor" / "axe-core-4.14.1.min.js"
CONTRAST = "color-contrast"  # the name of axe's rule
NEEDED = "Chromium is not installed (on Debian: apt-get install chromium-headless-shell)"
OPTIONS = ("--disable-gpu", "--disable-dev-shm-usage", "--force-color-profile=srgb", "--font-render-hinting=none")
TIMEOUT_MS = 30_000  # a busy machine may take long; a test that passes never waits for it
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 360, "height": 740}


def find_chromium() -> str | None:
    """The headless shell does the same with half of the CPU time of the whole browser."""
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")


@contextmanager
def running_chromium(program: str) -> Iterator[Browser]:
    """While the block lasts, this thread can run no event loop of its own: Playwright's runs in it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=OPTIONS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Complaints:
    """What the pages of a test did that the dashboard must never do.

    expected: part of the text of a message that is no complaint; empty if there is none.
    console: errors and warnings, among them each violation of the content security policy. foreign: requests to another host.
    """

    home: str
    expected: str
    console: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def read(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not (self.expected and self.expected in message.text):
            self.console.append(f"{message.type}: {message.text}")

    def check(self, request: Request) -> None:
        if not request.url.startswith((f"{self.home}/", "data:")):
            self.foreign.append(request.url)


@contextmanager
def watching(page: Page, home: str, expected: str = "") -> Iterator[None]:
    """Raises `AssertionError` at the end of the block for complaints about the page, one of the dashboard at `home`."""
    complaints = Complaints(home, expected)
    listeners: dict[Any, Callable[[Any], None]] = {
        "console": complaints.read,
        "pageerror": lambda error: complaints.console.append(str(error)),
        "request": complaints.check,
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    yield
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    found = [*complaints.console, *complaints.foreign]
    assert not found, "\n".join(found)


@contextmanager
def browsing(browser: Browser, home: str, *, expected: str = "", **settings: Any) -> Iterator[Page]:
    """A page in a fresh profile, for the dashboard at `home`. Raises `AssertionError` for complaints at the end of the block.

    settings: those of `Browser.new_context`.
    """
    context = browser.new_context(
        locale="en-GB",
        timezone_id="Europe/Berlin",
        **{"viewport": WIDE} | settings,
    )
    context.set_default_timeout(TIMEOUT_MS)
    try:
        page = context.new_page()
        with watching(page, home, expected):
            yield page
    finally:
        context.close()


def violations(page: Page, *rules: str, without: Sequence[str] = ()) -> list[str]:
    """What axe finds wrong with the page, one line for each element; sorted. rules: all if there are none."""
    # Once for each document. Its value is the whole of axe, which Playwright would otherwise bring here.
    if not page.evaluate("'axe' in window"):
        page.evaluate(f"{AXE.read_text()}; null")
    options: dict[str, Any] = {"resultTypes": ["violations"], "rules": {rule: {"enabled": False} for rule in without}}
    if rules:
        options["runOnly"] = rules
    found = page.evaluate("options => axe.run(document, options)", options)["violations"]
    return sorted(f"{each['id']}: {node['html']}: {node['failureSummary']}" for each in found for node in each["nodes"])


def is_wider_than_screen(page: Page) -> bool:
    """Whether the page as a whole scrolls sideways; a part of it may."""
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))
