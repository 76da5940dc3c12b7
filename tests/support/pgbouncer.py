"""A real PgBouncer in transaction mode, before the test server, for as long as a block lasts."""

import os
import pwd
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from dispatchers.testing import postgres_supervisor as launcher
from support.database import Database

PORT = 6432  # only part of the socket's name, and the directory is fresh
MAX_READY_SECONDS = 20
# psycopg's: a prepared statement stays on the connection that it was prepared on.
NO_PREPARED = {"prepare_threshold": None}


class BouncedDatabase(Database):
    """A database that is reached like another, but every connection goes through PgBouncer."""

    def _create_engine(self, url: sa.URL | None = None, **settings: Any) -> sa.Engine:
        return super()._create_engine(url, connect_args=NO_PREPARED, **settings)

    def _usual_engine(self, url: sa.URL) -> sa.Engine:
        return self._create_engine(url)

    def async_engine(self, role: str | None = None, **settings: Any) -> AsyncEngine:
        return super().async_engine(role, connect_args=NO_PREPARED, **settings)


def find_pgbouncer() -> str:
    """The program; skips the test where there is none."""
    found = shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")
    if found is None:
        pytest.skip("there is no pgbouncer on PATH nor in /usr/sbin: install your system's package")
    return found


@contextmanager
def pgbouncer(url: sa.URL, *, pool_size: int) -> Iterator[sa.URL]:
    """Run it before the server of `url`, with at most so many connections to it; gives the URL through it."""
    program = find_pgbouncer()
    directory = Path(tempfile.mkdtemp(prefix="outbox-pgbouncer-", dir=launcher._base_directory()))
    try:
        settings = directory / "pgbouncer.ini"
        settings.write_text(_settings(url, directory, pool_size))
        process = _start(program, settings, str(url.query.get("host") or url.host or ""))
        try:
            yield sa.URL.create(
                "postgresql+psycopg",
                username=url.username,
                database=url.database,
                query={"host": str(directory), "port": str(PORT)},
            )
        finally:
            process.terminate()
            process.wait(MAX_READY_SECONDS)
    finally:
        shutil.rmtree(directory)


def _settings(url: sa.URL, directory: Path, pool_size: int) -> str:
    server = {"host": url.host, "port": url.port, "user": url.username, "password": url.password, **url.query}
    wanted = " ".join(f"{name}={value}" for name, value in server.items() if value and name in _SERVER)
    return f"""
[databases]
* = {wanted}
[pgbouncer]
pool_mode = transaction
default_pool_size = {pool_size}
max_client_conn = 500
auth_type = any
listen_addr =
listen_port = {PORT}
unix_socket_dir = {directory}
logfile = {directory}/log
"""


_SERVER = ("host", "port", "user", "password")


def _start(program: str, settings: Path, server: str) -> subprocess.Popen[bytes]:
    """Start it, as `nobody` where this is root: PgBouncer refuses root. server: the host, or the folder of its socket."""
    directory = settings.parent
    identity: dict[str, Any] = {}
    if os.geteuid() == 0:
        account = pwd.getpwnam("nobody")
        identity = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        for path in (directory, settings):
            os.chown(path, account.pw_uid, account.pw_gid)
        for folder in (directory, Path(server)):
            _let_all_through(folder)
    log = directory / "output"
    with log.open("wb") as output:
        process = subprocess.Popen([program, settings], stdout=output, stderr=output, **identity)
    if not _is_ready(process, directory / f".s.PGSQL.{PORT}"):
        raise AssertionError(f"pgbouncer ended with {process.returncode} before it was ready: {log.read_text()}")
    return process


def _let_all_through(folder: Path) -> None:
    """Let every user pass this folder of the tests, which is open to one user only, and those that hold it."""
    base = Path(tempfile.gettempdir())
    for each in (folder, *folder.parents):
        if each.is_relative_to(base):
            each.chmod(each.stat().st_mode | stat.S_IXOTH)


def _is_ready(process: subprocess.Popen[bytes], path: Path) -> bool:
    deadline = time.monotonic() + MAX_READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as client:
            if client.connect_ex(str(path)) == 0:
                return True
        time.sleep(0.02)
    process.kill()
    process.wait()
    return False
