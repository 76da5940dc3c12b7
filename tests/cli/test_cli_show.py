"""`outbox show`, and how what comes from outside is shown on a terminal."""

import re
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.cli_runner import (
    PRIVATE,
    document,
    error_of,
    on_terminal,
    put_ended,
    put_uncertain,
    refused,
    set_row,
    succeeded,
)
from support.database import TABLES, Database
from support.entries import HOUR, age, change, put, put_one, run_once

import outbox
from dispatchers import CannotTell, Unknown
from dispatchers.adapters import MemoryAdapter
from outbox.sql.clock import clock

# --- show


def test_show_prints_all_but_the_payload(database: Database, ob: outbox.Outbox) -> None:
    id = put_uncertain(database, ob, parent="order:1", discriminator="line-1", options={"account": "acct_1"})
    reason = {"entry_id": id, "at": clock(), "kind": "attempt", "delivery": 1, "reason": "no answer within 30 s"}
    set_row(database, TABLES.event, **reason)

    entry = document("show", str(id), database=database)

    assert entry["child_key"] == ob.child_key("order:1", "mail.send", "line-1")
    assert (entry["state"], entry["kid"], entry["key_epoch"], entry["maybe_sent"]) == ("uncertain", "k1", 0, True)
    assert entry["options"] == {"account": "acct_1"}
    assert entry["payload_bytes"] == len('{"card":"4242424242424242"}')
    (event,) = entry["events"]
    assert (event["kind"], event["delivery"], event["actor"], event["reason"]) == (
        "attempt",
        1,
        None,
        "no answer within 30 s",
    )
    assert "4242" not in str(entry)


def test_show_prints_each_lookup_and_what_it_found(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    mail = MemoryAdapter(lambda delivery: Unknown("no answer"), window=None, find=lambda delivery: CannotTell("down"))
    run_once(database, ob, adapters={"crm": mail})
    age(database, HOUR)
    run_once(database, ob, adapters={"crm": mail})

    entry = document("show", str(id), database=database)
    shown = succeeded("show", str(id), database=database)

    why = "no answer; the service keeps no keys; status lookup inconclusive: down"
    assert [(event["kind"], event["delivery"]) for event in entry["events"]] == [("attempt", 1), ("lookup", 2)]
    assert (entry["state"], entry["events"][1]["reason"], entry["reason"]) == ("uncertain", why, why)
    assert "lookup, delivery 2" in shown


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["for people", "JSON"])
def test_the_payload_is_shown_only_when_asked_for(database: Database, ob: outbox.Outbox, form: tuple[str, ...]) -> None:
    id = put_uncertain(database, ob)

    for name in (("status",), ("list",), ("show", str(id))):
        assert "4242" not in succeeded(*name, *form, database=database)
    assert PRIVATE["card"] in succeeded("show", "--reason", "asked", str(id), "--payload", *form, database=database)
    assert document("show", "--reason", "asked", str(id), "--payload", database=database)["payload"] == PRIVATE


def test_show_prints_what_the_service_answered_for_an_ended_entry(database: Database, ob: outbox.Outbox) -> None:
    delivered = document("show", str(put_ended(database, ob)), database=database)
    failed = document("show", str(put_ended(database, ob, good=False)), database=database)

    assert (delivered["state"], delivered["result"], delivered["attempts"]) == ("delivered", {"id": "ch_1"}, 1)
    assert (failed["state"], failed["result"], failed["reason"]) == ("failed", None, "status 422: no such customer")
    assert delivered["settled_at"] >= delivered["created_at"]
    assert [event["reason"] for event in failed["events"]] == ["status 422: no such customer"]


def test_show_for_people_leaves_out_what_there_is_not(database: Database, ob: outbox.Outbox) -> None:
    id = put_ended(database, ob, parent="order:1", good=False)

    printed = succeeded("show", str(id), database=database)

    fields = dict(re.findall(r"^(\S[a-z ]*?)  +(.*)$", printed, re.M))
    assert fields["id"] == str(id)
    assert (fields["state"], fields["reason"]) == ("failed", "status 422: no such customer")
    assert fields["payload"] == "14 bytes"
    assert not {"lease", "held", "in doubt since", "discriminator", "epoch"} & fields.keys()
    assert re.search(r"^AT +WHAT +BY +REASON\n\S+Z +attempt, delivery 1 +status 422: no such customer$", printed, re.M)


