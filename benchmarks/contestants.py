"""The outbox and its peers, each a program in processes of its own that speak one protocol.

PROGRAM install          create its tables in the database that PGHOST, PGPORT, PGUSER and PGDATABASE name
PROGRAM fill COUNT       enqueue so many jobs that do nothing
PROGRAM drain STEP       work; print the process's id when the first job begins, and then at each STEP-th, until terminated
PROGRAM work             print "start NUMBER SECONDS" when a job begins, until terminated
PROGRAM produce COUNT FIRST LEAST MOST   enqueue a job every LEAST to MOST milliseconds; print "commit NUMBER SECONDS" after each
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from benchmarks.harness import Server, run

PROGRAMS = Path(__file__).with_name("peers")
HOME = Path(__file__).parents[1] / ".venv-peers"  # made by dev.py
PYTHON = HOME / "bin" / "python"
NODE_MODULES = HOME / "node" / "node_modules"
NODE = NODE_MODULES / ".bin" / "node"
STOP_SECONDS = 3
MAX_SECONDS = 600  # of a round; a worker that does nothing for so long never will
OUTBOX = (sys.executable, "-m", "benchmarks.outbox_side")


@dataclass(frozen=True)
class Contestant:
    """name: as it is printed. settings: further arguments of `drain`. left: SQL that says whether jobs are left.

    jobs: how many it drains in a round; the slow ones get fewer. workers: how many processes work.
    wakes: whether a commit wakes it, so that its latency is compared. differs: what a reader must know.
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
TUNED = _outbox("outbox, 1000 concurrent", "1000")
TWO = _outbox("outbox, 1000 concurrent, two processes", "1000", workers=2)


def _peer(name: str, program: str, left: str, jobs: int, differs: str, *, wakes: bool = True) -> Contestant:
    interpreter = PYTHON if program.endswith(".py") else NODE
    return Contestant(name, (str(interpreter), str(PROGRAMS / program)), left, jobs, wakes=wakes, differs=differs)


PEERS = (
    _peer(
        "PGQueuer",
        "pgqueuer_peer.py",
        "SELECT EXISTS (SELECT FROM pgqueuer)",
        20_000,
        "asyncpg, uvloop, batches of 500 (10 for the latency). It deletes a finished job and keeps one line of log for it.",
    ),
    _peer(
        "Procrastinate",
        "procrastinate_peer.py",
        "SELECT EXISTS (SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing'))",
        2_000,
        'uvloop, 20 concurrent jobs, `delete_jobs="always"`: it keeps nothing of a finished job.',
    ),
    _peer(
        "DBOS",
        "dbos_peer.py",
        "SELECT EXISTS (SELECT FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING') AND name = 'noop')",
        2_000,
        "1000 concurrent workflows, polls every 0.1 s. It keeps the workflow with its input and output.",
        wakes=False,
    ),
    _peer(
        "graphile-worker",
        "graphile_peer.cjs",
        "SELECT EXISTS (SELECT FROM graphile_worker._private_jobs)",
        40_000,
        "a local queue of 500 and batched completion (neither for the latency). It deletes a finished job and keeps no"
        " attempts; after a crash up to 500 jobs stay locked for four hours.",
    ),
    _peer(
        "pg-boss",
        "pgboss_peer.cjs",
        "SELECT EXISTS (SELECT FROM pgboss.job WHERE name = 'noop' AND state < 'completed')",
        40_000,
        "batches of 500. The handler gets a whole batch, which succeeds or fails as one. It keeps the job.",
        wakes=False,
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


def notes() -> list[str]:
    """What must be known to compare the sides."""
    ours = "outbox: psycopg, and Python's own event loop. It keeps the entry, its payload, its attempts and its result."
    return [ours, *(f"{each.name}: {each.differs}" for each in PEERS)]


def variables(given: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **given, "NODE_PATH": str(NODE_MODULES)}


def start(contestant: Contestant, given: Mapping[str, str], *arguments: str, stdout: int) -> subprocess.Popen[str]:
    return subprocess.Popen([*contestant.command, *arguments], env=variables(given), stdout=stdout, text=True)


@contextmanager
def working(contestant: Contestant, given: Mapping[str, str], *arguments: str) -> Iterator[Iterator[str]]:
    """Run its worker processes for as long as the block lasts; what all of them print comes as one stream of lines."""
    reading, writing = os.pipe()
    workers = [start(contestant, given, *arguments, stdout=writing) for _ in range(contestant.workers)]
    os.close(writing)
    late = Timer(MAX_SECONDS, _kill, [workers])  # their stream ends, and so does the benchmark
    late.start()
    with os.fdopen(reading) as printed:
        try:
            yield _until_needed(contestant, printed)
        finally:
            late.cancel()
            for worker in workers:
                worker.terminate()
            for worker in workers:
                try:
                    worker.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    worker.kill()
                    worker.wait()


def _kill(workers: list[subprocess.Popen[str]]) -> None:
    for worker in workers:
        worker.kill()


def _until_needed(contestant: Contestant, printed: Iterable[str]) -> Iterator[str]:
    yield from printed
    raise SystemExit(f"{contestant.name}: its processes ended before the jobs were done")
