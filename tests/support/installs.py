"""New environments in which a release is installed as its readers install it."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from support.docs_pages import ROOT
from support.python_processes import new_fork_server

UV = str(Path(sys.executable).parent / "uv")
LEFTOVERS = shutil.ignore_patterns(".*", "__pycache__", "dist", "*.egg-info")


LOADED = (
    *("sqlalchemy.orm", "sqlite3", "alembic.command", "alembic.config", "httpx", "outbox.migrations"),
    *("dispatchers.cli.run", "dispatchers.cli.db", "dispatchers.process.daemon", "dispatchers.adapters:HttpAdapter"),
)
"""What an environment's forked processes find imported: all that its packages bring is in every one that a page installs."""


class Environment(NamedTuple):
    """A new environment's Python, and the socket of its fork server."""

    python: Path
    server: socket.socket


class Environments:
    """Makes an environment for each set of packages that is asked for, with the versions of requirements.lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Environment] = {}
        self._servers = ExitStack()

    def make(self, packages: str) -> Environment:
        """An environment after `pip install` of these packages: ours, with its extras, is this checkout's wheel."""
        if packages not in self._made:
            home = self._folder / str(len(self._made))
            run(UV, "venv", "--quiet", "--python", sys.executable, str(home))
            ours = [re.sub(r"^sqlalchemy-outbox(\[.*\])$", rf"{self._wheel}\1", name) for name in shlex.split(packages)]
            python = home / "bin" / "python"
            install = [UV, "pip", "install", "--quiet", "--link-mode", "symlink", "--python", str(python)]
            run(*install, "--constraint", str(ROOT / "requirements.lock"), *ours)
            share_bytecode(home)
            variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
            server = self._servers.enter_context(new_fork_server(python, LOADED, variables))
            self._made[packages] = Environment(python, server)
        return self._made[packages]

    def close(self) -> None:
        """End their servers."""
        self._servers.close()

    @cached_property
    def _wheel(self) -> Path:
        return build("wheel", ROOT, self._folder / "wheel")


def share_bytecode(home: Path) -> None:
    """Let the environment use what Python has compiled in ours, where the source is the same file: it takes most of a start."""
    ours = Path(sysconfig.get_path("purelib"))
    (theirs,) = home.glob("lib/python*/site-packages")
    for package in theirs.rglob("__init__.py"):
        same = ours / package.relative_to(theirs)
        compiled = same.parent / "__pycache__"
        if compiled.is_dir() and package.samefile(same):
            (package.parent / "__pycache__").symlink_to(compiled)


def build(kind: str, source: Path, target: Path) -> Path:
    """The `wheel` or `sdist` of the checkout in `source`."""
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target), cwd=source)
    (built,) = target.glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[kind])
    return built


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
