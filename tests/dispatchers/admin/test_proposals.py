"""Decisions by two people: proposed by one operator, carried out when another one confirms, within a time limit."""

import json
import threading
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from support.cli_runner import command, document, error_of, on_terminal, succeeded
from support.database import TABLES, Database
from support.entries import change, put, put_one, run_once, states

import outbox
from dispatchers import Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import proposals
from dispatchers.admin.decide.audit import AuditFilter, read_audit
from dispatchers.admin.decide.bulk import BulkDecision
from dispatchers.admin.decide.proposals import VALID_FOR, Confirmed
from dispatchers.admin.decide.proposed import ENTRIES_LISTED, Proposal, read_proposal, read_proposals
from dispatchers.admin.read.entry_filter import Filter
from dispatchers.errors import DecisionRefused, EntryNotFound
from dispatchers.maintenance.audit_log import AUDIT_KEPT_FOR, delete_old_decisions
from outbox.errors import InvalidValue

pytestmark = pytest.mark.on_mariadb

CANCEL = BulkDecision(action="cancel", actor="ada", reason="ordered twice")
WAITING = Filter(states=("pending", "retry"))


def propose(database: Database, wanted: Filter = WAITING, decision: BulkDecision = CANCEL, **more: Any) -> Proposal:
    with database.engine.begin() as connection:
        return proposals.propose(connection, TABLES, wanted, decision, **more)


def confirm(database: Database, id: UUID, actor: str = "bob", **more: Any) -> Confirmed:
    with database.engine.begin() as connection:
        return proposals.confirm(connection, TABLES, id, actor=actor, **more)


def listed(database: Database) -> list[tuple[str, str | None]]:
    with database.engine.connect() as connection:
        return [(each.state, each.decided_by) for each in read_proposals(connection, TABLES)]


def audit(database: Database) -> list[tuple[str, str, int, str | None]]:
    rows = [row for row in database.rows(TABLES.audit) if row.kind != "proposed_entry"]
    return [(row.actor, row.action, row.count, row.reason) for row in rows]


def test_nothing_changes_until_another_operator_confirms(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)

    made = propose(database)
    before = len([row for row in database.rows(TABLES.event) if row.kind == "decision"])
    done = confirm(database, made.id)

    assert made.sentence == "cancel 3 entries that are pending or retry"
    assert (before, done.done, done.skipped) == (0, 3, {})
    assert listed(database) == [("confirmed", "bob")]
    assert audit(database) == [
        ("ada", "propose", 3, "ordered twice"),
        ("bob", "cancel", 3, "ordered twice (proposed by ada)"),
    ]
    assert run_once(database, ob, adapters={"crm": MemoryAdapter()}) == 3
    assert states(database) == {"cancelled": 3}


@pytest.mark.parametrize("same", ["ada", "Ada", " ADA ", "a\u200bda", "\uff41\uff44\uff41", "\u2060ada\ufeff"])
def test_who_proposed_it_cannot_confirm_it(database: Database, ob: outbox.Outbox, same: str) -> None:
    put_one(database, ob)
    made = propose(database)

    with pytest.raises(DecisionRefused, match="was made by 'ada': another operator must confirm it"):
        confirm(database, made.id, actor=same)
    assert listed(database) == [("open", None)]


def test_after_its_time_limit_it_is_refused(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob)
    made = propose(database)
    database.execute(sa.update(TABLES.proposal).values(expires_at=made.expires_at - VALID_FOR - timedelta(seconds=1)))

    with pytest.raises(DecisionRefused, match="has expired: propose the decision again"):
        confirm(database, made.id)
    assert listed(database) == [("expired", None)]


def test_a_confirmation_that_is_rolled_back_leaves_it_open(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob)
    made = propose(database)

    with database.engine.connect() as connection:
        proposals.confirm(connection, TABLES, made.id, actor="bob")
        connection.rollback()

    assert listed(database) == [("open", None)]
    assert [row for row in database.rows(TABLES.event) if row.kind == "decision"] == []
    assert confirm(database, made.id).done == 1


@pytest.mark.differs("portable", "the second operator gets 40001, and confirms again")
def test_of_two_who_confirm_at_once_one_carries_it_out(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=20)
    made = propose(database)
    barrier, results = threading.Barrier(2), []

    def operate(actor: str) -> None:
        barrier.wait()
        try:
            results.append(str(confirm(database, made.id, actor=actor).done))
        except DecisionRefused as error:
            results.append(error.state)

    operators = [threading.Thread(target=operate, args=(actor,)) for actor in ("bob", "eve")]
    for operator in operators:
        operator.start()
    for operator in operators:
        operator.join()

    assert sorted(results) == ["20", "confirmed"]
    assert len([row for row in database.rows(TABLES.event) if row.kind == "decision"]) == 20


def test_what_changed_since_the_proposal_is_left_alone(database: Database, ob: outbox.Outbox) -> None:
    gone, suspended, _ = put(database, ob, count=3)
    made = propose(database)
    with database.begin() as session:
        assert ob.cancel(session, gone)
    change(database, suspended, suspended_reason="a clone")
    put_one(database, ob, parent="order:9")

    done = confirm(database, made.id)

    assert (done.done, done.skipped) == (
        1,
        {"it is suspended (a clone): `release` it first": 1, "it has ended as cancelled": 1},
    )


def test_a_withdrawn_proposal_cannot_be_confirmed(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob)
    made = propose(database)

    with database.engine.begin() as connection:
        proposals.withdraw(connection, TABLES, made.id, actor="ada")

    assert listed(database) == [("withdrawn", "ada")]
    with pytest.raises(DecisionRefused, match="was withdrawn by 'ada'"):
        confirm(database, made.id)


