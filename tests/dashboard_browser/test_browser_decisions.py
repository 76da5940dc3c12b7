"""Each decision, taken in the browser: it is recorded with the operator's name and the reason."""

from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from playwright.sync_api import Page, expect
from support.database import TABLES

from dashboard_browser.conftest import Browse
from dispatchers.store.records.heartbeats import LIVE_FOR

REASON = "the service's log shows it"


@pytest.fixture(autouse=True)
def live(engine: sa.Engine) -> None:
    """As if the dispatchers had just reported: without a live one it is unknown how long a service remembers a key."""
    with engine.begin() as connection:
        connection.execute(sa.update(TABLES.dispatcher).values(seen_at=sa.func.now() + LIVE_FOR / 2))


def recorded(engine: sa.Engine) -> sa.Row[Any]:
    """The last row of the audit log."""
    with engine.connect() as connection:
        audit = TABLES.audit
        return connection.execute(sa.select(audit).order_by(audit.c.id.desc()).limit(1)).one()


def entry_of(engine: sa.Engine, operation: str, state: str) -> UUID:
    """One that has not ended, and that no one has decided about."""
    entry, queue = TABLES.entry, TABLES.queue
    wanted = entry.c.operation == operation, queue.c.state == state
    with engine.connect() as connection:
        found = sa.select(entry.c.id).join(queue, queue.c.id == entry.c.id).where(*wanted).order_by(entry.c.id).limit(1)
        return connection.execute(found).scalar_one()


def report_of(page: Page) -> str:
    return page.locator(".note.done").inner_text()


@pytest.mark.parametrize(
    ("operation", "decision", "with_scripts"),
    [
        ("postmark.email.send", "new_key", True),
        ("postmark.email.send", "happened", True),
        ("postmark.email.send", "happened", False),
        ("courier.labels.buy", "same_key", False),
    ],
)
def test_an_uncertain_entry_is_decided_on_the_first_page(
    browse: Browse, home: str, engine: sa.Engine, operation: str, decision: str, with_scripts: bool
) -> None:
    with browse("operator", java_script_enabled=with_scripts) as page:
        page.goto(f"{home}/?operation={operation}")
        case = page.locator("article", has=page.locator(f"input[value={decision}]")).first
        address = case.get_by_role("heading").get_by_role("link").get_attribute("href")
        case.get_by_text("Decide", exact=True).first.click()
        case.locator(f"input[value={decision}]").check()
        case.get_by_label("Reason").fill(REASON)
        case.get_by_role("button", name="Decide").click()

        assert report_of(page).startswith("The decision is recorded")
        assert page.url.startswith(f"{home}/?operation={operation}")

    row = recorded(engine)
    assert row.actor == "ada"
    assert row.reason.endswith(f": {REASON}")
    assert address is not None
    assert address.endswith(f"/entries/{row.target}")


def test_a_decision_is_taken_with_the_keyboard_alone(page: Page, home: str, engine: sa.Engine) -> None:
    page.goto(f"{home}/?operation=postmark.email.send")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    tab_to(page, ".deciding > summary")
    page.keyboard.press("Enter")
    tab_to(page, "input[type=radio]")
    page.keyboard.press("ArrowUp")  # from the first choice to the last
    tab_to(page, "input[name=reason]")
    page.keyboard.type(REASON)
    tab_to(page, "button.primary")
    page.keyboard.press("Enter")

    expect(page.locator(".note.done")).to_be_visible()

    row = recorded(engine)
    assert (row.actor, row.action, row.reason) == ("ada", "resolve", f"did_not_happen: {REASON}")


def tab_to(page: Page, selector: str) -> None:
    """Press Tab until such an element has the focus; each stop on the way must show where the focus is."""
    for _ in range(40):
        page.keyboard.press("Tab")
        width = page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")
        style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert (style, width >= 2) == ("solid", True), page.evaluate("document.activeElement.outerHTML")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"Tab never reaches {selector}")


