"""The process that starts a temporary PostgreSQL for `postgres.py`, watches its parent, and leaves nothing over.

It is run as a program, without site-packages: the standard library only, and nothing of this project.
"""

import ctypes
import json
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_SOCKET_PATH_BYTES: Final = 103  # sockaddr_un.sun_path: 108 on Linux, 104 on macOS, less the closing zero
MAX_INITDB_SECONDS: Final = 120  # a second where nothing else runs; a crowded CI machine has taken thirty
MAX_READY_SECONDS: Final = 60
MAX_STOP_SECONDS: Final = 10  # at SIGQUIT the postmaster itself kills what is left after five
LOG_TAIL_CHARS: Final = 2000
MAX_CONNECTIONS: Final = 200  # pytest-xdist's workers share one server, and a race opens many connections
PORT: Final = 5432  # only part of the socket's name, and the directory is fresh


class ServerFailed(RuntimeError):
    """The server could not be started. The text says why, and is sent to the parent."""


# --- as whom the server runs


@dataclass(frozen=True, slots=True)
class _Identity:
    """A user that PostgreSQL agrees to run as. become: called in the child, before exec. owner: of the directory."""

    name: str
    become: Callable[[], None]
    owner: int | None = None


def _identities() -> list[_Identity]:
    nobody = pwd.getpwnam("nobody").pw_uid
    mapped = _Identity("in a user namespace", lambda: _map_this_user_to(nobody))
    if os.geteuid() == 0:
        return [mapped, _Identity("as nobody", lambda: _drop_to(nobody), owner=nobody)]
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:  # a container run under a bare number: initdb insists on a name
        return [mapped]
    return [_Identity("as this user", lambda: None)]


def _map_this_user_to(uid: int) -> None:
    """Enter a user namespace in which this user has the number `uid`; its files remain its own.

    Source: user_namespaces(7), "User and group ID mappings": a process may map its own id, without any privilege.
    """
    outside = os.geteuid()
    if sys.platform != "linux":
        raise OSError("only Linux has user namespaces")
    _libc_call("unshare", 0x10000000)  # CLONE_NEWUSER; os.unshare is there from Python 3.12 only
    Path("/proc/self/uid_map").write_text(f"{uid} {outside} 1\n")


def _drop_to(uid: int) -> None:
    os.setgroups([])
    os.setgid(pwd.getpwuid(uid).pw_gid)
    os.setuid(uid)


def _die_with_parent() -> None:
    """Have the kernel send SIGQUIT when the supervisor ends: a postmaster then stops at once, its children with it."""
    if sys.platform == "linux":
        _libc_call("prctl", 1, signal.SIGQUIT)  # PR_SET_PDEATHSIG


def _libc_call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _in_child(identity: _Identity) -> Callable[[], None]:
    def prepare() -> None:
        identity.become()
        _die_with_parent()  # last: a change of user forgets it

    return prepare


def _identity_for(folder: Path) -> _Identity:
    failures = []
    for identity in _identities():
        command = [str(folder / "initdb"), "--version"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, preexec_fn=_in_child(identity))
        except (OSError, subprocess.SubprocessError) as error:
            failures.append(f"{identity.name}: {error}")
        else:
            if done.returncode == 0:
                return identity
            failures.append(f"{identity.name}: {done.stderr.strip()}")
    raise ServerFailed(f"{folder} could not be run by a user other than root; {'; '.join(failures)}")


# --- from its start to its end


def _supervise(folder: Path, durable: bool, taken_over: Path | None) -> None:
    """Start a server, report it to the parent on stdout, wait for the parent's end or message, and leave nothing over."""
    signal.signal(signal.SIGTERM, _end_once)
    ends = _ends_of_parent()
    try:
        identity = _identity_for(folder)
        with _directory(identity) as directory, _postmaster(folder, directory, identity, durable, taken_over) as pid:
            _report({"pid": pid, "directory": str(directory)})
            ends.poll()
    except ServerFailed as error:
        _report({"error": str(error)})


def _end_once(signum: int, _frame: object) -> None:
    signal.signal(signum, signal.SIG_IGN)  # so that a second one does not interrupt the cleaning up
    raise SystemExit(128 + signum)


def _ends_of_parent() -> select.poll:
    """A file descriptor that becomes readable when the parent ends or sends a message.

    The pipe alone would not do, as a process that the parent forked may keep it open; a pidfd is the parent itself.
    """
    ends = select.poll()
    ends.register(sys.stdin.fileno(), select.POLLIN)
    if sys.platform == "linux":
        with suppress(OSError):
            ends.register(os.pidfd_open(os.getppid()), select.POLLIN)
    return ends


