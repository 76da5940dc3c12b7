"""The command `outbox maintenance`: what it deletes and prints, its progress, and what it refuses."""

import json
import os
import pty
from datetime import timedelta

import pytest
from click.testing import CliRunner, Result
from support.database import Database
from support.entries import put
from support.python_processes import PIPE, PythonProcess
from support.retention import A_MOMENT, RETENTION, elapse, kept, request, settle_all

import outbox
from dispatchers.cli import main
from dispatchers.cli.maintenance import maintenance as command


def invoke(database: Database, *arguments: str, window: str = "24h") -> Result:
    url = database.url.render_as_string(hide_password=False)
    return CliRunner().invoke(main, ["maintenance", "--database", url, "--window", window, *arguments])


@pytest.fixture
def aged(database: Database, ob: outbox.Outbox) -> Database:
    """Three requests with an entry each and seven entries of their own, all past their time, and one unsettled."""
    for number in range(3):
        request(database, ob, f"retry-{number}", "crm.upsert")
    put(database, ob, count=7)
    settle_all(database)
    put(database, ob)
    elapse(database, RETENTION + A_MOMENT)
    return database


def test_it_deletes_all_that_may_go_and_says_how_much(aged: Database) -> None:
    result = invoke(aged)

    assert (result.exit_code, result.stdout) == (0, "deleted 3 records, 10 entries, 0 tombstones\n")
    assert kept(aged) == {"tombstone": 3, "entry": 1, "queue": 1}
    assert invoke(aged).stdout == "deleted 0 records, 0 entries, 0 tombstones\n"


def test_a_dry_run_counts_and_deletes_nothing(aged: Database) -> None:
    before = kept(aged)

    result = invoke(aged, "--dry-run")

    assert (result.exit_code, result.stdout) == (0, "would delete 3 records, 10 entries, 0 tombstones\n")
    assert kept(aged) == before


@pytest.mark.parametrize("dry_run", [True, False])
def test_with_json_it_prints_one_document(aged: Database, dry_run: bool) -> None:
    result = invoke(aged, "--json", *(["--dry-run"] if dry_run else []))

    deleted = {"records": 3, "entries": 10, "tombstones": 0}
    assert json.loads(result.stdout) == {"dry_run": dry_run, "deleted": deleted}


def test_without_a_terminal_its_progress_is_lines_on_stderr(aged: Database) -> None:
    result = invoke(aged)

    assert result.stderr.splitlines() == [
        "records: checked 3 of 3",
        "entries: checked 10 of 10",
        "tombstones: checked 0 of 0",
    ]


def test_on_a_terminal_its_progress_is_a_bar_for_each_step(aged: Database) -> None:
    controller, terminal = pty.openpty()
    url = aged.url.render_as_string(hide_password=False)
    words = ["-m", "dispatchers", "maintenance", "--database", url, "--window", "24h"]
    environment = os.environ | {"COLUMNS": "80", "TERM": "xterm"}

    with PythonProcess(*words, stdout=PIPE, stderr=terminal, env=environment) as process:
        assert process.stdout is not None
        process.wait(60)
        printed = process.stdout.read()
    os.close(terminal)
    shown = os.read(controller, 100_000).decode()
    os.close(controller)

    assert process.returncode == 0
    assert printed == "deleted 3 records, 10 entries, 0 tombstones\n"
    assert "10/10" in shown
    assert "━" in shown


def test_keep_says_how_long_entries_are_kept(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob)
    settle_all(database)
    elapse(database, timedelta(days=3))

    assert invoke(database).stdout == "deleted 0 records, 0 entries, 0 tombstones\n"
    assert invoke(database, "--retention", "2d").stdout == "deleted 0 records, 1 entries, 0 tombstones\n"


def test_a_window_without_end_makes_tombstones_of_a_year(aged: Database) -> None:
    invoke(aged, window="forever")
    elapse(aged, timedelta(days=300))
    assert invoke(aged, window="forever").stdout == "deleted 0 records, 0 entries, 0 tombstones\n"
    elapse(aged, timedelta(days=30))

    assert invoke(aged, window="forever").stdout == "deleted 0 records, 0 entries, 3 tombstones\n"


def test_its_default_is_the_dispatchers() -> None:
    (retention,) = [parameter for parameter in command.params if parameter.name == "retention"]

    assert retention.type.convert("35d", None, None) == RETENTION
    assert "35d" in CliRunner().invoke(main, ["maintenance", "--help"]).stdout


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--retention", "2d", "--window", "7d"], 1, "outbox: retention=2 days, 0:00:00 must be from 8 days, 0:00:00"),
        (["--retention", "soon"], 2, "'soon' is not a span such as 90s, 15m, 2h, 35d or 4w"),
        (["--retention", "2026-01-31"], 2, "'2026-01-31' is not a span"),
        (["--window", "ever"], 2, "'ever' is not a span"),
    ],
)
def test_settings_that_cannot_be_are_refused(aged: Database, arguments: list[str], status: int, says: str) -> None:
    before = kept(aged)

    result = invoke(aged, *arguments)

    assert result.exit_code == status
    assert says in " ".join(result.stderr.split())
    assert kept(aged) == before


def test_the_window_is_not_guessed(sqlite: Database) -> None:
    url = sqlite.url.render_as_string(hide_password=False)

    result = CliRunner().invoke(main, ["maintenance", "--database", url])

    assert result.exit_code == 2
    assert "Missing option '--window'" in result.stderr
