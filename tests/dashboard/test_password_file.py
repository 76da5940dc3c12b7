"""The users of `outbox web`: names, roles and hashed passwords in a file."""

import asyncio
import base64
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.cli_runner import refused, succeeded
from support.dashboard import SITE, Browser, dashboard
from support.database import Database

from dispatchers.dashboard import password_file
from dispatchers.dashboard.password_file import PasswordFile, SignOut, user_line
from dispatchers.dashboard.sign_in_limits import MAX_CLIENT_TRIES, MAX_TRIES, REMEMBERED, SignInLimits, network_of
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
        (b"Basic \xc3\xa9", 401),
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
    assert 'title="ada: payload_reader, viewer">ada<' in page


@pytest.mark.parametrize("line", ["ada", "ada:boss:AAAA.AAAA", "ada:viewer:short.short", ":viewer:x.y"])
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigurationError, match="line 3 of the file of users is malformed"):
        PasswordFile(users(tmp_path, line))


def test_a_file_that_is_missing_is_named(tmp_path: Path, sqlite: Database) -> None:
    status, text = refused("web", "--users", str(tmp_path / "none"), database=sqlite)

    assert status == 1
    assert "cannot be read: No such file or directory" in text


# --- bounds


def failing(app: Any, count: int, **changed: Any) -> list[Any]:
    """The answers to wrong passwords at the same time, each another one."""

    async def try_all() -> list[Any]:
        transport = httpx.ASGITransport(app, client=changed.get("client", ("192.0.2.1", 1)))
        async with httpx.AsyncClient(transport=transport, base_url=SITE) as client:
            names = changed.get("names", ["ada"] * count)
            headers = [{"Authorization": basic(name, f"wrong {number}")} for number, name in enumerate(names)]
            return list(await asyncio.gather(*(client.get("/", headers=each) for each in headers)))

    return asyncio.run(try_all())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash that costs nothing."""
    monkeypatch.setattr(password_file, "_hash", lambda password, salt: password.encode().ljust(32))


def test_wrong_passwords_are_bounded_by_name_and_by_client(
    sqlite: Database, tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    file = PasswordFile(users(tmp_path, user_line("ada", ["viewer"], PASSWORD)))

    with dashboard(sqlite, authenticate=file) as app:
        of_one = failing(app, 60)
        of_many = failing(app, 60, names=[f"user {number}" for number in range(60)])
        elsewhere = failing(app, 1, client=("2001:db8::1", 1))
        right = Browser(app, Authorization=basic("ada")).get("/")

    counts = [Counter(each.status_code for each in answers) for answers in (of_one, of_many, elsewhere)]
    assert counts == [
        {401: MAX_TRIES, 429: 60 - MAX_TRIES},
        {401: MAX_CLIENT_TRIES - MAX_TRIES, 429: 60 - MAX_CLIENT_TRIES + MAX_TRIES},
        {401: 1},
    ]
    assert 0 < int(next(each for each in of_one if each.status_code == 429).headers["retry-after"]) <= 60
    assert right.status_code == 200
    lines = [record.getMessage() for record in caplog.records if "sign-in failed" in record.getMessage()]
    assert lines[0] == "a sign-in failed: name 'ada', from '192.0.2.1'"
    assert len(lines) == MAX_CLIENT_TRIES + 1


def test_who_has_signed_in_is_served_while_others_try_passwords(
    sqlite: Database, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(password_file, "MAX_WAITING", 3)
    file = PasswordFile(users(tmp_path, user_line("ada", ["viewer"], PASSWORD)))
    gate = threading.Event()

    with dashboard(sqlite, authenticate=file) as app:
        browser = Browser(app, Authorization=basic("ada"))
        before = browser.get("/").status_code
        monkeypatch.setattr(password_file, "_hash", lambda password, salt: gate.wait(60) and b"")
        timer = threading.Timer(1, gate.set)
        timer.start()
        tried = failing(app, 8)
        during = browser.get("/").status_code
        timer.join()

    busy = [each for each in tried if each.status_code == 503]
    assert (before, during, len(busy)) == (200, 200, 5)
    assert busy[0].headers["retry-after"] == "1"


def test_requests_at_once_with_the_right_password_are_one_sign_in(
    sqlite: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = PasswordFile(users(tmp_path, user_line("ada", ["viewer"], PASSWORD)))
    hashed: list[str] = []
    own = password_file._hash
    monkeypatch.setattr(password_file, "_hash", lambda password, salt: hashed.append(password) or own(password, salt))

    async def ask() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=SITE) as client:
            asked = (client.get("/api/entries", headers={"Authorization": basic("ada")}) for _ in range(60))
            return [each.status_code for each in await asyncio.gather(*asked)]

    with dashboard(sqlite, authenticate=file) as app:
        statuses = asyncio.run(ask())

    assert (statuses, len(hashed)) == ([200] * 60, 1)


def test_the_limits_forget_and_remember_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    limits = SignInLimits(clock=lambda: now[0])

    tries = [limits.try_now("192.0.2.1", "ada") for _ in range(MAX_TRIES + 1)]
    now[0] = 61.0
    later = limits.try_now("192.0.2.1", "ada")
    for number in range(20_000):
        limits.try_now(f"10.0.{number // 250}.{number % 250}", "ada")

    assert tries == [None] * MAX_TRIES + [60]
    assert later is None
    assert len(limits._tries) <= REMEMBERED
    assert [limits.try_now("192.0.2.2", "x" * 300 + str(n)) for n in range(MAX_TRIES + 1)][-1] == 60


@pytest.mark.parametrize(
    ("client", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::"),
        ("2001:db8:0:0:ffff::9", "2001:db8::"),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.1"),
        ("testclient", "testclient"),
        ("", ""),
    ],
)
def test_a_client_of_ipv6_is_its_network(client: str, network: str) -> None:
    assert network_of(client) == network


# --- changes of the file


def test_a_changed_file_counts_from_the_next_request_on(
    sqlite: Database, tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    ada, grace = (user_line(name, ["viewer"], PASSWORD) for name in ("ada", "grace"))
    path = users(tmp_path, ada)

    with dashboard(sqlite, authenticate=PasswordFile(path)) as app:
        browsers = [Browser(app, Authorization=basic(name)) for name in ("ada", "grace")]
        seen = [[each.get("/").status_code for each in browsers]]
        for lines in ([grace], [grace, "malformed"], [user_line("grace", ["viewer"], "another")], [ada, grace]):
            users(tmp_path, *lines)
            seen.append([each.get("/").status_code for each in browsers])
        path.unlink()
        seen.append([each.get("/").status_code for each in browsers])

    assert seen == [[200, 401], [401, 200], [401, 200], [401, 401], [200, 200], [200, 200]]
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2
    assert "line 4 of the file of users is malformed" in errors[0]


def test_signing_out_makes_the_browser_forget(sqlite: Database, tmp_path: Path, ada: str) -> None:
    with dashboard(sqlite, authenticate=PasswordFile(users(tmp_path, ada)), sign_out="/sign-out") as app:
        browser = Browser(SignOut(app), Authorization=basic("ada"))
        page = browser.text("/")
        answer = browser.client.get("/sign-out")

    assert '<a href="/sign-out">Sign out</a>' in page
    assert (answer.status_code, answer.headers["www-authenticate"][:6]) == (401, "Basic ")
    assert answer.headers["cache-control"] == "no-store"
