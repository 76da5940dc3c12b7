"""Who may do what, as a browser shows it: roles, forms of another origin, filters in the address."""

import sqlalchemy as sa
from playwright.sync_api import Browser, expect
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route
from support.asgi_server import serving_asgi
from support.database import TABLES

from dashboard_browser.conftest import Browse
from dispatchers.dashboard.access import Role
from dispatchers.dashboard.pages import VIEWS

ATTACK = """<form method=post action="{}"><input name=name value=stripe><input name=reason value=attack>
<input name=csrf_token value=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA><button>Win a prize</button></form>"""


def test_a_form_on_a_page_of_another_origin_decides_nothing(chromium: Browser, home: str, engine: sa.Engine) -> None:
    async def page_of_another_origin(request: object) -> HTMLResponse:
        return HTMLResponse(ATTACK.format(f"{home}/destinations/pause"))

    context = chromium.new_context(extra_http_headers={"X-Name": "ada", "X-Roles": "operator"})
    with serving_asgi(Starlette(routes=[Route("/", page_of_another_origin)])) as elsewhere:
        page = context.new_page()
        page.goto(f"{home}/destinations")  # which leaves its cookie in the browser
        page.goto(elsewhere)
        with page.expect_navigation() as navigation:
            page.get_by_role("button", name="Win a prize").click()
        refused = navigation.value
        text = page.inner_text("main")
    context.close()

    assert refused is not None
    assert refused.status == 403
    assert "another origin" in text
    with engine.connect() as connection:
        assert "attack" not in connection.execute(sa.select(TABLES.audit.c.reason)).scalars().all()


def test_a_viewer_reads_pages_and_sees_no_decision(browse: Browse, pages: dict[str, str]) -> None:
    readable = {view.name for view in VIEWS if view.role is Role.VIEWER}
    with browse("viewer", java_script_enabled=False) as page:  # a script could only hide a form
        for name in pages.keys() & readable:
            page.goto(pages[name])

            assert page.locator("form[method=post]").count() == 0, name


def test_what_was_sent_is_shown_to_a_payload_reader_and_recorded(
    browse: Browse, pages: dict[str, str], engine: sa.Engine
) -> None:
    with browse("operator") as page:
        page.goto(pages["entry"])
        assert page.get_by_role("button", name="Reveal").count() == 0

    with browse("payload_reader") as page:
        page.goto(pages["entry"])
        assert "@example.com" not in page.content()
        page.get_by_label("Reason").last.fill("the customer asks for it")
        page.get_by_role("button", name="Reveal").click()

        expect(page.locator("pre").first).to_contain_text('"')

    with engine.connect() as connection:
        audit = TABLES.audit
        row = connection.execute(sa.select(audit).order_by(audit.c.id.desc()).limit(1)).one()
    assert (row.actor, row.action, row.reason) == ("ada", "reveal_payload", "the customer asks for it")


def test_a_filter_is_in_the_address_and_selects_the_rows(browse: Browse, home: str) -> None:
    with browse("viewer") as page:
        page.goto(f"{home}/entries")
        page.get_by_label("failed", exact=True).check()
        page.get_by_label("Operation").fill("warehouse")
        page.get_by_label("Operation").press("Enter")
        address = page.url
        rows = page.locator("tbody tr").all_inner_texts()

    assert "state=failed" in address
    assert "operation=warehouse" in address
    assert rows
    assert all("failed" in row and "warehouse.parcels.create" in row for row in rows)
    with browse("viewer") as page:
        page.goto(address)
        assert page.locator("tbody tr").count() == len(rows)
        assert page.get_by_label("failed", exact=True).is_checked()
