"""`outbox web`: its options, and what the environment may not change."""

import base64
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from support.cli_runner import SECRET_TEXT, command, refused
from support.dashboard import Browser, dashboard, signed_in
from support.database import Database

from dispatchers.admin.decide.again import NO_SECRET
from dispatchers.dashboard.password_file import PasswordFile, user_line
from dispatchers.dashboard.protection import LocalHostsOnly
from outbox.errors import ConfigurationError

ADA = user_line("ada", ["viewer"], "correct horse").encode()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[uvicorn.Config]:
    """The servers' settings; none is run."""
    configs: list[uvicorn.Config] = []

    def run(app: Any, **settings: Any) -> None:
        configs.append(uvicorn.Config(app, **settings))

    monkeypatch.setattr(uvicorn, "run", run)
    return configs


def test_the_variables_of_the_server_change_nothing(sqlite: Database, started: list[uvicorn.Config]) -> None:
    result = command("web", database=sqlite, WEB_CONCURRENCY="4", UVICORN_HOST="0.0.0.0")

    assert result.exit_code == 0
    assert [(each.workers, each.host) for each in started] == [(1, "127.0.0.1")]


def test_it_asks_again_with_the_secret_of_the_environment(
    sqlite: Database, tmp_path: Path, started: list[uvicorn.Config]
) -> None:
    users = tmp_path / "users"
    users.write_text(user_line("ada", ["operator"], "correct horse"))
    ada = "Basic " + base64.b64encode(b"ada:correct horse").decode()

    for variables in ({"OUTBOX_ENV": "test"}, {"OUTBOX_ENV": "test", "OUTBOX_SECRET": SECRET_TEXT}):
        assert command("web", "--users", str(users), database=sqlite, **variables).exit_code == 0
    pages = [Browser(each.app, Authorization=ada).api("/bulk?state=failed").json() for each in started]
    malformed = refused("web", database=sqlite, OUTBOX_ENV="test", OUTBOX_SECRET="k1")

    assert [page["why_not_again"] for page in pages] == [NO_SECRET, None]
    assert malformed[0] == 1
    assert "OUTBOX_SECRET is malformed" in malformed[1]


@pytest.mark.parametrize("path", ["outbox", "/outbox/", "//evil", "/a b", "/", "/a?b"])
def test_a_root_path_that_no_link_can_begin_with_is_refused(sqlite: Database, path: str) -> None:
    status, text = refused("web", "--root-path", path, database=sqlite)

    assert status == 2
    assert "must be a path such as /outbox" in " ".join(text.split())


def test_a_wrong_url_is_named_by_its_option(sqlite: Database) -> None:
    status, text = refused("web", "--read-database", "oracle://ada@localhost/shop", database=sqlite)

    assert status == 2
    assert "'--read-database'" in text


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.2:8460", 200),
        ("[::1]:8460", 200),
        ("LOCALHOST", 200),
        ("localhost.evil", 421),
        ("127.0.0.1.evil", 421),
        ("localhost@evil", 421),
        ("[::1", 421),
    ],
)
def test_only_names_of_this_machine_are_served(sqlite: Database, host: str, status: int) -> None:
    with dashboard(sqlite, authenticate=signed_in("viewer")) as app:
        answer = Browser(LocalHostsOnly(app), Host=host).get("/api/entries")

    assert answer.status_code == status


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"\xff\xfe", "it is not UTF-8"), (b"# none", "has no user"), (ADA + b"\n" + ADA, "line 2 .* names 'ada' again")],
)
def test_a_file_of_users_that_is_ambiguous_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "users"
    path.write_bytes(content)

    with pytest.raises(ConfigurationError, match=why):
        PasswordFile(path)


def test_a_trusted_origin_is_passed_on(sqlite: Database, started: list[uvicorn.Config]) -> None:
    origin = "https://ops.example.com"

    given = command("web", "--trusted-origin", origin, database=sqlite)
    status, text = refused("web", "--trusted-origin", f"{origin}/", database=sqlite)

    assert given.exit_code == 0
    assert (status, "must be a scheme and a host" in " ".join(text.split())) == (1, True)
    assert [len(started)] == [1]


def test_users_of_a_file_get_a_link_to_sign_out(
    sqlite: Database, tmp_path: Path, started: list[uvicorn.Config]
) -> None:
    users = tmp_path / "users"
    users.write_bytes(ADA)

    assert command("web", "--users", str(users), "--root-path", "/ops", database=sqlite).exit_code == 0
    ada = "Basic " + base64.b64encode(b"ada:correct horse").decode()
    page = Browser(started[0].app, Authorization=ada).get("/").text

    assert '<a href="/ops/sign-out">Sign out</a>' in page
