"""Asking again in the dashboard, for one entry and in bulk: with the app's secret, and what a dashboard without it does."""

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.cli_runner import put_ended
from support.dashboard import Browser, by_header, dashboard
from support.database import TABLES, Database
from support.entries import reasons, run_once

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.again import NO_SECRET, OTHER_SECRET, first_of
from dispatchers.admin.read.plain_values import ids_text
from dispatchers.dashboard import Dashboard
from outbox.errors import ConfigurationError
from outbox.sql.clock import clock_plus

BEARER = {"Authorization": "Bearer t"}
WHY = {"decision": "again", "reason": "it exists now"}


def put_failed(database: Database, ob: outbox.Outbox, count: int = 1) -> list[UUID]:
    return [put_ended(database, ob, good=False) for _ in range(count)]


def asked_for(database: Database) -> set[UUID | None]:
    """The entries for which there is a new one."""
    return {first_of(row.discriminator) for row in database.entries} - {None}


def audit(database: Database) -> list[tuple[str, str, int, str | None]]:
    rows = [row for row in database.rows(TABLES.audit) if row.kind != "proposed_entry"]
    return [(row.actor, row.action, row.count, row.reason) for row in rows]


def offers(entry: Any) -> dict[str, str | None]:
    return {offer["decision"]: offer["why_not"] for offer in entry["offers"] or []}


# --- one entry


def test_a_failed_entry_is_asked_for_again_on_its_page(database: Database, ob: outbox.Outbox) -> None:
    (id,) = put_failed(database, ob)

    with dashboard(database, outbox=ob) as app:
        browser = Browser(app)
        browser.text(f"/entries/{id}")
        answer = browser.send(f"/entries/{id}/decide", **WHY)
        page = browser.text(answer.headers["location"])
        after = browser.api(f"/entries/{id}").json()

    (new,) = [row for row in database.entries if row.id != id]
    assert (answer.status_code, first_of(new.discriminator)) == (303, id)
    assert reasons(database, id)[-1] == f"it exists now (again as {new.id})"
    assert audit(database) == [("ada", "again", 1, "it exists now")]
    assert f"/entries/{new.id}" in page
    assert offers(after) == {"again": "it was asked for again already"}
    adapter = MemoryAdapter()
    assert run_once(database, ob, adapters={"stripe": adapter}) == 1
    assert adapter.deliveries[0].key == ob.child_key(new.parent, new.operation, new.discriminator)


def test_the_version_of_an_ended_entry_refuses_what_has_changed(database: Database, ob: outbox.Outbox) -> None:
    (id,) = put_failed(database, ob)

    with dashboard(database, outbox=ob) as app:
        browser = Browser(app)
        version = browser.api(f"/entries/{id}").json()["version"]
        first, second = (browser.api(f"/entries/{id}/decide", {**WHY, "version": version}, **BEARER) for _ in "12")
        repeated = browser.api(f"/entries/{id}/decide", WHY, **BEARER)

    assert (first.status_code, first.json()["is_new"]) == (200, True)
    assert (second.status_code, second.json()["code"]) == (409, "changed")
    assert f"it exists now (again as {first.json()['again']})" in second.json()["detail"]
    assert (repeated.json()["again"], repeated.json()["is_new"]) == (first.json()["again"], False)
    assert audit(database) == [("ada", "again", 1, "it exists now")]


# --- in bulk


def test_all_that_a_list_shows_as_failed_are_asked_for_again(database: Database, ob: outbox.Outbox) -> None:
    failed, old = put_failed(database, ob, 2), put_failed(database, ob)[0]
    settled = sa.update(TABLES.settlement).where(TABLES.settlement.c.id == old)
    database.execute(settled.values(settled_at=clock_plus(-timedelta(days=2))))

    with dashboard(database, outbox=ob) as app:
        browser = Browser(app)
        browser.text("/entries?state=failed")
        (link,) = [link for link in browser.links() if link.startswith("/bulk")]
        browser.text(link.replace("&amp;", "&"))
        choices = [link for link in browser.links() if "decision=" in link]
        page = browser.text(choices[0].replace("&amp;", "&"))
        answer = browser.send("/bulk/decide", reason="it exists now")
        repeated = browser.text(choices[0].replace("&amp;", "&"))

    assert len(choices) == 1
    assert "enqueue again 2 entries that are failed, ended since 20" in page
    assert "2 of 2: 2 asked for again, 0 left alone" in answer.text
    assert asked_for(database) == set(failed)
    assert audit(database) == [("ada", "again", 2, "it exists now")]
    assert "2 more match and would be left alone: it was asked for again already" in repeated


@pytest.mark.parametrize(("decision", "state"), [("again", "pending"), ("cancel", "failed")])
def test_a_decision_about_states_of_the_other_kind_is_refused(
    database: Database, ob: outbox.Outbox, decision: str, state: str
) -> None:
    with dashboard(database, outbox=ob) as app:
        answer = Browser(app).api(f"/bulk?decision={decision}&state={state}")

    assert (answer.status_code, answer.json()["code"]) == (422, "mixed_states")


