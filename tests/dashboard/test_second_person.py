"""Decisions that need a second person: proposed by one operator, confirmed by another, in the dashboard."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.cli_runner import put_uncertain
from support.dashboard import Browser, by_header, dashboard, put_heartbeat
from support.database import TABLES, Database
from support.entries import put, put_one, queue_row

import outbox
from dispatchers.admin.decide import proposals
from dispatchers.admin.decide.bulk import NEWS, BulkDecision
from dispatchers.admin.read.entry_filter import Filter
from dispatchers.admin.read.plain_values import ids_text
from dispatchers.dashboard import Dashboard
from dispatchers.stored_outcome import read_outcome
from outbox.errors import ConfigurationError
from outbox.sql.clock import clock

BEARER = {"Authorization": "Bearer t"}
OF_TWO = ["cancel", "did_not_happen", "send_again"]


class Team(NamedTuple):
    """ada, bob: the browsers of two operators."""

    ada: Browser
    bob: Browser


@pytest.fixture
def team(database: Database) -> Iterator[Team]:
    with dashboard(database, authenticate=by_header, second_person=OF_TWO) as app:
        yield Team(*(Browser(app, **{"X-User": f"{name}=operator"}) for name in ("ada", "bob")))


def decided(database: Database, *ids: Any) -> int:
    return sum(read_outcome(queue_row(database, id).outcome).known is not None for id in ids)


def audit(database: Database) -> list[tuple[str, str, int, str | None]]:
    rows = [row for row in database.rows(TABLES.audit) if row.kind != "proposed_entry"]
    return [(row.actor, row.action, row.count, row.reason) for row in rows]


def confirm_path(browser: Browser) -> str:
    """Where the form of the newest proposal leads, on the page of the proposal, to which the list links."""
    path = proposal_path(browser.text("/proposals"))
    assert f'action="{path}/confirm"' in browser.text(path)
    return f"{path}/confirm"


def proposal_path(page: str) -> str:
    found = re.search(r'href="(/proposals/[^"]*)"', page)
    assert found
    return found[1]


def test_a_bulk_decision_waits_for_another_operator(database: Database, ob: outbox.Outbox, team: Team) -> None:
    ids = put(database, ob, count=3)

    team.ada.text("/bulk?decision=cancel")
    proposed = team.ada.send("/bulk/propose", reason="ordered twice")
    own = team.ada.text(proposed.headers["location"])
    during = decided(database, *ids)
    listed = team.bob.text("/proposals")
    path = proposal_path(listed)
    shown, hers = team.bob.text(path), team.ada.text(path)

    assert "is proposed. Nothing changes until" in own
    assert "waits for another operator" in own
    assert "Another operator must confirm it" in hers
    for page in (listed, shown):
        assert all(
            text in page for text in ("cancel 3 entries that are pending or retry", "ada", "ordered twice", "in 3 h")
        )
    assert "3 of 3 entries would change" in shown
    assert during == 0
    assert (f"{path}/confirm" in shown, f"{path}/confirm" in hers) == (True, False)
    assert audit(database) == [("ada", "propose", 3, "ordered twice")]


def test_a_confirmed_proposal_is_carried_out_and_counted(database: Database, ob: outbox.Outbox, team: Team) -> None:
    gone, *ids = put(database, ob, count=3)
    team.ada.text("/bulk?decision=cancel")
    team.ada.send("/bulk/propose", reason="ordered twice")
    with database.begin() as session:
        assert ob.cancel(session, gone)

    path = confirm_path(team.bob)
    before = team.bob.page
    answer = team.bob.send(path)

    assert "2 of 3 entries would change" in before
    assert "1 would be left alone" in before
    assert "2 changed" in answer.text
    assert "1 left alone: it has ended as cancelled" in answer.text
    assert decided(database, *ids) == 2
    assert audit(database)[-1] == ("bob", "cancel", 2, "ordered twice (proposed by ada)")
    assert "confirmed" in team.ada.text("/proposals")


def test_what_was_sent_again_since_it_was_counted_is_not_decided(
    database: Database, ob: outbox.Outbox, team: Team
) -> None:
    since_counted, since_proposed = put_uncertain(database, ob), put_uncertain(database, ob)
    counted = team.ada.api("/bulk?decision=did_not_happen").json()
    body = {**counted["parameters"], "entries": counted["entries"], "reason": "not in their log"}

    put_attempt(database, since_counted)
    made = team.ada.api("/bulk/propose", body, **BEARER).json()
    put_attempt(database, since_proposed)
    confirmed = team.bob.api(f"/proposals/{made['id']}/confirm", {}, **BEARER).json()
    alone = team.bob.api("/bulk/decide", {**body, "decision": "happened"}, **BEARER).json()

    assert made["sentence"].startswith("record for 1 entry")
    assert (confirmed["done"], confirmed["skipped"]) == (0, {NEWS: 1})
    assert (alone["done"], alone["skipped"]) == (0, {NEWS: 2})


def put_attempt(database: Database, id: UUID) -> None:
    event = {"entry_id": id, "at": clock(), "kind": "attempt", "delivery": 2, "reason": "no answer within 30 s"}
    database.execute(sa.insert(TABLES.event).values(event))


def test_a_decision_of_two_cannot_be_made_by_one(database: Database, ob: outbox.Outbox, team: Team) -> None:
    id, lost = put_one(database, ob), put_uncertain(database, ob)
    counted = team.ada.api("/bulk?decision=cancel").json()
    body = {**counted["parameters"], "entries": counted["entries"], "reason": "ordered twice"}

    bulk = team.ada.api("/bulk/decide", body, **BEARER)
    one = team.ada.api(f"/entries/{id}/decide", {"decision": "cancel", "reason": "x"}, **BEARER)
    again = team.ada.api(f"/entries/{lost}/decide", {"decision": "new_key", "reason": "x"}, **BEARER)
    alone = team.ada.api(f"/entries/{lost}/decide", {"decision": "happened", "reason": "seen"}, **BEARER)

    assert [answer.json().get("code") for answer in (bulk, one, again)] == ["second_person"] * 3
    assert alone.status_code == 200
    assert (decided(database, id), decided(database, lost)) == (0, 1)


def test_the_form_of_an_entry_proposes_what_needs_two(database: Database, ob: outbox.Outbox, team: Team) -> None:
    id = put_uncertain(database, ob)
    put_heartbeat(database)

    page = team.ada.text(f"/entries/{id}")
    answer = team.ada.send(f"/entries/{id}/propose", decision="did_not_happen", reason="not in their log")
    team.bob.send(confirm_path(team.bob))

    assert "What another operator must confirm" in page
    assert answer.status_code == 303
    known = read_outcome(queue_row(database, id).outcome).known
    assert known is not None
    assert known.state == "failed"


def test_a_proposal_can_be_withdrawn_by_its_own_operator(database: Database, ob: outbox.Outbox, team: Team) -> None:
    put_one(database, ob)
    team.ada.text("/bulk?decision=cancel")
    team.ada.send("/bulk/propose", reason="ordered twice")
    path = confirm_path(team.bob)

    team.ada.text(path.removesuffix("/confirm"))
    withdrawn = team.ada.send(path.replace("confirm", "withdraw"))
    refused = team.bob.send(path)

    assert withdrawn.status_code == 303
    assert (refused.status_code, "was withdrawn by" in refused.text) == (409, True)


@pytest.mark.parametrize("names", ["cancel", ["look_up"]])
def test_a_name_that_is_no_decision_is_refused(database: Database, names: Any) -> None:
    with pytest.raises(ConfigurationError, match="second_person"):
        Dashboard(database.engine, authenticate=by_header, second_person=names)


def test_who_confirms_sees_each_entry_and_the_whole_answer(database: Database, ob: outbox.Outbox) -> None:
    id = put_uncertain(database, ob, parent="order:77")
    body = {"decision": "happened", "reason": "seen", "result": {"id": "pi_FORGED", "amount": 10**9}}

    with dashboard(database, authenticate=by_header) as app:
        ada, bob, viewer = (
            Browser(app, **{"X-User": user}) for user in ("ada=operator", "bob=operator", "eve=viewer+payload_reader")
        )
        made = ada.api(f"/entries/{id}/propose", body, **BEARER).json()
        page = bob.text(f"/proposals/{made['id']}")
        document = bob.api(f"/proposals/{made['id']}").json()["proposals"][0]["decision"]
        hidden = viewer.api("/proposals").json()["proposals"][0]["decision"]
        blind = viewer.text(f"/proposals/{made['id']}")

    assert all(text in page for text in (f"/entries/{id}", "mail.send", "order:77", "pi_FORGED", "1000000000"))
    assert (document["verdict"], document["result"], document["ids"]) == ("happened", body["result"], [str(id)])
    assert [each["parent"] for each in document["entries"]] == ["order:77"]
    assert hidden is None
    assert "pi_FORGED" not in blind


@pytest.mark.parametrize(("count", "says"), [(1, "1 of 1 entry was deleted"), (3, "1 of 3 entries was deleted")])
def test_a_proposal_says_that_an_entry_was_deleted(
    database: Database, ob: outbox.Outbox, count: int, says: str
) -> None:
    ids = put(database, ob, count=count)
    with database.owner() as connection:
        made = proposals.propose(
            connection, TABLES, Filter(), BulkDecision(action="cancel", actor="ada", reason="asked")
        )
        for table in (TABLES.queue, TABLES.entry):
            connection.execute(sa.delete(table).where(table.c.id == ids[0]))

    with dashboard(database) as app:
        page = Browser(app).text(f"/proposals/{made.id}")

    assert f"{says} since." in page


def test_the_audit_log_links_to_the_proposals(database: Database, ob: outbox.Outbox, team: Team) -> None:
    paths = []
    for reason in ("ordered twice", "asked for it"):  # with the same sentence
        put_one(database, ob)
        body = team.ada.api("/bulk?decision=cancel").json()
        wanted = {**body["parameters"], "entries": ids_text([database.entries[-1].id]), "reason": reason}
        paths.append(f"/proposals/{team.ada.api('/bulk/propose', wanted, **BEARER).json()['id']}")
    team.bob.api(f"{paths[0]}/confirm", {}, **BEARER)
    team.ada.api(f"{paths[1]}/withdraw", {}, **BEARER)

    rows = re.findall(r"<tr>(.*?)</tr>", team.bob.text("/audit"), re.DOTALL)[1:]
    linked = [next((path for path in paths if f'"{path}"' in row), None) for row in rows]

    assert linked == [paths[1], paths[0], paths[1], paths[0]]
