"""Pictures of the dashboard, of a shop that `demo --stay` keeps open.

python3 dev.py screenshots               for the documents: docs/pictures
python3 dev.py screenshots --all FOLDER  every page, at three widths in both colour schemes, to look at
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path

from playwright.sync_api import Browser, Page

from dispatchers.dashboard.pages import VIEWS
from dispatchers.dashboard.views import View
from support.browser import NEEDED, browsing, find_chromium, running_chromium

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
SCHEMES = ("light", "dark")
WIDTHS = (390, 768, 1440)
WIDTH, MAX_HEIGHT = 1100, 1000  # of a picture in the documents
SHOWN = (("uncertain", "light", 960), ("entry", "dark", 900), ("overview", "dark", 900), ("destinations", "light", 600))
"""The pictures of the documents: the page, its colour scheme and the height."""
QUERIES = {"uncertain": "?destination=courier"}  # a service that remembers its keys: more decisions are safe
LATER_SECONDS = 20  # the rates and the ages need something to show


@contextmanager
def open_shop() -> Iterator[str]:
    """The address of the dashboard, while the demo's shop is open."""
    command = [sys.executable, "-u", "-m", "examples.demo", "--stay"]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = ""
        while "Ctrl-C stops" not in printed and (line := process.stdout.readline()):
            printed += line
        try:
            found = re.search(r"^  dashboard +(http://\S+)/$", printed, re.M)
            assert found, printed
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)


def addresses(page: Page, home: str) -> dict[str, str]:
    """Each page's, by the name of its view. One that needs a parameter is found by the first link to it."""
    found = {view.name: home + view.path for view in VIEWS if not has_required_parameter(view)}
    patterns = {
        view.name: re.compile(re.sub(r"\\{\w+\\}", "[^/?#]+", re.escape(home + view.path)) + r"(\?.*)?$")
        for view in filter(has_required_parameter, VIEWS)
    }
    for listing in list(found.values()):
        if not patterns:
            break
        page.goto(listing)
        links = page.locator("main a").evaluate_all("links => links.map(link => link.href)")
        for name, pattern in list(patterns.items()):
            if link := next(filter(pattern.match, links), None):
                found[name] = link
                del patterns[name]
    return found


def has_required_parameter(view: View) -> bool:
    return any(each.default is MISSING and each.default_factory is MISSING for each in fields(view.query))


def show(page: Page, address: str, width: int, height: int) -> None:
    page.set_viewport_size({"width": width, "height": height})
    page.goto(address, wait_until="networkidle")


def save_all(browser: Browser, home: str, folder: Path) -> None:
    for scheme in SCHEMES:
        with browsing(browser, home, color_scheme=scheme) as page:
            for name, address in addresses(page, home).items():
                for width in WIDTHS:
                    show(page, address, width, MAX_HEIGHT)
                    page.screenshot(path=folder / f"{name}-{width}-{scheme}.png", full_page=True)


def save_for_documents(browser: Browser, home: str, folder: Path) -> None:
    for name, scheme, height in SHOWN:
        with browsing(browser, home, color_scheme=scheme) as page:
            show(page, addresses(page, home)[name] + QUERIES.get(name, ""), WIDTH, height)
            for opened in page.locator(".deciding > summary").all()[:1]:
                opened.click()
            page.screenshot(path=folder / f"{name}-{scheme}.png")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py screenshots", description="Pictures of the dashboard of an open shop."
    )
    parser.add_argument(
        "--all", type=Path, metavar="FOLDER", help="every page, at three widths, in both colour schemes"
    )
    parser.add_argument("--home", help="the address of a dashboard that runs (by default one is started)")
    given = parser.parse_args(arguments)
    program = find_chromium()
    if program is None:
        raise SystemExit(NEEDED)
    folder = given.all or PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    save = save_for_documents if given.all is None else save_all
    with running_chromium(program) as browser:
        if given.home:
            save(browser, given.home, folder)
            return
        with open_shop() as home:
            time.sleep(LATER_SECONDS)
            save(browser, home, folder)


if __name__ == "__main__":
    main()
