"""The outbox and its peers, each a program in processes of its own that speak one protocol.

PROGRAM install          create its tables in the database that PGHOST, PGPORT, PGUSER and PGDATABASE name
PROGRAM fill COUNT       enqueue so many jobs that do nothing
PROGRAM drain STEP       work; print the process's id when the first job begins, and after each STEP jobs, until terminated
PROGRAM work             print "start NUMBER SECONDS" when a job begins, until terminated
PROGRAM produce COUNT FIRST   now and then enqueue a job; print "commit NUMBER SECONDS" after each commit
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Server, run

PROGRAMS = Path(__file__).with_name("peers")
HOME = Path(__file__).parents[1] / ".venv-peers"  # made by dev.py
PYTHON = HOME / "bin" / "python"
NODE_MODULES = HOME / "node" / "node_modules"
NODE = NODE_MODULES / ".bin" / "node"
OUTBOX = (sys.executable, "-m", "benchmarks.outbox_side")


@dataclass(frozen=True)
class Contestant:
    """name: as it is printed. settings: further arguments of `drain`. left: SQL that says whether jobs are left.

    jobs: how many it drains in a round; the slow ones get fewer. workers: how many processes work.
    wakes: whether it is told of a commit, so that its latency is compared. differs: what a reader must know.
    """

    name: str
    command: tuple[str, ...]
    left: str
    jobs: int
    settings: tuple[str, ...] = ()
    workers: int = 1
    wakes: bool = True
    differs: str = ""

    @property
    def database(self) -> str:
        return "bench_" + "".join(each if each.isalnum() else "_" for each in self.name.lower())

    @property
    def installed(self) -> str:
        """The template of its databases: one for all contestants that run the same program."""
        return f"installed_{self.command[-1].rpartition('/')[2].replace('.', '_')}"

    def install(self, server: Server) -> None:
        server.create(self.installed)
        run([*self.command, "install"], variables(server.variables(self.installed)))


def _outbox(name: str, *settings: str, workers: int = 1) -> Contestant:
    return Contestant(name, OUTBOX, "SELECT EXISTS (SELECT FROM outbox_queue)", 40_000, settings, workers)


DEFAULT = _outbox("outbox, default settings")
TUNED = _outbox("outbox, 1000 at once", "1000")
TWO = _outbox("outbox, 1000 at once, two processes", "1000", workers=2)


def _peer(name: str, program: str, left: str, jobs: int, differs: str, *, wakes: bool = True) -> Contestant:
    interpreter = PYTHON if program.endswith(".py") else NODE
    return Contestant(name, (str(interpreter), str(PROGRAMS / program)), left, jobs, wakes=wakes, differs=differs)


PEERS = (
    _peer(
        "PGQueuer",
        "pgqueuer_peer.py",
        "SELECT EXISTS (SELECT FROM pgqueuer)",
        20_000,
        "asyncpg, uvloop, batches of 500 (of 10 for the latency). It deletes a finished job and keeps a line of its log.",
    ),
)
"""At their best settings."""


def available() -> list[Contestant]:
    """The peers that are installed; each that is not is reported."""
    found = [each for each in PEERS if Path(each.command[0]).exists()]
    for each in PEERS:
        if each not in found:
            print(f"{each.name.upper()} IS NOT INSTALLED: it is not compared", flush=True)
    return found


def variables(given: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **given, "NODE_PATH": str(NODE_MODULES)}


def start(contestant: Contestant, given: Mapping[str, str], *arguments: str, stdout: int) -> subprocess.Popen[str]:
    return subprocess.Popen([*contestant.command, *arguments], env=variables(given), stdout=stdout, text=True)
