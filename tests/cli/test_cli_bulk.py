"""Decisions in bulk on the command line: the sentence first, then the question, the progress, and exactly what was done."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import sqlalchemy as sa
from support.cli_runner import SECRET_TEXT, block, command, document, error_of, on_terminal, refused, succeeded
from support.daemons import wait_for
from support.database import IMPORT_PATH, TABLES, Database
from support.entries import change, put, put_one, run_once, states
from support.python_processes import PIPE, PythonProcess

import outbox
from dispatchers import Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.cli import bulk as cli_bulk
from outbox.keys import Keyring
from outbox.times import NEVER

WHY = ("--reason", "ordered twice", "--actor", "ada")
NOT_SETTLED = (
    "{} of them decided and not settled yet: no running dispatcher reports itself;"
    " the next one settles them without a send"
)


def events(database: Database) -> int:
    return sum(row.kind == "decision" for row in database.rows(TABLES.event))


def test_a_dry_run_says_what_would_be_done_and_does_nothing(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)
    arguments = ("cancel", "--destination", "crm", *WHY, "--dry-run")

    said, *breakdown = succeeded(*arguments, database=database).splitlines()
    assert said == "would cancel 3 entries that are pending or retry, for destination 'crm'"
    assert breakdown[:4] == [
        *("  operation: 3 crm.upsert", "  source: 3 app", "  parent key begins with: 3 order:", "  state: 3 pending")
    ]
    assert [line.split(",")[0].startswith("  sample: ") for line in breakdown[4:]] == [True] * 3
    printed = document(*arguments, database=database)
    assert (printed["count"], printed["done"], printed["dry_run"]) == (3, 0, True)
    assert events(database) == 0


def test_with_yes_it_decides_and_reports_the_counts(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)

    result = command("cancel", "--destination", "crm", *WHY, "--yes", database=database)
    repeated = command("cancel", "--destination", "crm", *WHY, "--yes", "--json", database=database)

    assert result.exit_code == 0
    assert result.stdout.splitlines() == ["cancel: 3 of 3 entries changed", NOT_SETTLED.format(3)]
    assert result.stderr.splitlines() == [
        "cancel 3 entries that are pending or retry, for destination 'crm'",
        "3 of 3",
    ]
    again = json.loads(repeated.stdout)
    assert (repeated.exit_code, again["count"], sum(again["left_alone"].values())) == (0, 0, 3)
    assert run_once(database, ob, adapters={"crm": MemoryAdapter()}) == 3
    assert states(database) == {"cancelled": 3}


def test_without_a_terminal_it_wants_yes(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob)

    status, text = refused("cancel", "--destination", "crm", *WHY, database=database)

    assert status == 2
    assert "there is no terminal to ask for confirmation: give --yes, or --dry-run first" in " ".join(text.split())
    assert events(database) == 0


@pytest.mark.parametrize(("typed", "changed"), [("y\n", 2), ("n\n", 0)])
def test_on_a_terminal_the_question_names_the_count(
    database: Database, ob: outbox.Outbox, typed: str, changed: int
) -> None:
    put(database, ob, count=2)

    status, shown = on_terminal("cancel", "--destination", "crm", *WHY, database=database, typed=typed)

    assert "Change 2 entries? [y/N]" in shown
    assert (status, events(database)) == (0 if changed else 1, changed)
    assert ("2/2" in shown) == bool(changed)


def test_many_entries_need_a_limit_and_the_limit_holds(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_bulk, "MAX_UNASKED", 2)
    put(database, ob, count=3)
    arguments = ("cancel", "--destination", "crm", *WHY, "--yes")

    unlimited = error_of(*arguments, database=database)
    too_many = error_of(*arguments, "--max", "2", database=database)

    assert unlimited[0] == too_many[0] == 1
    assert "these are 3 entries, more than 2: give --max 3 if that is right; nothing was changed" in unlimited[2]
    assert "these are 3 entries, more than --max 2; nothing was changed" in too_many[2]
    assert events(database) == 0
    assert command(*arguments, "--max", "3", database=database).exit_code == 0
    assert events(database) == 3


def test_an_ordering_key_alone_releases_its_group_and_more_selects_entries(
    database: Database, ob: outbox.Outbox
) -> None:
    put_one(database, ob, ordering_key="ada")

    status, code, _ = error_of("release", "--reason", "asked", "--ordering-key", "ada", database=database)
    chosen = document("release", "--ordering-key", "ada", "--suspended", *WHY, "--yes", database=database)

    assert (status, code) == (3, "not_found"), "the group is not blocked"
    assert chosen["count"] == 0


def test_again_makes_new_entries_under_the_apps_secret(database: Database, ob: outbox.Outbox) -> None:
    app = outbox.Outbox(Keyring.from_text(SECRET_TEXT), env="test")
    first, *_ = put(database, app, count=3)
    run_once(database, app, adapters={"crm": MemoryAdapter(lambda delivery: Rejected("no"))})
    environment = {"OUTBOX_SECRET": SECRET_TEXT, "OUTBOX_ENV": "test"}

    status, text = refused("again", "--reason", "asked", str(first), database=database)
    one = document("again", "--reason", "asked", str(first), database=database, **environment)
    same = document("again", "--reason", "asked", str(first), database=database, **environment)
    rest = command(*("again", "--operation", "crm", *WHY, "--yes"), database=database, **environment)

    assert (status, "set OUTBOX_SECRET and OUTBOX_ENV" in text) == (2, True)
    assert (one["is_new"], same["is_new"], same["again"]) == (True, False, one["again"])
    assert rest.stdout == "again: 2 of 2 entries changed\n"
    assert run_once(database, app, adapters={"crm": MemoryAdapter()}) == 3


def test_with_an_id_env_names_the_deployment_and_selects_nothing(database: Database) -> None:
    app = outbox.Outbox(Keyring.from_text(SECRET_TEXT), env="test")
    id = put_one(database, app)
    run_once(database, app, adapters={"crm": MemoryAdapter(lambda delivery: Rejected("no"))})

    made = document(
        "again", "--reason", "asked", str(id), "--env", "test", database=database, OUTBOX_SECRET=SECRET_TEXT
    )

    assert made["is_new"]


def test_a_whole_group_is_released_by_no_decision_in_bulk(database: Database, ob: outbox.Outbox) -> None:
    block(database, put_one(database, ob, ordering_key="ada"), "ada")

    status, text = refused("release", "--reason", "asked", "--ordering-key", "ada", "--dry-run", database=database)
    released = command("release", "--reason", "asked", "--ordering-key", "ada", "--yes", database=database)

    assert (status, "give --suspended too" in " ".join(text.split())) == (2, True)
    assert released.stdout == "ordering group ada released\n"


def test_an_empty_value_is_a_condition_too(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob)

    counts = [
        document("cancel", *condition, *WHY, "--dry-run", database=database)["count"]
        for condition in (("--scope", ""), ("--enqueued-before", "0s"), ("--since", "0s"))
    ]

    assert counts == [1, 1, 0]
    assert error_of("cancel", "--operation", "", *WHY, "--dry-run", database=database)[1] == "refused"


def test_a_reason_from_outside_cannot_write_to_the_terminal(database: Database, ob: outbox.Outbox) -> None:
    change(database, put_one(database, ob), suspended_reason="\x1b[2J a clone\nnext", due_at=NEVER)

    shown = succeeded("cancel", "--operation", "crm", *WHY, "--dry-run", database=database)

    assert "it is suspended (\\x1b[2J a clone\\nnext)" in shown


@pytest.mark.parametrize("option", ["--operation", "--since", "--scope"])
def test_a_filter_that_has_one_value_is_refused_if_it_is_repeated(sqlite: Database, option: str) -> None:
    given = (option, "1h", option, "2h")

    assert f"Invalid value for '{option}': was given 2 times" in error_of("list", *given, database=sqlite)[2]
    assert f"Invalid value for '{option}'" in error_of("cancel", *given, *WHY, "--dry-run", database=sqlite)[2]


@pytest.mark.parametrize("command", [("cancel", "--operation", "crm"), ("resolve", "--happened", "--operation", "crm")])
def test_a_closed_input_is_no_terminal(postgresql: Database, ob: outbox.Outbox, command: tuple[str, ...]) -> None:
    change(
        postgresql, put_one(postgresql, ob), state="pending" if command[0] == "cancel" else "uncertain", maybe_sent=True
    )
    put_one(postgresql, ob)
    url = postgresql.url.render_as_string(hide_password=False)
    words = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "dispatchers", *command, *WHY]

    environment = os.environ | {"DATABASE_URL": url, "PYTHONPATH": IMPORT_PATH}
    ended = subprocess.run(words, env=environment, text=True, capture_output=True, check=False)

    assert (ended.returncode, events(postgresql)) == (2, 0)
    assert "there is no terminal to ask for confirmation" in " ".join(ended.stderr.split())


# --- interrupted


def slowly(database: Database, *arguments: str) -> PythonProcess:
    url = database.url.render_as_string(hide_password=False)
    words = ["-m", "dispatchers", "cancel", "--destination", "crm", *WHY, "--yes", *arguments]
    environment = os.environ | {"DATABASE_URL": url, "PYTHONPATH": IMPORT_PATH}
    return PythonProcess(*words, env=environment, stdout=PIPE, stderr=PIPE)


def ended(process: PythonProcess) -> tuple[str, str]:
    """What it has printed, and its errors, when it has ended."""
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.wait(60)
        return process.stdout.read(), process.stderr.read()


def counted(database: Database) -> int:
    return sum(row.count for row in database.rows(TABLES.audit))


def test_interrupted_it_ends_its_batch_and_says_what_is_done(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=40)

    process = slowly(postgresql, "--rate", "5")
    wait_for(lambda: counted(postgresql) >= 5, "the first batch")
    process.send_signal(signal.SIGINT)
    printed, _ = ended(process)

    done = events(postgresql)
    assert process.returncode == 1
    assert printed.splitlines() == [
        f"cancel: {done} of 40 entries changed",
        NOT_SETTLED.format(done),
        f"interrupted: {40 - done} not reached; the same command continues with them",
    ]
    assert 0 < done == counted(postgresql) < 40
    finished = command("cancel", "--destination", "crm", *WHY, "--yes", database=postgresql)
    assert finished.stdout.startswith(f"cancel: {40 - done} of {40 - done} entries changed\n")


def test_interrupted_in_a_pause_it_begins_no_further_batch(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=4)

    process = slowly(postgresql, "--rate", "0.1")  # ten seconds after each entry
    wait_for(lambda: counted(postgresql) == 1, "the first entry")
    process.send_signal(signal.SIGINT)
    printed, _ = ended(process)

    assert (process.returncode, events(postgresql)) == (1, 1)
    assert "interrupted: 3 not reached" in printed


def test_a_lost_connection_says_what_is_certain(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=40)
    others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'bulk' AND pid <> pg_backend_pid()"

    process = slowly(postgresql, "--rate", "5", "--database", f"{named(postgresql)}")
    wait_for(lambda: counted(postgresql) >= 5, "the first batch")
    while process.poll() is None:
        postgresql.execute(sa.text(others))
        time.sleep(0.01)
    _, shown = ended(process)

    assert process.returncode == 1
    assert f"stopped by an error: {events(postgresql)} changed" in shown


def named(database: Database) -> str:
    url = database.url.update_query_dict({"application_name": "bulk"})
    return url.render_as_string(hide_password=False)