def test_asking_again_and_an_answer_can_be_proposed(database: Database, ob: outbox.Outbox) -> None:
    failed = put_one(database, ob)
    run_once(database, ob, adapters={"crm": MemoryAdapter([Rejected("no")])})
    lost = put_one(database, ob)
    change(database, lost, state="uncertain", maybe_sent=True)
    why = {"actor": "ada", "reason": "seen in their log"}
    answer = BulkDecision(action="resolve", verdict="happened", result={"id": "ch_1"}, **why)
    again = BulkDecision(action="again", configuration=ob.configuration, **why)

    first = propose(database, Filter(states=("uncertain",)), answer, among=[lost])
    second = propose(database, Filter(states=("failed",)), again, among=[failed])
    confirm(database, first.id)
    confirm(database, second.id, configuration=ob.configuration)

    run_once(database, ob, adapters={"crm": MemoryAdapter()})
    assert states(database) == {"delivered": 2, "failed": 1}
    assert [json.loads(row.result) for row in database.rows(TABLES.settlement) if row.id == lost] == [{"id": "ch_1"}]


def test_what_cannot_be_proposed_is_refused(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DecisionRefused, match="nothing to propose: no entry meets the filter"):
        propose(database)
    put(database, ob, count=3)
    monkeypatch.setattr(proposals, "MAX_ENTRIES", 2)
    with pytest.raises(InvalidValue, match="are more than 2 entries"):
        propose(database)
    with pytest.raises(EntryNotFound, match="no proposal has the id"):
        confirm(database, uuid4())
    assert listed(database) == []


def test_old_proposals_are_deleted_with_the_audit_log(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob)
    made = propose(database)
    database.execute(sa.update(TABLES.proposal).values(at=made.at - AUDIT_KEPT_FOR))

    with database.engine.begin() as connection:
        assert delete_old_decisions(connection, TABLES) == 1
    assert listed(database) == []


def test_the_commands_propose_list_and_confirm(database: Database, ob: outbox.Outbox) -> None:
    one, *_ = put(database, ob, count=3)
    why = ("--reason", "ordered twice", "--actor", "ada", "--propose")

    made = document("cancel", str(one), *why, database=database)
    rest = document("cancel", "--destination", "crm", *why, database=database)
    refused = error_of("confirm", made["id"], "--yes", "--actor", "ada", database=database)
    confirmed = document("confirm", made["id"], "--yes", "--actor", "bob", database=database)
    withdrawn = succeeded("confirm", rest["id"], "--withdraw", "--actor", "ada", database=database)
    shown = document("confirm", database=database)["proposals"]

    assert (refused[0], refused[1]) == (4, "wrong_state")
    assert (confirmed["done"], confirmed["proposal"]["decided_by"]) == (1, "bob")
    assert withdrawn == "withdrawn: cancel 3 entries that are pending or retry, for destination 'crm'\n"
    assert [each["state"] for each in shown] == ["withdrawn", "confirmed"]
    assert run_once(database, ob, adapters={"crm": MemoryAdapter()}) == 3
    assert states(database) == {"cancelled": 1, "delivered": 2}


# --- what the second person sees, and what is recorded


@pytest.mark.parametrize("count", [1, 30, 1000])
def test_a_proposal_shows_its_entries_and_is_found_by_each(database: Database, ob: outbox.Outbox, count: int) -> None:
    ids = set(put(database, ob, count=count))
    made = propose(database)
    confirm(database, made.id)

    with database.engine.connect() as connection:
        (listed,) = read_proposals(connection, TABLES)
        shown = read_proposal(connection, TABLES, made.id).decision
        by_entry = read_audit(connection, TABLES, AuditFilter(target=str(min(ids))), max_rows=5).rows
        in_all = read_audit(connection, TABLES, max_rows=5).rows

    assert listed.decision is not None
    assert shown is not None
    assert (listed.decision.count, len(listed.decision.entries)) == (count, min(count, ENTRIES_LISTED))
    assert {each.id for each in shown.entries} == set(shown.ids) == ids
    assert [(row.action, row.actor) for row in by_entry] == [("confirm", "bob"), ("propose", "ada")]
    assert all("ada" in f"{row.actor} {row.reason}" for row in by_entry)
    assert [row.action for row in in_all] == ["cancel", "propose"]


def test_the_history_of_an_entry_names_both_people(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob)

    confirm(database, propose(database).id)

    decided = [row for row in database.rows(TABLES.event) if row.kind == "decision"]
    assert [(row.actor, row.reason) for row in decided] == [("bob", "ordered twice (proposed by ada)")]


def test_the_command_shows_the_whole_decision(database: Database, ob: outbox.Outbox) -> None:
    lost = put_one(database, ob, parent="order:77")
    change(database, lost, state="uncertain", maybe_sent=True)
    forged = {"id": "pi_FORGED", "amount": 10**9}
    decision = BulkDecision(action="resolve", verdict="happened", actor="ada", reason="seen", result=forged)
    made = propose(database, Filter(states=("uncertain",)), decision)

    shown = succeeded("confirm", str(made.id), "--dry-run", database=database)
    status, terminal = on_terminal("confirm", str(made.id), "--actor", "bob", database=database, typed="n\n")
    refused = command("confirm", str(made.id), "--actor", "bob", database=database)

    for text in (shown, terminal):
        assert all(part in text.replace("\n", "") for part in ("pi_FORGED", "1000000000", "ada: seen", "order:77"))
    assert str(lost) in shown
    assert (status, refused.exit_code) == (1, 2)
    assert "give --yes, or --dry-run first" in " ".join(refused.stderr.split())
    assert listed(database) == [("open", None)]