def test_of_a_later_epoch_show_names_the_key_and_derives_the_present_one(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    change(database, id, key_epoch=2)

    printed = succeeded("show", str(id), database=database)

    assert re.search(r"^child key +ck1_\S+ \(of epoch 0\)$", printed, re.M)
    assert re.search(r"^epoch +2: `outbox keys derive --epoch 2` prints its key$", printed, re.M)


def test_an_entry_is_found_by_the_first_digits_of_its_id(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)

    for given in (str(id), f" {str(id).upper()} ", id.hex, str(id)[:8], str(id)[:13], id.hex[:31]):
        assert document("show", given, database=database)["id"] == str(id)
        assert document("retry", "--reason", "asked", given, database=database)["id"] == str(id)


def test_digits_that_begin_several_ids_are_refused_with_those_ids(database: Database, ob: outbox.Outbox) -> None:
    for number in (1, 2):
        id = put_one(database, ob)
        for table in (TABLES.entry, TABLES.queue):
            same = UUID(f"a3a344f6-889c-8a14-b547-00000000000{number}")
            database.execute(sa.update(table).where(table.c.id == id).values(id=same))

    status, text = refused("show", "a3a344f6", database=database)

    assert status == 2
    assert (
        "'a3a344f6' is ambiguous, give more digits: a3a344f6-889c-8a14-b547-000000000001,"
        " a3a344f6-889c-8a14-b547-000000000002" in " ".join(text.split())
    )


@pytest.mark.parametrize("given", ["a3a344f", "a4633227-889c-8a14-b547-b020040e96b60", "invoice:42", ""])
def test_what_is_no_id_is_refused(sqlite: Database, given: str) -> None:
    status, text = refused("retry", "--reason", "asked", given, database=sqlite)

    assert status == 2
    assert f"{given!r} is not an entry's id: give 8 to 32 hexadecimal digits" in text


def test_show_takes_what_a_customer_quotes(database: Database, ob: outbox.Outbox) -> None:
    id = put_ended(database, ob, parent="order:1")
    put_one(database, ob, parent="order:2", ordering_key="ada")
    key = ob.child_key("order:1", "stripe.refunds.create")

    shown = [document("show", quoted, database=database)["id"] for quoted in (str(id), key, "ch_1")]
    (listed,) = document("list", "ada", database=database)["entries"]

    assert shown == [str(id)] * 3
    assert listed["parent"] == "order:2"


def test_show_lists_what_it_found_if_that_is_several_entries(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob, parent="order:1")
    put_one(database, ob, "mail.send", parent="order:1")

    printed = succeeded("show", "order:1", database=database)
    listed = succeeded("list", "order:1", database=database)

    assert printed == listed
    assert len(printed.splitlines()) == 3


def test_a_found_request_says_how_many_others_had_its_key(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session, ob.idempotent(session, "8e03978e", scope="ada", content={}) as claim:
        ob.enqueue(session, "mail.send", {})
        ob.enqueue(session, "crm.upsert", {})
        claim.respond(201, {})
    counted = {"id": claim.id, "requests": 2, "first_at": clock(), "last_at": clock()}
    database.execute(sa.insert(TABLES.mismatch).values(counted))

    printed = succeeded("show", "8e03978e", database=database)

    assert "8e03978e: succeeded; refused 2 other requests with its key" in " ".join(printed.split())


def test_what_names_nothing_is_not_found(database: Database) -> None:
    for name in ("show", "list"):
        status, code, text = error_of(name, "pi_404", database=database)
        assert (status, code, text) == (3, "not_found", "nothing has the id, key or answer 'pi_404'")


def test_a_text_and_a_filter_together_are_refused(database: Database) -> None:
    status, text = refused("list", "pi_1", "--destination", "crm", database=database)

    assert status == 2
    assert "give either a TEXT to find, or options that select entries" in " ".join(text.split())


def test_an_entry_that_is_not_there_is_not_found(database: Database) -> None:
    status, code, text = error_of("show", "a3a344f6-889c", database=database)

    assert (status, code) == (3, "not_found")
    assert text == (
        "entry a3a344f6-889c does not exist: it was never enqueued in these tables, or was deleted after it ended"
    )


# --- what is not text for a terminal


def test_what_comes_from_outside_cannot_command_the_terminal(database: Database, ob: outbox.Outbox) -> None:
    id = put_uncertain(database, ob, parent="\x1b[2J[bold]\u202e42\n")

    for arguments in (("list",), ("show", str(id))):
        printed = succeeded(*arguments, database=database)
        assert "\x1b" not in printed
        assert "\u202e" not in printed
        assert r"\x1b[2J[bold]\u202e42\n" in printed


# --- on a terminal


def test_on_a_terminal_a_list_fits_into_its_columns_and_is_coloured(sqlite: Database, ob: outbox.Outbox) -> None:
    id = put_uncertain(sqlite, ob, parent="p" * 200, discriminator="d" * 200)

    coloured, plain = on_terminal("list", database=sqlite)[1], on_terminal("list", database=sqlite, NO_COLOR="1")[1]

    assert "\x1b[1;33muncertain" in coloured
    assert "33m" not in plain
    lines = re.sub(r"\x1b\[[0-9;]*m", "", plain).splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith(f"{str(id)[:13]}  uncertain  mail.send")
    assert lines[1].count("…") == 3


def test_an_id_shown_on_a_terminal_names_one_entry_of_its_parent(sqlite: Database, ob: outbox.Outbox) -> None:
    ids = {str(put_uncertain(sqlite, ob, parent="order:1", discriminator=name)) for name in ("charge", "mail")}

    printed = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal("list", database=sqlite)[1])
    shown = re.findall(r"^([0-9a-f-]+)  uncertain", printed, re.M)

    assert {document("show", given, database=sqlite)["id"] for given in shown} == ids


def test_a_list_with_more_pages_says_how_to_read_on_at_a_terminal(sqlite: Database, ob: outbox.Outbox) -> None:
    put(sqlite, ob, count=2)
    following = document("list", "--limit", "1", database=sqlite)["next"]

    _, printed = on_terminal("list", "--limit", "1", database=sqlite)

    assert f"next page: repeat the command with --after {following}" in " ".join(
        re.sub(r"\x1b\[[0-9;]*m", "", printed).split()
    )


def test_in_a_pipe_nothing_is_cut(sqlite: Database, ob: outbox.Outbox) -> None:
    id = put_uncertain(sqlite, ob, parent="p" * 200, discriminator="d" * 200)

    (_, line) = succeeded("list", database=sqlite).splitlines()

    assert line.split() == [
        str(id),
        "uncertain",
        "mail.send",
        f"({'d' * 200})",
        "p" * 200,
        "-",
        *["no", "answer", "within", "30", "s"],
    ]