@pytest.mark.parametrize(
    ("operation", "state", "decision"),
    [
        ("crm.contacts.upsert", "pending", "retry"),
        ("crm.contacts.upsert", "pending", "cancel"),
        ("sms.send", "retry", "release"),
    ],
)
def test_a_waiting_entry_is_decided_on_its_own_page(
    page: Page, home: str, engine: sa.Engine, operation: str, state: str, decision: str
) -> None:
    id = entry_of(engine, operation, state)
    page.goto(f"{home}/entries/{id}")
    page.locator(f"input[value={decision}]").check()
    page.get_by_label("Reason").first.fill(REASON)
    page.get_by_role("button", name="Decide").click()

    assert report_of(page).startswith("The decision is recorded")

    row = recorded(engine)
    assert (row.actor, row.action, row.target, row.reason) == ("ada", decision, str(id), REASON)


def test_what_a_card_service_declined_is_asked_for_again(page: Page, home: str, engine: sa.Engine) -> None:
    page.goto(f"{home}/entries?state=failed&operation=stripe")
    page.locator("tbody th a").first.click()
    page.locator("input[value=again]").check()
    page.get_by_label("Reason").first.fill(REASON)
    page.get_by_role("button", name="Decide").click()

    assert report_of(page).startswith("The decision is recorded")
    expect(page.get_by_text("Ask again: it was asked for again already")).to_be_visible()

    page.goto(f"{home}/entries?state=failed&operation=stripe")
    page.get_by_role("link", name="Decide for all that match").click()
    page.get_by_role("link", name="Ask again").click()
    sentence = page.locator(".sentence").inner_text()
    page.get_by_label("Reason").fill(REASON)
    page.get_by_role("button", name="Ask again").click()

    expect(page.get_by_text("0 left alone")).to_be_visible()
    assert page.locator(".sentence").inner_text() == sentence

    row, entry = recorded(engine), TABLES.entry
    assert (row.actor, row.action, row.kind, row.reason) == ("ada", "again", "entries", REASON)
    with engine.connect() as connection:
        asked = sa.select(sa.func.count()).where(entry.c.discriminator.startswith("again:"))
        assert connection.execute(asked).scalar_one() == row.count + 1


def test_a_destination_is_resumed_and_paused_again(page: Page, home: str, engine: sa.Engine) -> None:
    page.goto(f"{home}/destinations")
    row = page.get_by_role("row").filter(has_text="crm")
    expect(row.get_by_text("paused")).to_be_visible()
    row.get_by_label("Reason to resume crm").fill(REASON)
    row.get_by_role("button", name="Resume crm").click()

    assert report_of(page) == "The destination is resumed."
    assert recorded(engine).action == "resume"
    expect(row.get_by_text("paused")).to_have_count(0)

    row.get_by_label("Reason to pause crm").fill(REASON)
    row.get_by_label("Reason to pause crm").press("Enter")

    expect(row).to_contain_text(f"by ada: {REASON}")
    assert recorded(engine).action == "pause"


def test_a_blocked_group_is_released_from_its_page(page: Page, home: str, engine: sa.Engine) -> None:
    page.goto(f"{home}/groups")
    link = page.locator("tbody th a").first
    key = link.inner_text()
    link.click()
    page.get_by_label("Reason").fill(REASON)
    page.get_by_role("button", name="Release the group").click()

    assert report_of(page).startswith("The ordering group is released")

    row = recorded(engine)
    assert (row.actor, row.kind, row.target) == ("ada", "ordering_group", key)


def test_an_operator_without_a_reason_decides_nothing(page: Page, home: str, engine: sa.Engine) -> None:
    before = recorded(engine)
    page.goto(f"{home}/destinations")
    page.get_by_role("button", name="Resume crm").click()

    assert page.get_by_label("Reason to resume crm").evaluate("input => input.validity.valueMissing")
    assert page.url == f"{home}/destinations"

    assert recorded(engine) == before
