"""A real MariaDB for a test run, on a socket in a folder of its own, where the machine has its programs."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import sqlalchemy as sa

SERVERS = ("mariadbd", "/usr/sbin/mariadbd")
FAST = (  # a test survives a killed process, not a power cut
    *("--innodb-flush-method=nosync", "--innodb-doublewrite=0", "--skip-log-bin", "--performance-schema=OFF"),
    *("--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M", "--innodb-lock-wait-timeout=10"),
)


def with_driver(url: sa.URL, driver: str) -> sa.URL:
    """The URL for `pymysql`, or for `mysqldb`, which is mysqlclient, with what the driver needs."""
    plain = url.set(drivername=f"mariadb+{driver}").difference_update_query(["ssl_disabled", "binary_prefix"])
    # PyMySQL reads all certificates for each connection, which takes 40 ms
    return plain.update_query_dict(
        {"pymysql": {"ssl_disabled": "1"}, "mysqldb": {"binary_prefix": "1"}}.get(driver, {})
    )


def missing_program() -> str | None:
    """Which of its programs this machine lacks."""
    if _server() is None:
        return "mariadbd"
    return None if shutil.which("mariadb-install-db") else "mariadb-install-db"


def install(data: Path, user: Sequence[str], **settings: Any) -> None:
    """Write the files of a new server. user: the option that names the server's user, if any. settings: of the process."""
    program = ["mariadb-install-db", "--no-defaults", *user, f"--datadir={data}", "--skip-test-db"]
    program.append("--auth-root-authentication-method=normal")
    with TemporaryFile() as output:
        settings |= {"stdout": output, "stderr": output, "start_new_session": True}
        with subprocess.Popen(program, **settings) as installing:
            try:
                status = installing.wait()
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(installing.pid, signal.SIGKILL)  # the server that the script has started, too
                raise
        if status:
            output.seek(0)
            raise RuntimeError(f"mariadb-install-db failed: {output.read().decode(errors='replace')[-2000:]}")


@contextmanager
def temporary_mariadb() -> Iterator[sa.URL]:
    """Run a MariaDB for the length of the block. Its superuser is root, without a password. If the process is killed, Linux ends
    the server too.
    """
    with TemporaryDirectory(prefix="mariadb") as folder, mariadb_on(make_data(Path(folder, "data"))) as url:
        yield url


def make_data(at: Path) -> Path:
    """The data of a new server."""
    install(at, user_option(), **inside(at.parent))
    return at


def inside(folder: Path) -> dict[str, Any]:
    """The settings of a server's process. A server that starts removes the temporary tables that it finds, another server's too:
    each has its own folder for them.
    """
    return {"cwd": folder, "env": os.environ | {"TMPDIR": str(folder)}}


@contextmanager
def mariadb_on(data: Path, *options: str) -> Iterator[sa.URL]:
    """Run a server on these data, and kill it at the end: nothing is written that was not committed before."""
    with TemporaryDirectory(prefix="mariadb") as folder:  # a socket's path has 107 characters at most
        socket, log = Path(folder, "socket"), Path(folder, "log")
        server = [str(_server()), "--no-defaults", *user_option(), f"--datadir={data}", f"--socket={socket}", *FAST]
        ends_with_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with log.open("wb") as output:
            command = [*ends_with_us, *server, *(options or ["--skip-networking"])]
            process = subprocess.Popen(command, stdout=output, stderr=output, **inside(Path(folder)))
        try:
            url = sa.URL.create("mariadb", "root", query={"unix_socket": str(socket)})
            yield when_ready(process, log, with_driver(url, "pymysql"))
        finally:
            process.kill()
            process.wait()


def user_option() -> list[str]:
    """Servers refuse to run as root, unless it is named."""
    return ["--user=root"] if os.geteuid() == 0 else []


def _server() -> str | None:
    return next(filter(None, map(shutil.which, SERVERS)), None)


def when_ready(process: "subprocess.Popen[bytes]", log: Path, url: sa.URL) -> sa.URL:
    """The URL, when the server takes connections."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    until = time.monotonic() + 60
    while True:
        try:
            engine.connect().close()
        except sa.exc.OperationalError:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}") from None
            time.sleep(0.02)
        else:
            return url
