"""Processes that run a program in Python, as `subprocess` starts them, but forked from one that has done the imports.

For tests of what processes do to each other, or what a program prints. A test of how a process starts or of what it imports
takes `subprocess`. A package that is installed elsewhere needs a server of that environment: `new_fork_server`.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing.connection import wait as ready
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from tempfile import TemporaryFile
from typing import IO, Any, Self

from support import fork_server
from support.database import IMPORT_PATH

LOADED = (
    *("sqlalchemy.orm", "sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.ext.asyncio", "psycopg", "sqlite3"),
    *("alembic.command", "alembic.config", "click", "rich.console", "rich.table", "rich.progress"),
    *("apscheduler.executors.asyncio", "apscheduler.schedulers.asyncio", "apscheduler.triggers.interval"),
    *("stripe:StripeClient", "httpx", "httpcore", "h11", "fastapi", "uvicorn", "flask"),
    *("outbox.migrations", "outbox.http.fastapi", "dispatchers.cli.run"),
    *("dispatchers.cli.db", "dispatchers.process.daemon"),
    *(f"dispatchers.adapters:{name}Adapter" for name in ("Stripe", "Http", "Smtp", "Memory")),
    *("dispatchers.admin.decide.decisions", "dispatchers.maintenance.jobs", "dispatchers.testing.failpoints"),
    *("dispatchers.testing.postgres", "support.entries"),
)
"""What the children find imported. A program that needs more imports it itself."""

TAKEN_OVER = ("PYTHONPATH", "PYTHONUNBUFFERED")
"""The variables of Python itself that a forked process follows. The interpreter reads the others when it starts."""

FORKED_COMMAND = Path(__file__).parent / "apps" / "forked_command.py"


@cache
def server_variables() -> Mapping[str, str]:
    """Those with which the server of this process was started."""
    return dict(os.environ)


@cache
def fork_server_socket() -> socket.socket:
    """Starts the server of this process when a program is first asked for, unless `forked_commands` gave it one."""
    if inherited := os.environ.get("FORK_SERVER"):
        return socket.socket(fileno=int(inherited))
    path = os.pathsep.join([IMPORT_PATH, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    started = ExitStack()
    atexit.register(started.close)
    return started.enter_context(new_fork_server(sys.executable, LOADED, {**server_variables(), "PYTHONPATH": path}))


@contextmanager
def new_fork_server(python: str | Path, loaded: Sequence[str], variables: Mapping[str, str]) -> Iterator[socket.socket]:
    """The socket of a server that this Python runs with these variables, until the end of the block."""
    ours, theirs = socket.socketpair()
    with theirs:
        server = subprocess.Popen(
            [python, fork_server.__file__, str(theirs.fileno()), *loaded],
            env=dict(variables),
            pass_fds=[theirs.fileno()],
        )
    yield ours
    ours.close()
    server.wait()


def forked_commands(
    folder: Path,
    names: Sequence[str],
    variables: dict[str, str],
    *,
    python: Path = Path(sys.executable),
    server: socket.socket | None = None,
) -> int:
    """Write commands of an environment into `folder`. Returns: what a shell with these variables must inherit.

    python, server: those of the environment. By default they are this process's own.
    """
    for name in names:
        command = folder / name
        command.write_text(f"#!{sys.executable} -IS\n{FORKED_COMMAND.read_text()}")
        command.chmod(0o755)
    inherited = (server or fork_server_socket()).fileno()
    variables |= {"FORK_SERVER": str(inherited), "COMMANDS": str(python.parent)}
    return inherited


def new_process(*arguments: str | Path, **settings: Any) -> subprocess.Popen[str]:
    """For what a forked process does not show: the start of the interpreter, and its end."""
    return subprocess.Popen([sys.executable, *arguments], text=True, **settings)


def run_python(
    *arguments: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    check: bool = False,
    server: socket.socket | None = None,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of `python ARGUMENTS`, its output captured."""
    with TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
        files: dict[str, Any] = {"stdin": DEVNULL, "stdout": stdout, "stderr": stderr}
        with PythonProcess(*arguments, cwd=cwd, env=env, server=server, **files) as process:
            try:
                process.wait(timeout)
            finally:
                process.kill()
        stdout.seek(0)
        stderr.seek(0)
        done = subprocess.CompletedProcess(process.args, process.wait(), stdout.read(), stderr.read())
    if check:
        done.check_returncode()
    return done


class PythonProcess:
    """`python ARGUMENTS` as a child of the fork server. Its parts mean what those of `subprocess.Popen` mean, with text.

    A program whose variables are those of `forked_commands` can start forked programs itself.

    server: that of another environment, or with other imports. By default it is this process's own.
    """

    def __init__(
        self,
        *arguments: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: IO[Any] | int | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        server: socket.socket | None = None,
    ) -> None:
        variables = dict(os.environ if env is None else env)
        unread = [name for name in variables if name.startswith("PYTHON") and name not in TAKEN_OVER]
        if late := [name for name in unread if variables[name] != server_variables().get(name)]:
            raise ValueError(f"a forked process does not follow {', '.join(late)}: take `new_process`")
        self.returncode: int | None = None
        self.args = [str(argument) for argument in arguments]
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        with ExitStack() as stack:
            files = [self._open("stdin", stdin, stack), self._open("stdout", stdout, stack)]
            files.append(files[1] if stderr == STDOUT else self._open("stderr", stderr, stack))
            if "FORK_SERVER" in variables:
                files.append(int(variables["FORK_SERVER"]))
            self._channel, theirs = socket.socketpair()
            socket.send_fds(server or fork_server_socket(), [b"\n"], [stack.enter_context(theirs).fileno(), *files])
        request = {"arguments": self.args, "directory": str(cwd or Path.cwd()), "variables": variables}
        self._channel.sendall(json.dumps(request).encode() + b"\n")
        self.pid = self._receive()

    def _open(self, name: str, given: IO[Any] | int | None, stack: ExitStack) -> int:
        """The file descriptor that the child gets as its `name`."""
        if given == PIPE:
            reading, writing = os.pipe()
            ours, theirs = (writing, reading) if name == "stdin" else (reading, writing)
            stack.callback(os.close, theirs)
            setattr(self, name, os.fdopen(ours, "w" if name == "stdin" else "r"))
            return theirs
        if given == DEVNULL:
            return stack.enter_context(open(os.devnull, "r+b", buffering=0)).fileno()
        if given is None:
            return ("stdin", "stdout", "stderr").index(name)
        return given if isinstance(given, int) else given.fileno()

    def _receive(self) -> int:
        found = self._channel.recv(fork_server.NUMBER.size, socket.MSG_WAITALL)
        number: int = fork_server.NUMBER.unpack(found)[0]
        return number

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not ready([self._channel], timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._receive()
            self._channel.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file:
                file.close()
        self.wait()
