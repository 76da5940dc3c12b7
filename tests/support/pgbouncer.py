"""A real PgBouncer in transaction mode, before the test server, for as long as a block lasts."""

import os
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
READY_SECONDS_MAX = 20
START_TRIES = 3  # on a busy machine a first process sometimes does not enter its user namespace
NO_PREPARED = {
    "prepare_threshold": None
}  # psycopg's: a prepared statement stays on the connection that it was prepared on


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
        process = _start(program, settings, directory, str(url.query.get("host") or url.host or ""))
        try:
            yield sa.URL.create(
                "postgresql+psycopg",
                username=url.username,
                database=url.database,
                query={"host": str(directory), "port": str(PORT)},
            )
        finally:
            process.terminate()
            process.wait(READY_SECONDS_MAX)
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


def _start(program: str, settings: Path, directory: Path, host: str) -> subprocess.Popen[bytes]:
    """Start it as the first user that it agrees to run as, and that reaches the server: like PostgreSQL, it refuses root."""
    log = directory / "output"
    for identity in launcher._identities() * START_TRIES:
        if not _reaches(host, os.geteuid() if identity.owner is None else identity.owner):
            continue
        if identity.owner is not None:
            for path in (directory, settings):
                shutil.chown(path, identity.owner)
        try:
            process = launcher._spawn([program, settings], log, identity)
        except (OSError, subprocess.SubprocessError):
            continue
        if _is_ready(process, directory / f".s.PGSQL.{PORT}"):
            return process
    raise AssertionError(f"pgbouncer did not start: {log.read_text() if log.exists() else 'no user to run it as'}")


def _reaches(host: str, user: int) -> bool:
    """Whether this user may open a socket in the server's folder. That of a server of the tests is open to one user only: the
    first one as whom it started.
    """
    folder = Path(host)
    if not host.startswith("/") or not folder.is_dir():
        return True
    found = folder.stat()
    return found.st_uid == user or bool(found.st_mode & stat.S_IXOTH)


def _is_ready(process: subprocess.Popen[bytes], path: Path) -> bool:
    deadline = time.monotonic() + READY_SECONDS_MAX
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as client:
            if client.connect_ex(str(path)) == 0:
                return True
        time.sleep(0.02)
    process.kill()
    process.wait()
    return False
