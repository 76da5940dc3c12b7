"""The command line as a whole: help, what it loads, how it ends, completion."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import click
import pymysql
import pytest
import sqlalchemy as sa
from support.cli_runner import command, document, error_of, refused, succeeded
from support.database import Database

import outbox
from dispatchers import cli
from dispatchers.cli import COMMANDS, exit_codes, main

NAMES = [name for section in COMMANDS.values() for name in section]
GROUPED = [*NAMES, "db upgrade", "db check", "db sql", "db roles", "keys generate", "keys derive"]
SLOW = {"outbox", "sqlalchemy", "rich", "alembic", "stripe", "apscheduler", "httpx"}

every_command = pytest.mark.parametrize("name", GROUPED)


# --- help


@every_command
def test_every_command_is_there_and_helps(name: str) -> None:
    assert succeeded(*name.split(), "--help").startswith(f"Usage: outbox {name}")
    assert succeeded(*name.split(), "-h") == succeeded(*name.split(), "--help")


@every_command
def test_every_command_answers_programs_in_json(name: str) -> None:
    text = succeeded(*name.split(), "--help")

    assert "Commands:\n" in text or "  --json  " in text


def test_the_help_shows_every_command_in_its_section() -> None:
    text = succeeded("--help")

    assert re.findall(r"^(\w[\w ]*):$", text, re.M) == ["Options", *COMMANDS]
    assert re.findall(r"^  ([a-z]+)  ", text, re.M) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_help_shows_of_a_command_the_first_line_of_its_own_help(name: str) -> None:
    (line,) = [section[name].help for section in COMMANDS.values() if name in section]
    found = main.get_command(click.Context(main), name)  # type: ignore[attr-defined]

    assert (found.help or "").splitlines()[0] == line


@pytest.mark.parametrize("name", ["", *GROUPED])
def test_the_help_cuts_no_line_short(name: str) -> None:
    # 78: what click leaves of a terminal of 80 columns; its test runner takes the whole.
    lines = succeeded(*name.split(), "--help").partition("Commands:")[2].splitlines()

    assert not [line for line in lines if "..." in line or len(line) > 78]


def test_no_command_s_help_loads_anything_slow() -> None:
    """All in one interpreter: what one of them loads stays loaded."""
    program = (
        "import sys\n"
        "from dispatchers.cli import main\n"
        f"for name in {['', *GROUPED]!r}:\n"
        "    main([*name.split(), '--help'], standalone_mode=False)\n"
        "    print('LOADED', *{module.partition('.')[0] for module in sys.modules})\n"
    )

    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    loaded = [set(line.split()) for line in printed.splitlines() if line.startswith("LOADED ")]
    slow = {name: found & SLOW for name, found in zip(["", *GROUPED], loaded, strict=True) if found & SLOW}
    assert slow == {}
    assert "dispatchers" in loaded[-1]


def test_a_misspelt_command_is_answered_with_the_one_that_was_meant() -> None:
    status, text = refused("stats")

    assert status == 2
    assert "unknown command 'stats': did you mean 'status'?" in text


def test_a_command_that_resembles_none_is_only_refused() -> None:
    assert "unknown command 'xyzzy'\n" in refused("xyzzy")[1]


def test_the_module_is_the_same_command() -> None:
    run = subprocess.run([sys.executable, "-m", "dispatchers", "--help"], capture_output=True, text=True, check=True)

    assert run.stdout == succeeded("--help")


def test_the_version_is_that_of_the_package() -> None:
    assert succeeded("--version") == f"outbox (sqlalchemy-outbox) {outbox.__version__}\n"
    assert outbox.__version__ == version("sqlalchemy-outbox")


# --- how it ends


def test_what_an_option_lacks_is_named_with_its_variable() -> None:
    status, text = refused("status")

    assert status == 2
    assert "Missing option '--database' (env var: 'DATABASE_URL')" in text


def test_an_error_of_usage_is_json_too_where_json_was_asked_for() -> None:
    assert error_of("status") == (2, "usage", "Missing option '--database' (env var: 'DATABASE_URL').")
    assert error_of("stats")[:2] == (2, "usage")
    assert error_of("list", "--limit", "0")[:2] == (2, "usage")


def test_missing_tables_are_answered_with_the_command_that_makes_them(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()

    status, text = refused("status", DATABASE_URL=f"sqlite:///{tmp_path / 'empty.db'}")

    assert status == 1
    assert text == (
        f"outbox: the table 'outbox_queue' does not exist in the database '{tmp_path / 'empty.db'}': run `outbox db"
        " upgrade` (or the app's own Alembic migrations, if they create the"
        " outbox's tables), or give --prefix or --schema\n"
    )


@pytest.mark.parametrize("name", ["status", "db check", "db partition"])
def test_a_file_that_is_not_there_is_not_made_by_looking(tmp_path: Path, name: str) -> None:
    path = tmp_path / "typo.db"

    status, text = refused(*name.split(), DATABASE_URL=f"sqlite:///{path}")

    assert status == 1
    cure = "check --database, or create the tables with `outbox db upgrade`"
    assert text == f"outbox: file {str(path)!r} does not exist: {cure}\n"
    assert not path.exists()


def test_a_database_that_does_not_answer_is_no_trace() -> None:
    status, code, text = error_of("status", DATABASE_URL="postgresql+psycopg://shop@127.0.0.1:1/shop")

    assert (status, code) == (1, "database")
    assert text.startswith("database error: ")
    assert "refused" in text
    assert "\n" not in text


def test_an_error_of_the_database_shows_no_parameters() -> None:
    error = sa.exc.IntegrityError("INSERT", {"payload": "4242"}, Exception("duplicate key\nDETAIL: (4242) exists"))

    assert exit_codes.failure_of(error) == exit_codes.Failure(1, "database", "database error: duplicate key")


def test_a_galera_node_outside_the_majority_is_said_in_words() -> None:
    failure = exit_codes.failure_of(
        sa.exc.OperationalError("SELECT", None, pymysql.err.OperationalError(1047, "WSREP"))
    )

    assert failure is not None
    assert failure.message.startswith("database unavailable: this Galera node is outside the cluster's majority")


def test_an_unexpected_error_keeps_its_trace() -> None:
    assert exit_codes.failure_of(RuntimeError("a bug")) is None


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql", "the URL is not a valid SQLAlchemy URL, e.g. postgresql+psycopg://user@host/name"),
        (
            "oracle://user:hunter2@host/shop",
            "the URL is for another database: the outbox runs on postgresql, sqlite, mariadb and mysql, not on"
            " 'oracle'",
        ),
        ("postgresql+nodriver://user:hunter2@host/shop", "names an unknown driver, 'postgresql+nodriver'"),
        ("postgresql+psycopg2://user:hunter2@host/shop", "needs the driver 'psycopg2', which is not installed"),
        ("mariadb+mariadbconnector://user:hunter2@host/shop", "pip install 'sqlalchemy-outbox[mariadb]'"),
        ("sqlite://", "the URL is an in-memory database"),
        ("sqlite:///:memory:", "the URL is an in-memory database"),
        ("user:hunter2@host", "the URL is not a valid SQLAlchemy URL"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url: str, says: str) -> None:
    status, text = refused("status", DATABASE_URL=url)

    assert status == 2
    assert says in " ".join(text.split())
    assert "hunter2" not in text


def test_a_driver_for_asyncio_is_exchanged_for_its_own_synchronous_one(sqlite: Database) -> None:
    assert succeeded("status", DATABASE_URL=sqlite.async_url.render_as_string()) == "the queue is empty\n"


# --- docs/cli.md and docs/cli-entries.md


DOCS = Path(cli.__file__).parents[2] / "docs"
PAGES = "\n".join((DOCS / page).read_text() for page in ("cli.md", "cli-entries.md"))


def test_the_exit_codes_are_those_of_the_page() -> None:
    printed = [int(code) for code in re.findall(r"^\| (\d) \| ", PAGES, re.M)]

    codes = (
        exit_codes.DONE,
        exit_codes.REFUSED,
        exit_codes.USAGE,
        exit_codes.NOT_FOUND,
        exit_codes.WRONG_STATE,
        exit_codes.UNCERTAIN,
        exit_codes.VIOLATED,
        exit_codes.UNHEALTHY,
    )
    assert printed == list(codes) == [0, 1, 2, 3, 4, 5, 6, 7]


def section_of(name: str) -> str:
    """What the pages say of a command: of all of them, and of this one."""
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGES, re.M | re.S))
    (decides,) = [commands for title, commands in COMMANDS.items() if title == "Decide"]
    title = "Decisions" if name in decides and name not in sections else name.split()[0]
    assert f"`{name}" in PAGES
    return "".join((sections["Common options"], sections[title]))


@every_command
def test_every_option_of_a_command_is_on_the_page(name: str) -> None:
    command: click.Command = main
    for word in name.split():
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), word)
        assert found is not None
        command = found

    options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    assert {option for option in options if not re.search(rf"{option}\b", section_of(name))} == set()


def test_the_page_lists_every_command_and_nothing_twice() -> None:
    listed = PAGES.partition("`--help` or `-h`")[0]
    rows = [re.findall(r"^\| ([^|]*) \|", section, re.M) for section in PAGES.split("\n## ")]

    assert [name for name in NAMES if not re.search(rf"`{name}\b", listed)] == []
    assert [row for section in rows for row in section if row.startswith("`") and section.count(row) > 1] == []


# --- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(shell: str) -> None:
    script = succeeded("completion", shell)

    assert f"_OUTBOX_COMPLETE={shell}_complete" in script
    assert document("completion", shell) == {"shell": shell, "script": script.removesuffix("\n")}


def test_another_shell_is_refused() -> None:
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in refused("completion", "tcsh")[1]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("outbox re", {"retry", "resolve", "release", "resume", "resend"}),
        ("outbox --ver", {"--version"}),
        ("outbox db ", {"upgrade", "check", "partition", "sql", "roles"}),
        ("outbox list --state u", {"uncertain"}),
        ("outbox resolve --ha", {"--happened"}),
    ],
)
def test_the_shell_is_offered_what_may_follow(typed: str, offered: set[str]) -> None:
    variables = {"_OUTBOX_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    script = Path(sys.executable).parent / "outbox"

    run = subprocess.run([script], env=os.environ | variables, capture_output=True, text=True)

    assert {line.partition(",")[2] for line in run.stdout.splitlines()} == offered


# --- colours


def test_colours_are_for_terminals_only(sqlite: Database) -> None:
    assert "\x1b" not in succeeded("config", database=sqlite)


def test_a_document_is_one_json_value_and_nothing_else(sqlite: Database) -> None:
    result = command("status", "--json", database=sqlite)

    assert isinstance(json.loads(result.stdout), dict)
    assert result.stderr == ""
