"""The users of `outbox web`: names, roles and hashed passwords in a file."""

import asyncio
import base64
import threading
from pathlib import Path

import httpx
import pytest
from support.cli_runner import refused, succeeded
from support.dashboard import SITE, Browser, dashboard
from support.database import Database

from dispatchers.dashboard import password_file
from dispatchers.dashboard.password_file import PasswordFile, user_line
from outbox.errors import ConfigurationError

PASSWORD = "correct horse: battery"


def basic(name: str, password: str = PASSWORD) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def users(folder: Path, *lines: str) -> Path:
    path = folder / "users"
    path.write_text("# the team\n\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def ada() -> str:
    """Her line. To hash a password takes longer than the rest of most tests."""
    return user_line("ada", ["operator"], PASSWORD)


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (basic("ada"), 200),
        (basic("ada", "wrong"), 401),
        (basic("grace"), 401),
        (basic(""), 401),
        ("Basic !", 401),
        ("Bearer x", 401),
        ("", 401),
    ],
)
def test_only_a_user_with_the_right_password_gets_in(
    sqlite: Database, tmp_path: Path, ada: str, authorization: str, status: int
) -> None:
    file = PasswordFile(users(tmp_path, ada))

    with dashboard(sqlite, authenticate=file) as app:
        browser = Browser(app, Authorization=authorization)
        answers = [browser.get("/"), browser.get("/"), browser.api("/entries")]

    assert [answer.status_code for answer in answers] == [status] * 3
    if status == 401:
        assert all(answer.headers["www-authenticate"].startswith("Basic ") for answer in answers)


def test_two_passwords_are_hashed_at_once_also_of_unknown_users(
    sqlite: Database, tmp_path: Path, ada: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = PasswordFile(users(tmp_path, ada))
    two_run, release = threading.Event(), threading.Event()
    running: list[str] = []
    most: list[int] = []

    def slow(password: str, salt: bytes) -> bytes:
        running.append(password)
        most.append(len(running))
        if len(running) == 2:
            two_run.set()
        release.wait(60)
        running.remove(password)
        return b""

    async def try_all() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=SITE) as client:
            names = ["ada", "ada", "ada", "grace", "grace", "grace"]
            headers = [{"Authorization": basic(name, str(number))} for number, name in enumerate(names)]
            tries = [asyncio.create_task(client.get("/", headers=each)) for each in headers]
            await asyncio.to_thread(two_run.wait, 60)
            release.set()
            return [(await each).status_code for each in tries]

    monkeypatch.setattr(password_file, "_hash", slow)
    with dashboard(sqlite, authenticate=file) as app:
        statuses = asyncio.run(try_all())

    assert statuses == [401] * 6
    assert (len(most), max(most)) == (6, 2)


def test_a_user_has_the_roles_of_the_file(sqlite: Database, tmp_path: Path) -> None:
    line = succeeded("user", "ada", "--role", "viewer", "--role", "payload_reader", "--password", PASSWORD).strip()

    with dashboard(sqlite, authenticate=PasswordFile(users(tmp_path, line))) as app:
        page = Browser(app, Authorization=basic("ada")).text("/")

    assert PASSWORD not in line
    assert 'title="payload_reader, viewer">ada<' in page


@pytest.mark.parametrize("line", ["ada", "ada:boss:AAAA.AAAA", "ada:viewer:short.short", ":viewer:x.y"])
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigurationError, match="line 3 of the file of users is malformed"):
        PasswordFile(users(tmp_path, line))


def test_a_file_that_is_missing_is_named(tmp_path: Path, sqlite: Database) -> None:
    status, text = refused("web", "--users", str(tmp_path / "none"), database=sqlite)

    assert status == 1
    assert "cannot be read: No such file or directory" in text
