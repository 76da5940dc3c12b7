"""What needs an operator now: the line on top of every page, and the badges of the navigation."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from support.cli_runner import put_uncertain
from support.dashboard import Browser, by_header, dashboard, put_heartbeat, signed_in
from support.database import TABLES, Database
from support.entries import age, put, run_once

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import decisions
from dispatchers.admin.read import incidents
from dispatchers.dashboard.pages import VIEWS
from dispatchers.dashboard.rendering import menu_width
from outbox.sql.clock import clock, clock_plus

pytestmark = pytest.mark.on_mariadb


def line_of(page: str) -> list[tuple[str, str]]:
    """The parts of the line on top: the address of each, if it is a link, and its text."""
    (line,) = re.findall(r'<div id="alerts">(.*?)</div>', page, re.DOTALL)
    return re.findall(r'<li>(?:<a href="([^"]*)">)?([^<]*)', line)


def badges_of(page: str) -> dict[str, str]:
    return {name: text for name, text in re.findall(r'id="badge-(\w+)">([^<]*)', page) if text}


def put_incidents(database: Database, ob: outbox.Outbox) -> None:
    """One of each, except an outage of everything."""
    put_uncertain(database, ob)
    put_heartbeat(database)
    with database.owner() as connection:
        decisions.pause(connection, TABLES, "mail", actor="ada", reason="their release")
        broken = {"paused": False, "breaker": "open", "breaker_failures": 5, "changed_at": clock()}
        for name in ("crm", "sms"):
            connection.execute(sa.insert(TABLES.destination).values({**broken, "name": name}))
        group = {"ordering_key": "a", "entry_id": database.entries[0].id, "reason": "declined", "since": clock()}
        connection.execute(sa.insert(TABLES.blocked_group).values(group))
        since = {name: clock_plus(-timedelta(minutes=5)) for name in ("since", "enqueued_to", "next_at")}
        late = {"name": "report", "expression": "0 3 * * * UTC", "recent": "[]", "paused": False, **since}
        connection.execute(sa.insert(TABLES.schedule).values(late))


def test_every_page_names_what_needs_an_operator(database: Database, ob: outbox.Outbox) -> None:
    put_incidents(database, ob)

    with dashboard(database, authenticate=signed_in("viewer")) as app:
        browser = Browser(app)
        pages = [browser.text(view.path) for view in VIEWS if view.in_navigation]

    lines = [line_of(page) for page in pages]
    assert {text for _, text in lines[-1]} == {
        "1 uncertain",
        "2 breakers open",
        "1 destination paused",
        "1 group blocked",
        "1 schedule late",
    }
    assert {address for address, _ in lines[-1]} == {"/", "/destinations", "/groups", "/schedules"}
    assert all([text for _, text in line] == [text for _, text in lines[-1]] for line in lines)
    assert badges_of(pages[-1]) == {"uncertain": "1", "destinations": "3", "groups": "1", "schedules": "1"}


def test_a_quiet_outbox_has_no_line_and_no_badge(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob)

    with dashboard(database) as app:
        page = Browser(app).text("/overview")

    assert (line_of(page), badges_of(page)) == ([], {})


def test_a_standstill_comes_first_with_its_reason(database: Database, ob: outbox.Outbox) -> None:
    run_once(database, ob, adapters={"crm": MemoryAdapter()})  # which records the database's identity
    put(database, ob)
    age(database, timedelta(minutes=5))
    database.execute(sa.update(TABLES.meta).values(suspended_reason="restored from a backup"))

    with dashboard(database) as app:
        page = Browser(app).text("/audit")
    put_heartbeat(database)
    with dashboard(database) as app:
        later = Browser(app).text("/audit")

    texts = [text for _, text in line_of(page)]
    assert texts[0] == "Nothing is sent: restored from a backup"
    assert texts[1].startswith("no live dispatcher, entries due for 5 min")
    assert badges_of(page)["dispatchers"] == "0"
    assert "no live dispatcher" not in later


def test_what_is_many_is_counted_up_to_a_limit(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incidents, "MAX_COUNTED", 2)
    for number in range(3):
        put_uncertain(database, ob, parent=f"order:{number}")

    with dashboard(database) as app:
        page = Browser(app).text("/overview")

    assert ("2+ uncertain" in str(line_of(page)), badges_of(page)) == (True, {"uncertain": "2+"})


def test_an_identity_without_a_role_sees_nothing_of_it(database: Database, ob: outbox.Outbox) -> None:
    put_incidents(database, ob)

    with dashboard(database, authenticate=by_header) as app:
        refused = Browser(app, **{"X-User": "eve="}).get("/overview")
        unknown = Browser(app).get("/overview")

    for answer, status in ((refused, 403), (unknown, 401)):
        assert (answer.status_code, line_of(answer.text), badges_of(answer.text)) == (status, [], {})


def test_a_decision_is_seen_at_once(database: Database) -> None:
    with dashboard(database) as app:
        browser = Browser(app)
        before = browser.text("/destinations")
        browser.send("/destinations/pause", name="crm", reason="their release")
        after = browser.text("/destinations")

    assert (line_of(before), [text for _, text in line_of(after)]) == ([], ["1 destination paused"])


@contextmanager
def counting(database: Database) -> Iterator[list[str]]:
    statements: list[str] = []

    def count(connection: Any, cursor: Any, statement: str, *others: Any) -> None:
        statements.append(statement)

    sa.event.listen(database.engine, "before_cursor_execute", count)
    try:
        yield statements
    finally:
        sa.event.remove(database.engine, "before_cursor_execute", count)


def test_it_costs_one_query_for_all_pages_of_three_seconds(database: Database, ob: outbox.Outbox) -> None:
    put_incidents(database, ob)
    counts = []

    with dashboard(database) as app:
        browser = Browser(app)
        browser.text("/groups")
        app._incidents.forget()
        for _ in range(2):
            with counting(database) as statements:
                browser.text("/groups")
            counts.append(len([each for each in statements if each.startswith("SELECT") and "set_config" not in each]))

    assert counts[0] - counts[1] == 1


def test_a_page_is_shown_although_it_cannot_be_read(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> None:
        raise OperationalError("SELECT", {}, Exception("a statement took too long"))

    monkeypatch.setattr("dispatchers.dashboard.alerts.read_incidents", fails)
    put_incidents(database, ob)

    with dashboard(database) as app:
        page = Browser(app).text("/overview")

    assert (line_of(page), badges_of(page)) == ([], {})


@pytest.mark.parametrize(("name", "texts"), [(None, ["1,000+"]), ("north", [""]), ("n" * 40, ["1,000+", "7"])])
def test_what_the_header_shows_decides_when_its_pages_are_in_a_menu(name: str | None, texts: list[str]) -> None:
    badges = {str(number): text for number, text in enumerate(texts)}

    width = menu_width(badges, name, "ada", "/logout")

    assert menu_width({}, None, "ada", None) < width < 1700
    assert menu_width(badges, "n" * 255, "a" * 255, None) == menu_width(badges, "n" * 30, "a" * 20, None)


def test_a_page_names_the_width_of_the_screen_that_its_header_needs(database: Database, ob: outbox.Outbox) -> None:
    with dashboard(database) as app:
        quiet = Browser(app).text("/overview")
    put_incidents(database, ob)
    with dashboard(database) as app:
        busy = Browser(app).text("/overview")

    widths = [int(found[1]) for page in (quiet, busy) if (found := re.search(r'media="\(max-width: (\d+)px\)"', page))]
    assert widths == [menu_width({}, None, "ada", None), menu_width(badges_of(busy), None, "ada", None)]
