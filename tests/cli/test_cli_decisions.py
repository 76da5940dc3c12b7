"""`outbox retry`, `cancel`, `resolve` and `release`: what they write down, say and refuse."""

import json
from typing import Any
from uuid import UUID

import pytest
from support.cli_runner import (
    block,
    command,
    document,
    error_of,
    on_terminal,
    put_ended,
    put_suspended,
    put_uncertain,
    refused,
    succeeded,
)
from support.database import TABLES, Database
from support.entries import HOUR, put_one, queue_row, run_once, settlement_row, state

import outbox
from dispatchers.adapters import MemoryAdapter

LOOKED = ("--reason", "seen in their log")


def decisions(database: Database, id: UUID) -> list[tuple[str, str]]:
    """Who decided on the entry, and why."""
    rows = [row for row in database.rows(TABLES.event) if row.entry_id == id]
    return [(row.actor, row.reason) for row in rows if row.kind == "decision"]


# --- each does what it says


def test_a_retried_entry_is_due_now(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob, due=HOUR)
    adapters = {"crm": MemoryAdapter()}
    assert run_once(database, ob, adapters=adapters) == 0

    printed = succeeded("retry", "--reason", "asked", str(id), "--actor", "ada", database=database)

    assert printed == f"entry {id} is due now: a running dispatcher will send it\n"
    assert [actor for actor, _ in decisions(database, id)] == ["ada"]
    assert run_once(database, ob, adapters=adapters) == 1


