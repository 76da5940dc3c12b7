"""A real MySQL for a test run, or until Ctrl-C: `python3 dev.py mysql`. Its programs are Debian's, unpacked into a folder.

Debian has MySQL in its unstable distribution only. Its packages and the libraries that they need, about 60 MB, are downloaded
once with apt, from the mirror that this machine uses, into lists and a cache of their own. Nothing is installed, so it needs
neither root nor a chroot: the server runs with the loader and the libraries of the folder.
"""

import fcntl
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import sqlalchemy as sa

from support.mariadb_server import inside, user_option, when_ready

HOME = Path(__file__).parents[2] / ".mysql"
PACKAGE = "mysql-server-core"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PROGRAMS = ("apt-get", "dpkg-deb")

SMALL = ("--innodb-buffer-pool-size=64M", "--innodb-redo-log-capacity=16M", "--skip-log-bin")
FAST = (  # a test survives a killed process, not a power cut
    *("--innodb-flush-method=nosync", "--innodb-doublewrite=OFF", "--innodb-lock-wait-timeout=10"),
    *("--performance-schema=OFF", "--mysqlx=OFF", "--secure-file-priv="),
)


class NotHere(Exception):
    """Why this machine cannot have the server."""


class Programs(NamedTuple):
    """Where the server's files are."""

    folder: Path

    @property
    def server(self) -> list[str]:
        """The command, without options of a server."""
        libc = next(self.folder.glob("usr/lib/*/libc.so.6"))
        loader = next(path for path in sorted(libc.parent.glob("ld-linux*.so.*")))
        usr = self.folder / "usr"
        command = [loader, "--library-path", libc.parent, usr / "sbin" / "mysqld", "--no-defaults"]
        messages = next(usr.glob("share/mysql*/english")).parent
        return [*map(str, command), f"--basedir={usr}", f"--lc-messages-dir={messages}", *user_option(), *SMALL]


def programs() -> Programs:
    """The server's files, which the first call on this machine downloads. Raises `NotHere`."""
    folder, ready = HOME / "programs", HOME / "ready"
    with _alone():
        if not ready.exists():
            shutil.rmtree(folder, ignore_errors=True)
            _require_apt()
            with TemporaryDirectory(dir=HOME) as scratch:
                packages = _downloaded(Path(scratch))
                for package in packages:
                    _run(["dpkg-deb", "--extract", str(package), str(folder)])
            ready.write_text("\n".join(sorted(package.name for package in packages)) + "\n")
    return Programs(folder)


def version() -> str:
    """The version of the server's package."""
    named = [line.split("_")[1] for line in (HOME / "ready").read_text().splitlines() if line.startswith(f"{PACKAGE}_")]
    return named[0]


@contextmanager
def _alone() -> Iterator[None]:
    HOME.mkdir(exist_ok=True)
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _require_apt() -> None:
    if sys.platform != "linux":
        raise NotHere("MySQL's packages are those of Debian, for Linux")
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise NotHere(f"there is no {missing[0]} to unpack Debian's package {PACKAGE} with")
    if not KEYRING.exists():
        raise NotHere(f"there is no {KEYRING}, by which Debian's packages are verified")


def _downloaded(scratch: Path) -> list[Path]:
    """The package of the server, and all that it needs."""
    for folder in ("lists/partial", "archives/partial"):
        Path(scratch, folder).mkdir(parents=True)
    (scratch / "status").touch()  # as if nothing were installed: the libraries of this machine are older
    settings = {
        "Dir::State": scratch,
        "Dir::State::lists": scratch / "lists",
        "Dir::State::status": scratch / "status",
        "Dir::Cache": scratch,
        "Dir::Cache::archives": scratch / "archives",
        "Dir::Etc::SourceList": scratch / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "APT::Architecture": _architecture(),
        "APT::Sandbox::User": "root",
        "APT::Update::Error-Mode": "any",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    apt = ["apt-get", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    failures = []
    for mirror in _mirrors():
        (scratch / "sources.list").write_text(f"deb [signed-by={KEYRING}] {mirror} sid main\n")
        try:
            _run([*apt, "update"])
            _run([*apt, "--yes", "--no-install-recommends", "--download-only", "install", PACKAGE])
        except NotHere as failure:
            failures.append(str(failure))
        else:
            return sorted((scratch / "archives").glob("*.deb"))
    raise NotHere(
        f"no mirror of apt's has Debian's unstable distribution: {'; '.join(failures) or 'it has none'}"[:500]
    )


def _mirrors() -> list[str]:
    """What this machine's own apt downloads from, the archive before that of security updates."""
    listed = _run(["apt-get", "indextargets", "--format", "$(REPO_URI)"]).split()
    return sorted(set(listed), key=lambda mirror: ("security" in mirror, mirror))


def _architecture() -> str:
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    if done.returncode:
        raise NotHere(f"`{command[0]} ... {command[-1]}` failed: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.stdout


def make_data(at: Path) -> Path:
    """The data of a new server, a copy of what the first call has made. Raises `NotHere`."""
    server, template = programs().server, HOME / "data"
    with _alone():
        if not template.exists():
            with TemporaryDirectory(dir=HOME) as scratch:
                data = Path(scratch, "data")
                _run([*server, "--initialize-insecure", f"--datadir={data}", *FAST])
                data.rename(template)
    shutil.copytree(template, at, ignore=shutil.ignore_patterns("auto.cnf"))  # which has the server's own UUID
    return at


@contextmanager
def temporary_mysql(*options: str) -> Iterator[sa.URL]:
    """Run a MySQL for the length of the block. Its superuser is root, without a password. If the process is killed, Linux ends
    the server too.
    """
    with TemporaryDirectory(prefix="mysql") as folder, mysql_on(make_data(Path(folder, "data")), *options) as url:
        yield url


@contextmanager
def mysql_on(data: Path, *options: str) -> Iterator[sa.URL]:
    """Run a server on these data, and kill it at the end: nothing is written that was not committed before.

    options: instead of `--skip-networking`.
    """
    with TemporaryDirectory(prefix="mysql") as folder:  # a socket's path has 107 characters at most
        socket, log = Path(folder, "socket"), Path(folder, "log")
        ends_with_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        server = [*programs().server, f"--datadir={data}", f"--socket={socket}", f"--pid-file={folder}/pid", *FAST]
        with log.open("wb") as output:
            command = [*ends_with_us, *server, *(options or ["--skip-networking"])]
            process = subprocess.Popen(command, stdout=output, stderr=output, **inside(Path(folder)))
        try:
            query = {"unix_socket": str(socket), "ssl_disabled": "1"}  # as in `mariadb_server.with_driver`
            yield when_ready(process, log, sa.URL.create("mysql+pymysql", "root", query=query))
        finally:
            process.kill()
            process.wait()


def main(arguments: Sequence[str]) -> int:
    """With `--version`, only download the programs, and print their version."""
    try:
        if arguments == ["--version"]:
            programs()
            print(version())
            return 0
        with temporary_mysql() as url:
            print(f"MySQL {version()} runs until Ctrl-C, without a password: {url}", flush=True)
            signal.pause()
    except NotHere as reason:
        print(f"MySQL cannot run here: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