def _report(answer: Mapping[str, object]) -> None:
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


@contextmanager
def _directory(identity: _Identity) -> Iterator[Path]:
    try:
        directory = Path(tempfile.mkdtemp(prefix="outbox-postgres-", dir=_base_directory()))
    except OSError as error:
        raise ServerFailed(f"no directory for its data: {error}") from error
    try:
        if identity.owner is not None:
            os.chown(directory, identity.owner, -1)
        yield directory
    finally:
        remove(directory)


def _base_directory() -> str:
    """The user's folder for temporary files, unless no socket can live there."""
    base = tempfile.gettempdir()
    too_long = len(os.fsencode(base)) + len(f"/outbox-postgres-12345678/.s.PGSQL.{PORT}") > MAX_SOCKET_PATH_BYTES
    # To libpq and to SQLAlchemy a comma parts two hosts, and to SQLAlchemy a colon parts host and port.
    return "/tmp" if too_long or {",", ":", '"'} & set(base) else base


def remove(directory: Path) -> None:
    # More than once: a child of a killed postmaster takes a moment to notice, and may still write a file.
    for _ in range(50):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)


@contextmanager
def _postmaster(
    folder: Path, directory: Path, identity: _Identity, durable: bool, taken_over: Path | None
) -> Iterator[int]:
    log = directory / "log"
    data = directory / "data"
    if taken_over is None:
        _make_cluster(folder, data, log, identity)
    else:
        _take_over(taken_over, data, identity)
    server = _spawn([folder / "postgres", "-D", data, *_settings(directory, durable)], log, identity)
    try:
        _wait_until_ready(server, data / "postmaster.pid", log)
        yield server.pid
    finally:
        _stop(server)


def _make_cluster(folder: Path, data: Path, log: Path, identity: _Identity) -> None:
    options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
    initdb = _spawn([folder / "initdb", "-D", data, *options], log, identity)
    try:
        status = initdb.wait(MAX_INITDB_SECONDS)
    except subprocess.TimeoutExpired:
        raise ServerFailed(f"initdb took longer than {MAX_INITDB_SECONDS} s: {_tail(log)}") from None
    finally:
        _stop(initdb)
    if status != 0:
        raise ServerFailed(f"initdb ended with {status}: {_tail(log)}")


def _take_over(source: Path, data: Path, identity: _Identity) -> None:
    """Make `source` this server's data. The previous data is gone with the server that it came from."""
    try:
        shutil.move(source, data)
        (data / "postmaster.pid").unlink(missing_ok=True)
        if identity.owner is not None:
            for path in (data, *data.rglob("*")):
                os.chown(path, identity.owner, -1, follow_symlinks=False)
    except OSError as error:
        raise ServerFailed(f"the data in {str(source)!r} could not be taken over: {error}") from error


def _settings(directory: Path, durable: bool) -> list[str]:
    settings = {
        "listen_addresses": "",
        "unix_socket_directories": f'"{directory}"',
        "port": str(PORT),
        "max_connections": str(MAX_CONNECTIONS),
        "shared_buffers": "64MB",
    }
    if not durable:
        settings |= {"fsync": "off", "full_page_writes": "off"}
    return [f"--{name}={value}" for name, value in settings.items()]


def _spawn(command: list[str | Path], log: Path, identity: _Identity) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=_in_child(identity)
        )


def _wait_until_ready(server: subprocess.Popen[bytes], pid_file: Path, log: Path) -> None:
    """Wait as `pg_ctl --wait` does: line 8 of postmaster.pid has the state, `standby` one that takes readers only.

    Source: PostgreSQL's src/include/utils/pidfile.h, LOCK_FILE_LINE_PM_STATUS.
    """
    deadline = time.monotonic() + MAX_READY_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ServerFailed(f"the server ended with {server.returncode}: {_tail(log)}")
        with suppress(FileNotFoundError):
            if pid_file.read_text().splitlines()[7:8] in (["ready   "], ["standby "]):
                return
        time.sleep(0.02)
    raise ServerFailed(f"the server was not ready after {MAX_READY_SECONDS} s: {_tail(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop it without a checkpoint: this data is not read again."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGQUIT)
    try:
        process.wait(MAX_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()


if __name__ == "__main__":
    _supervise(Path(sys.argv[1]), sys.argv[2] == "durable", Path(sys.argv[3]) if sys.argv[3:] else None)
