"""Decisions in bulk in the dashboard: the sentence with the count, the pieces, and what is left alone."""

import re
import shlex
from typing import Any

import pytest
import sqlalchemy as sa
from support.cli_runner import document, put_uncertain
from support.dashboard import Browser, dashboard, signed_in
from support.database import TABLES, Database
from support.entries import change, put, put_one, queue_row

import outbox
from dispatchers.admin.decide import bulk as admin_bulk
from dispatchers.dashboard.pages import bulk
from dispatchers.stored_outcome import read_outcome

BEARER = {"Authorization": "Bearer t"}


def cancelled(database: Database) -> int:
    known = [read_outcome(row.outcome).known for row in database.queue]
    return sum(each is not None and each.state == "cancelled" for each in known)


def audit(database: Database) -> list[tuple[str, str, int, str | None]]:
    return [(row.actor, row.action, row.count, row.reason) for row in database.rows(TABLES.audit)]


def test_the_link_of_a_list_carries_its_filter_to_the_sentence(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "mail.send", count=3)
    put(database, ob, "crm.upsert", count=2)

    with dashboard(database) as app:
        browser = Browser(app)
        browser.text("/entries", operation="mail", limit="2")
        (link,) = [link for link in browser.links() if link.startswith("/bulk")]
        browser.text(link)
        (cancel,) = [link for link in browser.links() if "decision=cancel" in link]
        page = browser.text(cancel.replace("&amp;", "&"))

    assert link == "/bulk?operation=mail"
    assert "cancel 3 entries that are pending or retry, of operation &#39;mail&#39; or below it" in page
    assert "Cancel: 3 entries" in page
    assert audit(database) == []
    assert cancelled(database) == 0


def test_the_page_shows_what_the_entries_have_in_common(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "mail.send", count=2)

    with dashboard(database) as app:
        browser = Browser(app)
        page = browser.text("/bulk", decision="cancel", parent_prefix="order:")
        found = browser.api("/bulk?decision=cancel&parent_prefix=order:").json()["breakdown"]

    counts = {"operation": "mail.send", "source": "app", "parent": "order:", "state": "pending"}
    assert found["counts"] == {name: {value: 2} for name, value in counts.items()}
    assert sorted(sample["parent"] for sample in found["samples"]) == ["order:0", "order:1"]
    assert re.search(r"parent key begins with</th><td>order: <span class=\"dim\">\(2\)", page)
    assert "2000" not in page, "nothing that is sent is shown"


@pytest.mark.parametrize(
    ("roles", "status", "found"), [(["operator"], 403, 0), (["operator", "payload_reader"], 200, 1)], ids=["no", "may"]
)
def test_only_a_payload_reader_selects_by_what_was_sent(
    database: Database, ob: outbox.Outbox, roles: list[str], status: int, found: int
) -> None:
    put_one(database, ob, payload={"campaign": "spring"})
    put_one(database, ob, payload={"campaign": "summer"})
    wanted = "payload=campaign%3Dspring"

    with dashboard(database, authenticate=signed_in(*roles)) as app:
        browser = Browser(app)
        listed = browser.api(f"/entries?{wanted}")
        counted = browser.api(f"/bulk?decision=cancel&{wanted}")
        form: dict[str, Any] = {"decision": "cancel", "reason": "wrong", "payload": ["campaign=spring"]}
        form["entries"] = [str(row.id) for row in database.queue]
        decided = browser.client.post("/api/bulk/decide", json=form, headers=BEARER)

    assert [answer.status_code for answer in (listed, counted, decided)] == [status] * 3
    assert cancelled(database) == found
    if found:
        assert (len(listed.json()["entries"]), counted.json()["count"]) == (1, 1)
        assert "with 'campaign' = 'spring' in the payload" in counted.json()["sentence"]


def test_the_command_on_the_page_selects_the_same_entries(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "mail.send", count=3)
    put_one(database, ob, "mail.send", parent="order:it's")

    with dashboard(database) as app:
        shown = Browser(app).api("/bulk?decision=cancel&parent=order:it's&enqueued_since=1h").json()
    words = shlex.split(shown["command"])
    answer = document(*words[1:], "--dry-run", database=database)

    assert (answer["sentence"], answer["count"]) == (shown["sentence"], 1)


def test_a_confirmed_decision_is_recorded_with_name_and_reason(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "mail.send", count=3)
    put_one(database, ob, "crm.upsert")

    with dashboard(database, authenticate=signed_in("operator", name="grace")) as app:
        browser = Browser(app)
        browser.text("/bulk?operation=mail&decision=cancel")
        answer = browser.send("/bulk/decide", reason="ordered twice")

    assert answer.status_code == 200
    assert "3 of 3: 3 changed, 0 left alone" in answer.text
    assert "Continue" not in answer.text
    assert cancelled(database) == 3
    assert audit(database) == [("grace", "cancel", 3, "ordered twice")]