def test_a_cancelled_entry_is_settled_by_a_dispatcher_and_never_sent(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    adapter = MemoryAdapter()

    printed = succeeded("cancel", str(id), "--reason", "ordered twice", "--actor", "ada", database=database)

    assert printed == (f"entry {id} will be cancelled: a running dispatcher will settle it, callbacks included\n")
    assert decisions(database, id) == [("ada", "ordered twice")]
    assert run_once(database, ob, adapters={"crm": adapter}) == 1
    assert (state(database, id), settlement_row(database, id).reason) == ("cancelled", "ordered twice")


@pytest.mark.parametrize(
    ("verdict", "says", "becomes"),
    [
        ("happened", "it happened", "delivered"),
        ("did_not_happen", "it did not happen and will not", "failed"),
    ],
)
def test_a_verdict_is_written_down_and_settled_by_a_dispatcher(
    database: Database, ob: outbox.Outbox, verdict: str, says: str, becomes: str
) -> None:
    id = put_uncertain(database, ob)
    option = f"--{verdict.replace('_', '-')}"

    printed = succeeded("resolve", str(id), option, *LOOKED, "--actor", "ada", database=database)

    assert printed == f"entry {id}: {says}; a running dispatcher will settle it, callbacks included\n"
    assert decisions(database, id) == [("ada", f"{verdict}: seen in their log")]
    assert state(database, id) == "uncertain"
    waiting = document("show", str(id), database=database)
    assert (waiting["known"], waiting["reason"]) == (becomes, "seen in their log")
    assert run_once(database, ob, adapters={"mail": MemoryAdapter()}) == 1
    assert state(database, id) == becomes


def test_what_is_sent_again_may_happen_twice_and_the_command_says_so(database: Database, ob: outbox.Outbox) -> None:
    id = put_uncertain(database, ob)

    printed = succeeded("resolve", str(id), "--send-again", *LOOKED, database=database)

    assert "it will be sent again, and may then happen twice; a running dispatcher will send it" in printed
    assert "will be sent again: seen in their log" in succeeded("list", database=database)
    assert "a running dispatcher will send it again" in succeeded("show", str(id), database=database)


def test_what_is_resolved_needs_no_second_lookup(database: Database, ob: outbox.Outbox) -> None:
    id = put_uncertain(database, ob)
    command("resolve", str(id), "--happened", *LOOKED, database=database)

    printed = error_of("retry", "--reason", "asked", str(id), database=database)

    assert printed[:2] == (4, "wrong_state")
    assert printed[2].endswith("an operator has decided that it is delivered; a running dispatcher carries that out")


def test_what_the_service_answered_can_be_put_on_record(database: Database, ob: outbox.Outbox) -> None:
    id = put_uncertain(database, ob)

    command("resolve", str(id), "--happened", *LOOKED, "--result", '{"id": "ch_7"}', database=database)
    run_once(database, ob, adapters={"mail": MemoryAdapter()})

    assert json.loads(settlement_row(database, id).result) == {"id": "ch_7"}


def test_a_released_entry_is_resumed(database: Database, ob: outbox.Outbox) -> None:
    id = put_suspended(database, ob)

    printed = succeeded("release", "--reason", "asked", str(id), "--actor", "ada", database=database)

    assert printed == f"entry {id} released\n"
    assert queue_row(database, id).suspended_reason is None
    assert [actor for actor, _ in decisions(database, id)] == ["ada"]


def test_a_released_group_is_resumed(database: Database, ob: outbox.Outbox) -> None:
    id = put_ended(database, ob, good=False)
    block(database, id, "invoice:7")

    printed = succeeded(
        "release", "--reason", "asked", "--ordering-key", "invoice:7", "--actor", "ada", database=database
    )

    assert printed == "ordering group invoice:7 released\n"
    assert database.rows(TABLES.blocked_group) == []
    assert [actor for actor, _ in decisions(database, id)] == ["ada"]


# --- as JSON


def test_every_decision_is_answered_in_json(database: Database, ob: outbox.Outbox) -> None:
    waiting, withdrawn = put_one(database, ob), put_one(database, ob)
    uncertain, suspended = put_uncertain(database, ob), put_suspended(database, ob)
    block(database, uncertain, "invoice:7")

    def printed(*arguments: Any) -> Any:
        return document(*map(str, arguments), "--actor", "ada", database=database)

    by = {"actor": "ada"}
    assert printed("retry", waiting, *LOOKED) == {"id": str(waiting), "decision": "retry"} | by
    assert printed("cancel", withdrawn, *LOOKED) == {"id": str(withdrawn), "decision": "cancel", "settled": False} | by
    assert printed("resolve", uncertain, "--did-not-happen", *LOOKED) == (
        {"id": str(uncertain), "decision": "resolve", "verdict": "did_not_happen"} | by
    )
    assert printed("release", suspended, *LOOKED) == {"id": str(suspended), "decision": "release"} | by
    released = printed("release", "--ordering-key", "invoice:7", *LOOKED)
    assert released == {"ordering_key": "invoice:7", "decision": "release"} | by


# --- who


def test_by_default_the_user_of_the_system_decides(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)

    succeeded("retry", "--reason", "asked", str(id), database=database, LOGNAME="grace")

    assert [actor for actor, _ in decisions(database, id)] == ["grace"]


def test_a_user_without_a_name_must_give_one(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_user() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", no_user)

    status, text = refused("retry", "--reason", "asked", "a3a344f6", database=sqlite)

    assert status == 2
    assert "the system's user has no name: give --actor" in text


# --- what is refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("resolve", "a3a344f6", *LOOKED),
            "give exactly one of --happened, --did-not-happen and --send-again",
        ),
        (
            ("resolve", "a3a344f6", *LOOKED, "--happened", "--did-not-happen"),
            "give exactly one of --happened, --did-not-happen and --send-again",
        ),
        (("resolve", "a3a344f6", "--happened"), "Missing option '--reason'"),
        (
            ("resolve", "a3a344f6", "--send-again", *LOOKED, "--result", "{}"),
            "--result is the service's answer: use it with --happened only",
        ),
        (("resolve", "a3a344f6", "--happened", *LOOKED, "--result", "{"), "'--result': is not valid JSON: Expecting"),
        (("release", *LOOKED), "give either an ID, or options that select entries"),
        (("release", "a3a344f6", "--ordering-key", "x", *LOOKED), "give either an ID, or options that select entries"),
        (("retry", *LOOKED), "give either an ID, or options that select entries"),
        (("retry", "a3a344f6", "--dry-run", *LOOKED), "--dry-run, --max and --rate need options that select entries"),
        (("cancel", "--destination", "crm"), "Missing option '--reason'"),
        (("cancel", "a3a344f6"), "Missing option '--reason'"),
        (("retry", "a3a344f6"), "Missing option '--reason'"),
        (("release", "a3a344f6"), "Missing option '--reason'"),
        (("release", "--ordering-key", "x"), "Missing option '--reason'"),
        (("again", "a3a344f6"), "Missing option '--reason'"),
        (("pause", "crm"), "Missing option '--reason'"),
        (("resume", "crm"), "Missing option '--reason'"),
        (("show", "a3a344f6", "--payload"), "Missing option '--reason'"),
        (("cancel", "nonsense", *LOOKED), "'nonsense' is not an entry's id"),
    ],
)
def test_a_decision_that_says_too_little_or_too_much_is_refused(
    sqlite: Database, arguments: tuple[str, ...], says: str
) -> None:
    status, text = refused(*arguments, database=sqlite)

    assert status == 2
    assert says in " ".join(text.split())


