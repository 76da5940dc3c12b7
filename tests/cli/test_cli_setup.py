"""`outbox db`, `keys`, `config` and `run`, as far as the command line itself decides."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.cli_runner import SECRET_TEXT, command, document, error_of, refused, succeeded
from support.database import Database
from support.migrations import newer_release
from support.python_processes import run_python

import outbox
from dispatchers.cli.keys import SECRET_FORM
from outbox import migrations

SECRET = SECRET_TEXT.partition(":")[2]


# --- db


def empty(tmp_path: Path) -> dict[str, str]:
    return {"DATABASE_URL": f"sqlite:///{tmp_path / 'new.db'}"}


def test_upgrade_makes_the_tables_and_says_from_where_to_where(tmp_path: Path) -> None:
    head = migrations.head()

    assert succeeded("db", "upgrade", **empty(tmp_path)) == f"upgraded from nothing to {head}\n"
    assert succeeded("db", "upgrade", **empty(tmp_path)) == f"already at {head}\n"
    assert document("db", "upgrade", **empty(tmp_path)) == {"before": head, "revision": head}
    assert succeeded("db", "check", **empty(tmp_path)) == f"the tables are at {head}\n"
    assert document("db", "check", **empty(tmp_path)) == {"revision": head, "needed": head}
    assert succeeded("status", **empty(tmp_path)) == "the queue is empty\n"


def test_upgrade_takes_a_prefix(tmp_path: Path) -> None:
    succeeded("db", "upgrade", "--prefix", "mail_", **empty(tmp_path))

    assert succeeded("status", "--prefix", "mail_", **empty(tmp_path)) == "the queue is empty\n"
    assert refused("status", **empty(tmp_path))[0] == 1


def test_upgrade_takes_a_schema(postgresql: Database) -> None:
    succeeded("db", "upgrade", "--schema", "effects", database=postgresql)

    assert succeeded("status", "--schema", "effects", database=postgresql) == "the queue is empty\n"


def test_a_check_that_fails_names_the_cure(tmp_path: Path) -> None:
    (tmp_path / "new.db").touch()

    status, code, text = error_of("db", "check", **empty(tmp_path))

    assert (status, code) == (1, "refused")
    assert "run `outbox db upgrade`; or the app's own Alembic" in text


def test_the_sql_may_begin_where_the_database_is(tmp_path: Path) -> None:
    with newer_release(tmp_path):
        assert succeeded("db", "sql", "--since", "0001") == f"{migrations.sql(since='0001')}\n"
        assert migrations.sql(since="0001") != migrations.sql()


@pytest.mark.parametrize("dialect", ["postgresql", "sqlite"])
def test_the_sql_since_the_newest_revision_is_a_comment(dialect: str) -> None:
    printed = succeeded("db", "sql", "--dialect", dialect, "--since", migrations.head())

    assert printed.strip() == f"-- nothing to do: {migrations.head()} is the newest revision that this release knows"


def test_a_revision_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    status, code, text = error_of("db", "sql", "--since", "0999")

    assert (status, code) == (1, "refused")
    assert text.startswith("revision '0999' does not exist: this release knows 0001")


def test_a_prefix_that_is_too_long_is_refused_by_every_command(tmp_path: Path) -> None:
    text = (
        f"prefix {'p' * 33!r}: must be printable text of 0 to 32 bytes: give a shorter one, or put the"
        " tables into a separate schema"
    )

    for arguments in (["db", "sql"], ["db", "roles"], ["db", "upgrade"]):
        assert error_of(*arguments, "--prefix", "p" * 33, **empty(tmp_path)) == (1, "refused", text)


def test_the_sql_is_that_of_the_library() -> None:
    assert succeeded("db", "sql") == f"{migrations.sql()}\n"
    assert document("db", "sql", "--dialect", "sqlite") == {"sql": migrations.sql("sqlite")}
    assert succeeded("db", "sql", "--schema", "s", "--prefix", "p_") == f"{migrations.sql(schema='s', prefix='p_')}\n"


def test_the_roles_are_those_of_the_library() -> None:
    roles = {"app": "shop", "dispatcher": "sender", "maintenance": "cron", "dashboard": "ops", "operator": "ada"}
    named = [text for kind, name in roles.items() for text in (f"--{kind}", name)]

    assert succeeded("db", "roles") == f"{migrations.roles()}\n"
    assert succeeded("db", "roles", "--dialect", "mariadb") == f"{migrations.roles('mariadb')}\n"
    assert document("db", "roles", *named, "--prefix", "p_") == {"sql": migrations.roles(prefix="p_", **roles)}


@pytest.mark.parametrize("given", [("--dialect", "portable"), ()])
def test_there_are_no_roles_for_the_portable_mode(given: tuple[str, ...]) -> None:
    status, text = refused("db", "roles", *given, DATABASE_URL="portable+psycopg://app@db.internal:26257/shop")

    assert status == 1
    assert "has no such roles" in text
    assert "grant SELECT, INSERT, UPDATE and DELETE on all tables" in text


def test_the_sql_for_a_url_of_the_portable_mode_is_that_modes() -> None:
    url = "portable+psycopg://app@db.internal:26257/shop"

    assert succeeded("db", "sql", DATABASE_URL=url) == f"{migrations.sql('portable')}\n"
    assert succeeded("db", "sql", "--dialect", "postgresql", DATABASE_URL=url) == f"{migrations.sql()}\n"


# --- keys


def test_a_generated_secret_is_one_that_the_library_takes() -> None:
    text = succeeded("keys", "generate", "--kid", "k7").strip()

    assert outbox.Keyring.from_text(text).current == "k7"
    assert text != succeeded("keys", "generate", "--kid", "k7").strip()
    assert document("keys", "generate")["secret"].startswith("k1:")


def test_a_malformed_kid_is_refused() -> None:
    assert refused("keys", "generate", "--kid", "a b") == (
        1,
        "outbox: kid 'a b' must match [A-Za-z0-9_.-]{1,64}\n",
    )


FIELDS = {
    "env": "prod",
    "scope": "acct_1",
    "source": "http",
    "parent": "8e03978e-40d5-43e8-bc93-6894a57f9324",
    "operation": "stripe.payment_intents.create",
}
OPTIONS = [word for name, value in FIELDS.items() for word in (f"--{name}", value)]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ((), "ck1_Yt6xpy24Jou9mN4o5TTSP1m0D2yEkGhZ"),
        (("--epoch", "1"), "ck1_0WP0qKVUWerrxcJoC-o5Cw7TIxISsOs3"),
        (("--public",), "ck1_QvfXAy2LVXh-4T9AFdZIXWJXlt75mJTC"),
        (("--encoding", "uuid"), "62deb1a7-2db8-868b-bd98-de28e534d23f"),
        (("--kid", "k1"), "ck1_Yt6xpy24Jou9mN4o5TTSP1m0D2yEkGhZ"),
    ],
)
def test_a_derived_key_is_that_of_the_published_vectors(arguments: tuple[str, ...], key: str) -> None:
    printed = document("keys", "derive", *OPTIONS, *arguments, OUTBOX_SECRET=SECRET_TEXT)

    assert printed["child_key"] == key
    assert printed["entry_id"] == "a4633227-889c-8a14-b547-b020040e96b6"
    assert printed["kid"] == ("public" if "--public" in arguments else "k1")


def test_a_derived_key_is_printed_with_the_entry_and_without_the_secret(ob: outbox.Outbox) -> None:
    arguments = (
        "--parent",
        "invoice:42",
        "--operation",
        "email.send",
        "--discriminator",
        "receipt",
        "--encoding",
        "hex",
    )

    printed = succeeded("keys", "derive", *arguments, OUTBOX_SECRET=SECRET_TEXT, OUTBOX_ENV="prod")

    key, entry = printed.splitlines()
    assert entry == "entry id   a4a307c2-d4b5-8de2-be48-ed080be9b2d2"
    assert key.startswith("child key  ")
    assert len(key.split()[-1]) == 64
    assert SECRET not in printed


@pytest.mark.parametrize(
    ("arguments", "variables", "status", "says"),
    [
        (OPTIONS[2:], {"OUTBOX_SECRET": SECRET_TEXT}, 2, "part of every key: give --env or set OUTBOX_ENV"),
        (OPTIONS, {}, 2, "keys are derived from a secret: set OUTBOX_SECRET, or give --public"),
        ([*OPTIONS, "--kid", "k9"], {"OUTBOX_SECRET": SECRET_TEXT}, 1, "no secret for kid 'k9'"),
        ([*OPTIONS, "--operation", "Email"], {"OUTBOX_SECRET": SECRET_TEXT}, 1, "operation 'Email'"),
        (OPTIONS[:-2], {"OUTBOX_SECRET": SECRET_TEXT}, 2, "Missing option '--operation'"),
        (OPTIONS, {"OUTBOX_SECRET": f"{SECRET}:k1"}, 1, "OUTBOX_SECRET is malformed"),
        (OPTIONS, {"OUTBOX_SECRET": SECRET}, 1, "OUTBOX_SECRET is malformed"),
        ([*OPTIONS, "--epoch", "-1"], {"OUTBOX_SECRET": SECRET_TEXT}, 2, "-1 is not in the range"),
    ],
)
def test_a_key_that_cannot_be_derived_is_refused_without_the_secret(
    arguments: list[str], variables: dict[str, str], status: int, says: str
) -> None:
    found, text = refused("keys", "derive", *arguments, **variables)

    assert found == status
    assert says in " ".join(text.split())
    assert SECRET not in text


# --- config


def test_config_shows_where_each_setting_comes_from(database: Database) -> None:
    printed = document(
        "config", "--prefix", "p_", database=database, OUTBOX_ENV="prod", OUTBOX_SECRET=f"{SECRET_TEXT},k0:{SECRET}"
    )

    settings = printed["settings"]
    assert settings["database"]["from"] == "DATABASE_URL"
    assert settings["schema"] == {"value": None, "from": "default"}
    assert settings["prefix"] == {"value": "p_", "from": "--prefix"}
    assert settings["env"] == {"value": "prod", "from": "OUTBOX_ENV"}
    assert settings["secret"] == {"value": "kids k0, k1; current k1", "from": "OUTBOX_SECRET"}
    assert SECRET not in json.dumps(printed)
    assert printed["versions"]["sqlalchemy"] == sa.__version__
    assert {"asyncpg", "stripe", "httpx", "aiosmtplib"} <= printed["versions"].keys()
    assert printed["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_config_shows_what_is_not_set() -> None:
    printed = document("config")

    assert printed["settings"]["database"] == {"value": None, "from": "default; DATABASE_URL is not set"}
    assert printed["settings"]["secret"] == {"value": None, "from": "OUTBOX_SECRET is not set"}
    assert printed["revision"] == {"database": None, "needed": migrations.head(), "problem": None}


def test_config_shows_the_revision_of_the_database(tmp_path: Path) -> None:
    succeeded("db", "upgrade", **empty(tmp_path))

    assert document("config", **empty(tmp_path))["revision"]["database"] == migrations.head()
    assert f"revision  {migrations.head()} (this release needs {migrations.head()})\n" in succeeded(
        "config", **empty(tmp_path)
    )


def test_tables_that_the_app_made_are_shown_alike_by_check_and_config(database: Database) -> None:
    head = migrations.head()
    made, drops = {"database": database}, "ALTER TABLE outbox_destination DROP COLUMN max_permits"

    assert document("db", "check", **made) == {"revision": None, "needed": head}
    assert succeeded("db", "check", **made) == f"the tables are those of {head}, created by the app\n"
    assert document("config", **made)["revision"] == {"database": None, "needed": head, "problem": None}
    assert "none: the app created the tables; they are complete" in succeeded("config", **made)
    database.execute(sa.text(drops))
    assert "do not run `outbox db upgrade`" in document("config", **made)["revision"]["problem"]
    assert "do not run `outbox db upgrade`" in refused("db", "check", **made)[1]


def test_config_makes_no_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "typo.db"

    printed = document("config", DATABASE_URL=f"sqlite:///{path}")["revision"]["problem"]

    assert printed.startswith(f"file {str(path)!r} does not exist")
    assert not path.exists()


def test_config_shows_why_the_database_does_not_answer_and_all_the_rest() -> None:
    unreachable = "postgresql+psycopg://shop:hunter2@127.0.0.1:1/shop"

    printed = document("config", DATABASE_URL=unreachable)

    assert printed["revision"]["problem"].startswith("database error: ")
    assert "hunter2" not in json.dumps(printed)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql+psycopg://shop:hunter2@127.0.0.1:1/shop", "postgresql+psycopg://shop:***@127.0.0.1:1/shop"),
        (
            "postgresql+psycopg://127.0.0.1:1/shop?password=hunter2&sslmode=disable&sslpassword=hunter2",
            "postgresql+psycopg://127.0.0.1:1/shop?password=%2A%2A%2A&sslmode=disable&sslpassword=%2A%2A%2A",
        ),
    ],
)
def test_config_shows_no_password(url: str, shown: str) -> None:
    printed = document("config", "--database", url)

    assert printed["settings"]["database"] == {"value": shown, "from": "--database"}
    assert "hunter2" not in json.dumps(printed)
    assert "hunter2" not in succeeded("config", "--database", url)


@pytest.mark.parametrize(
    ("name", "value", "setting", "shown", "text"),
    [
        (
            "OUTBOX_SECRET",
            f"{SECRET}:k1",
            "secret",
            f"malformed: {SECRET_FORM}",
            f"OUTBOX_SECRET is malformed: {SECRET_FORM}",
        ),
        (
            "DATABASE_URL",
            "postgresql//shop:hunter2@host",
            "database",
            "not a valid SQLAlchemy URL, and therefore not shown",
            "DATABASE_URL is not a valid SQLAlchemy URL",
        ),
    ],
)
def test_config_prints_all_but_the_setting_that_it_cannot_read_and_fails(
    name: str, value: str, setting: str, shown: str, text: str
) -> None:
    result = command("config", "--json", **{name: value})

    printed = json.loads(result.stdout)
    assert result.exit_code == 1
    assert printed["settings"][setting] == {"value": shown, "from": name}
    assert printed["versions"]["sqlalchemy"] == sa.__version__
    assert json.loads(result.stderr) == {"error": {"code": "refused", "message": text}}
    assert SECRET not in result.output
    assert "hunter2" not in result.output
    assert command("config", **{name: value}).stderr == f"outbox: {text}\n"


# --- run


def run(directory: Path, body: str, **variables: str) -> tuple[int, str]:
    """The status and the words of `outbox run app:make` in a directory whose app.py has this body."""
    (directory / "app.py").write_text(body)
    done = run_python("-m", "dispatchers", "run", "app:make", cwd=directory)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "def make(): pass",
            "app:make must return a dispatchers.Dispatcher or a dispatchers.Fleet, but returned None: is its `return` missing?",
        ),
        (
            "def make(): return 42",
            "app:make must return a dispatchers.Dispatcher or a dispatchers.Fleet, but returned 'int'",
        ),
        ("async def make(): pass", "but returned a coroutine: it must not be an `async def`"),
    ],
)
def test_a_factory_that_returns_no_dispatcher_is_reported(tmp_path: Path, body: str, says: str) -> None:
    status, text = run(tmp_path, body)

    assert status == 2
    assert says in " ".join(text.split())
    assert "Traceback" not in text
    assert "never awaited" not in text


@pytest.mark.parametrize(
    "raised", ["ValueError('my own mistake')", "sqlalchemy.exc.OperationalError('SELECT 1', {}, Exception('away'))"]
)
def test_what_a_factory_raises_is_shown_with_its_trace(tmp_path: Path, raised: str) -> None:
    status, text = run(tmp_path, f"import sqlalchemy\n\ndef make():\n    raise {raised}\n")

    assert status == 1
    assert "Traceback" in text
    assert 'app.py", line 4, in make' in text


def test_what_the_outbox_refuses_in_a_factory_is_text(tmp_path: Path) -> None:
    body = "from dispatchers import Dispatcher\n\ndef make():\n    return Dispatcher('sqlite://', concurrency=0)\n"

    assert run(tmp_path, body) == (1, "outbox: concurrency must be an int of at least 1, not 0\n")


def test_without_the_extra_it_says_which_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, Any] = sys.modules  # type: ignore[assignment]
    monkeypatch.setitem(modules, "apscheduler", None)

    status, text = refused("run", "app:make")

    assert (status, text) == (1, "outbox: APScheduler is not installed: pip install 'sqlalchemy-outbox[dispatcher]'\n")
