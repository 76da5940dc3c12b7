"""The header and the line below it on every screen, with a long name and counts of four digits."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from playwright.sync_api import Browser, Page
from support.asgi_server import serving_asgi
from support.browser import browsing, is_wider_than_screen

from dashboard_browser.conftest import by_header
from dispatchers.dashboard import Dashboard, FleetDashboard
from outbox.sql.schema.tables import tables_of

TABLES = tables_of(None, "outbox_")
NAME = "warehouse-and-billing-of-the-european-shop"
REASON = (
    "the database was restored from a backup of last night: run `outbox resume` after you have looked at the service"
)
MANY = 1050
HIDDEN_PAGES = """() => {
  const nav = document.querySelector('.top nav');
  return getComputedStyle(nav).display !== 'none' && nav.scrollWidth > nav.clientWidth;
}"""
HEIGHT = "name => document.querySelector(name).offsetHeight"


@pytest.fixture(scope="module")
def troubled_url(outbox_url: sa.URL, engine: sa.Engine) -> sa.URL:
    """The database of a shop in which nothing is sent, and much waits for an operator."""
    now, instants = datetime.now(UTC), ("since", "enqueued_to", "next_at")
    late = dict.fromkeys(instants, now - timedelta(minutes=5))
    rows = {
        TABLES.blocked_group: ("ordering_key", {"entry_id": "0" * 32, "reason": "declined", "since": now}),
        TABLES.destination: ("name", {"paused": False, "breaker": "open", "breaker_failures": 5, "changed_at": now}),
        TABLES.schedule: ("name", {"expression": "every 15 min", "recent": "[]", "paused": False, **late}),
    }
    with engine.begin() as connection:
        for table, (name, values) in rows.items():
            connection.execute(sa.insert(table), [{name: f"{number:04}", **values} for number in range(MANY)])
        connection.execute(sa.update(TABLES.meta).values(suspended_reason=REASON))
    return outbox_url


@pytest.fixture(scope="module")
def homes(troubled_url: sa.URL) -> Iterator[dict[str, str]]:
    """The addresses of its dashboard alone, and among those of several databases."""
    alone = Dashboard(troubled_url, authenticate=by_header, sign_out="/logout")
    fleet = FleetDashboard({NAME: troubled_url}, authenticate=by_header, sign_out="/logout")
    with serving_asgi(alone) as first, serving_asgi(fleet) as second:
        yield {"alone": first, "fleet": f"{second}/{NAME}"}
    alone.close()
    fleet.close()


@pytest.fixture
def troubled(chromium: Browser, homes: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Page]:
    home = homes[request.param]
    headers = {"X-Name": "ada.lovelace@shop.example", "X-Roles": "operator"}
    with browsing(chromium, home, extra_http_headers=headers) as page:
        page.goto(f"{home}/tables")
        yield page


@pytest.mark.parametrize("troubled", ["alone", "fleet"], indirect=True)
def test_one_row_has_the_name_the_operator_and_each_page_or_a_menu(troubled: Page) -> None:
    for width in (360, 390, 768, 1100, 1280, 1366, 1440, 1600, 1920):
        troubled.set_viewport_size({"width": width, "height": 800})

        found = (
            is_wider_than_screen(troubled),
            troubled.evaluate(HIDDEN_PAGES),
            troubled.evaluate(HEIGHT, ".top") <= 50,
        )
        assert (width, *found) == (width, False, False, True)
        assert troubled.locator(".who").bounding_box()["width"] > 15  # type: ignore[index]


def test_the_pages_are_in_the_row_where_they_fit(chromium: Browser, homes: dict[str, str]) -> None:
    headers, viewport = {"X-Name": "ada", "X-Roles": "viewer"}, {"width": 1440, "height": 800}
    with browsing(chromium, homes["alone"], extra_http_headers=headers, viewport=viewport) as page:
        page.goto(f"{homes['alone']}/tables")

        assert page.get_by_role("navigation", name="Pages").get_by_role("link", name="Find").is_visible()


@pytest.mark.parametrize("troubled", ["fleet"], indirect=True)
def test_a_long_reason_leaves_room_for_the_page_and_is_on_the_overview(troubled: Page, homes: dict[str, str]) -> None:
    troubled.set_viewport_size({"width": 390, "height": 800})
    height = troubled.evaluate(HEIGHT, ".alerts")
    troubled.goto(f"{homes['fleet']}/overview")

    reason = troubled.locator(".alerts li").first
    assert height <= 110
    assert REASON in reason.inner_text()
    assert reason.evaluate("each => each.scrollWidth <= each.clientWidth")