def test_an_impossible_ordering_key_is_refused_as_the_library_does(database: Database) -> None:
    printed = error_of("release", "--reason", "asked", "--ordering-key", "\udcff", database=database)

    assert printed == (1, "refused", r"ordering_key '\udcff': contains a lone surrogate, which UTF-8 cannot encode")


@pytest.mark.parametrize(
    "arguments",
    [
        ("retry", "a3a344f6", *LOOKED),
        ("cancel", "a3a344f6", *LOOKED),
        ("resolve", "a3a344f6", "--happened", *LOOKED),
        ("release", "a3a344f6", *LOOKED),
        ("release", "--ordering-key", "invoice:7", *LOOKED),
    ],
)
def test_what_is_not_there_is_not_found(database: Database, arguments: tuple[str, ...]) -> None:
    status, code, _ = error_of(*arguments, database=database)

    assert (status, code) == (3, "not_found")


def test_a_refusal_is_text_for_people(sqlite: Database, ob: outbox.Outbox) -> None:
    id = put_ended(sqlite, ob)

    assert refused("cancel", "--reason", "asked", str(id), database=sqlite) == (
        4,
        f"outbox: entry {id} is delivered: it has ended, and that is final\n",
    )


# --- a terminal is asked


@pytest.mark.parametrize(("typed", "status", "decided"), [("y\n", 0, 1), ("n\n", 1, 0), ("\n", 1, 0)])
def test_on_a_terminal_a_verdict_is_written_only_once_it_is_confirmed(
    sqlite: Database, ob: outbox.Outbox, typed: str, status: int, decided: int
) -> None:
    id = put_uncertain(sqlite, ob, parent="order:1")

    ended, printed = on_terminal("resolve", str(id), "--happened", *LOOKED, database=sqlite, typed=typed)

    assert ended == status
    assert f"entry {id}: mail.send of order:1, uncertain (no answer within 30 s)\n" in printed
    assert "Record that it happened? [y/N]" in printed
    assert len(decisions(sqlite, id)) == decided


def test_who_says_yes_beforehand_is_not_asked(sqlite: Database, ob: outbox.Outbox) -> None:
    id = put_uncertain(sqlite, ob)

    status, printed = on_terminal("resolve", str(id), "--happened", "--yes", *LOOKED, database=sqlite)

    assert (status, len(decisions(sqlite, id))) == (0, 1)
    assert "Record that" not in printed


def test_no_confirmation_is_asked_for_what_is_refused_anyway(sqlite: Database, ob: outbox.Outbox) -> None:
    for given, expected in (("a3a344f6", 3), (str(put_one(sqlite, ob)), 4)):
        status, printed = on_terminal("resolve", given, "--happened", *LOOKED, database=sqlite)

        assert status == expected
        assert "Record that" not in printed