def test_a_long_decision_continues_with_a_button(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(database, ob, count=5)
    monkeypatch.setattr(bulk, "PIECE_SECONDS", 0.0)
    monkeypatch.setattr(admin_bulk, "MAX_BATCH_ENTRIES", 2)

    with dashboard(database) as app:
        browser = Browser(app)
        browser.text("/bulk?decision=cancel")
        seen = []
        fields = {"reason": "ordered twice"}
        while not seen or "Continue" in browser.page:
            answer = browser.send("/bulk/decide", **fields)
            browser.page, fields = answer.text, {}
            seen.append((cancelled(database), re.findall(r'<progress max="(\d+)" value="(\d+)"', answer.text)))

    assert seen == [(2, [("5", "2")]), (4, [("5", "4")]), (5, [("5", "5")])]
    assert "cancel 5 entries" in browser.page
    assert [row[1:3] for row in audit(database)] == [("cancel", 2), ("cancel", 2), ("cancel", 1)]


def test_what_changed_since_the_count_is_left_alone(database: Database, ob: outbox.Outbox) -> None:
    gone, held, _ = put(database, ob, count=3)

    with dashboard(database) as app:
        browser = Browser(app)
        browser.text("/bulk?decision=cancel")
        with database.begin() as session:
            assert ob.cancel(session, gone)
        change(database, held, suspended_reason="a clone")
        late = put_one(database, ob, parent="order:late")
        answer = browser.send("/bulk/decide", reason="ordered twice")

    assert "3 of 3: 1 changed, 2 left alone" in answer.text
    assert "1 left alone: it has ended as cancelled" in answer.text
    assert "1 left alone: it is suspended (a clone)" in answer.text
    assert read_outcome(queue_row(database, late).outcome).known is None


def test_a_program_counts_and_decides_with_the_same_names(database: Database, ob: outbox.Outbox) -> None:
    put_uncertain(database, ob)
    put_uncertain(database, ob)

    with dashboard(database) as app:
        browser = Browser(app)
        counted = browser.api("/bulk?decision=happened&operation=mail&since=").json()
        body = {**counted["parameters"], "entries": counted["entries"], "reason": "seen in their log"}
        answer = browser.api("/bulk/decide", body, **BEARER).json()
        repeated = browser.api("/bulk/decide", body, **BEARER).json()

    assert counted["sentence"].startswith("record for 2 entries that are uncertain")
    assert (answer["done"], answer["skipped"], answer["left"]) == (2, {}, 0)
    assert (repeated["done"], sum(repeated["skipped"].values())) == (0, 2)


def test_an_entry_that_a_program_sends_twice_is_counted_once(database: Database, ob: outbox.Outbox) -> None:
    id = str(put_one(database, ob))
    body = {"decision": "cancel", "entries": [id, id, id], "reason": "not wanted"}

    with dashboard(database) as app:
        answer = Browser(app).api("/bulk/decide", body, **BEARER).json()

    assert (answer["sentence"], answer["total"]) == ("cancel 1 entry that is pending or retry", 1)
    assert (answer["done"], answer["left"]) == (1, 0)


def test_more_entries_than_the_limit_are_left_to_the_command(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(database, ob, count=3)
    monkeypatch.setattr(bulk, "MAX_MATCHING", 2)

    with dashboard(database) as app:
        page = Browser(app).text("/bulk?decision=cancel")

    assert "More than 10,000 entries match" in page
    assert "outbox cancel --state=pending --state=retry --reason REASON" in page
    assert "/bulk/decide" not in page


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({"reason": " "}, 422, "reason"),
        ({"entries": "nonsense"}, 422, "entries"),
        ({"state": ["failed"]}, 422, "state"),
        ({"skipped": [1]}, 422, "skipped"),
        ({"decision": "ask"}, 422, "decision"),
    ],
)
def test_a_wrong_form_is_refused_before_anything_changes(
    database: Database, ob: outbox.Outbox, change: dict[str, Any], status: int, named: str
) -> None:
    put(database, ob, count=2)

    with dashboard(database) as app:
        browser = Browser(app)
        counted = browser.api("/bulk?decision=cancel").json()
        body = {**counted["parameters"], "entries": counted["entries"], "reason": "ordered twice", **change}
        answer = browser.api("/bulk/decide", body, **BEARER)

    assert (answer.status_code, answer.json()["field"]) == (status, named)
    assert cancelled(database) == 0


def test_a_viewer_is_refused_and_sees_no_link(database: Database, ob: outbox.Outbox) -> None:
    put_uncertain(database, ob)

    with dashboard(database, authenticate=signed_in("viewer")) as app:
        browser = Browser(app)
        lists = browser.text("/") + browser.text("/entries")
        page = browser.get("/bulk?decision=happened")
        answer = browser.api("/bulk/decide", {}, **BEARER)

    assert "/bulk" not in lists
    assert (page.status_code, answer.status_code) == (403, 403)


def test_a_decision_without_the_pages_token_is_refused(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob)

    with dashboard(database) as app:
        browser = Browser(app)
        browser.text("/bulk?decision=cancel")
        answer = browser.send("/bulk/decide", reason="ordered twice", csrf_token="x" * 43)

    assert answer.status_code == 403
    assert cancelled(database) == 0


def test_a_count_that_takes_too_long_is_ended(postgresql: Database, ob: outbox.Outbox) -> None:
    put_one(postgresql, ob)
    with dashboard(postgresql) as app, postgresql.observer.connect() as holder:
        holder.execute(sa.text(f"LOCK TABLE {TABLES.queue.fullname} IN ACCESS EXCLUSIVE MODE"))
        app._databases._milliseconds = 100
        answer = Browser(app).get("/bulk?decision=cancel")

    assert answer.status_code == 503
    assert "narrow the filter" in answer.text