# --- without the secret, and with another one


def other_secret(ob: outbox.Outbox) -> outbox.Outbox:
    return outbox.Outbox(outbox.Keyring({ob.configuration.keyring.current: b"x" * 32}), env="test")


@pytest.mark.parametrize("why", [NO_SECRET, OTHER_SECRET], ids=["none", "another"])
def test_without_the_apps_secret_it_is_not_offered_and_refused(database: Database, ob: outbox.Outbox, why: str) -> None:
    (id,) = put_failed(database, ob)
    body = {**WHY, "entries": ids_text([id]), "state": ["failed"]}

    with dashboard(database, outbox=None if why is NO_SECRET else other_secret(ob)) as app:
        browser = Browser(app)
        entry, page = browser.api(f"/entries/{id}").json(), browser.text(f"/entries/{id}")
        counted, bulk = browser.api("/bulk?state=failed").json(), browser.text("/bulk?state=failed&decision=again")
        another = browser.text("/bulk?decision=cancel")
        refused = [
            browser.api(f"/entries/{id}/decide", WHY, **BEARER),
            browser.api(f"/entries/{id}/propose", WHY, **BEARER),
            browser.api("/bulk/decide", body, **BEARER),
            browser.api("/bulk/propose", body, **BEARER),
        ]

    assert offers(entry) == {"again": why}
    assert f"outbox again {id} --reason" in page
    assert (counted["why_not_again"], counted["command"]) == (why, "outbox again --state=failed --reason REASON")
    assert "outbox again --state=failed --reason REASON" in bulk
    assert "<form" not in page + bulk
    assert "decision=again" not in another
    assert [(answer.status_code, answer.json()["code"]) for answer in refused] == [(409, "secret")] * 4
    assert (asked_for(database), audit(database)) == (set(), [])


def test_an_outbox_of_other_tables_is_refused_at_the_start(database: Database, ob: outbox.Outbox) -> None:
    other = outbox.Outbox(ob.configuration.keyring, env="test", prefix="other_")

    with pytest.raises(ConfigurationError, match="prefix 'other_'"):
        Dashboard(database.engine, authenticate=by_header, outbox=other)
    with pytest.raises(ConfigurationError, match=r"must be an outbox\.Outbox, not Keyring"):
        Dashboard(database.engine, authenticate=by_header, outbox=ob.configuration.keyring)  # type: ignore[arg-type]


# --- two operators


def test_a_proposal_waits_for_a_dashboard_that_has_the_secret(database: Database, ob: outbox.Outbox) -> None:
    first, second = put_failed(database, ob, 2)
    settings: dict[str, Any] = {"authenticate": by_header, "second_person": ["again"]}

    with dashboard(database, outbox=ob, **settings) as having, dashboard(database, **settings) as lacking:
        ada, bob = (Browser(having, **{"X-User": f"{name}=operator"}) for name in ("ada", "bob"))
        elsewhere = Browser(lacking, **{"X-User": "bob=operator"})
        alone = ada.api(f"/entries/{first}/decide", WHY, **BEARER)
        ada.text("/bulk?state=failed&decision=again")
        ada.send("/bulk/propose", reason="it exists now")
        (made,) = bob.api("/proposals").json()["proposals"]
        path = f"/proposals/{made['id']}/confirm"
        page = elsewhere.text(f"/proposals/{made['id']}")
        refused = elsewhere.api(path, {}, **BEARER)
        during = asked_for(database)
        bob.text(f"/proposals/{made['id']}")
        confirmed = bob.send(path)

    assert alone.json()["code"] == "second_person"
    assert (path in page, NO_SECRET.replace("'", "&#39;") in page, made["needs_secret"]) == (False, True, True)
    assert (refused.status_code, refused.json()["code"], during) == (409, "secret", set())
    assert "2 changed" in confirmed.text
    assert asked_for(database) == {first, second}
    assert audit(database)[-1] == ("bob", "again", 2, "it exists now (proposed by ada)")


def test_the_form_of_one_entry_proposes_to_ask_again(database: Database, ob: outbox.Outbox) -> None:
    (id,) = put_failed(database, ob)

    with dashboard(database, outbox=ob, authenticate=by_header, second_person=["again"]) as app:
        ada, bob = (Browser(app, **{"X-User": f"{name}=operator"}) for name in ("ada", "bob"))
        ada.text(f"/entries/{id}")
        proposed = ada.send(f"/entries/{id}/propose", **WHY)
        (made,) = bob.api("/proposals").json()["proposals"]
        confirmed = bob.api(f"/proposals/{made['id']}/confirm", {}, **BEARER).json()

    assert (proposed.status_code, confirmed["done"]) == (303, 1)
    assert asked_for(database) == {id}
