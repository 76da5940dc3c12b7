"""What all benchmarks share: a server, sides that are measured in turn, and what CPU and WAL they used."""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg import sql

from dispatchers.testing import postgres

CPU_CLOCK = 2
TICKS = os.sysconf("SC_CLK_TCK")
SETTINGS = {"max_wal_size": "8GB", "checkpoint_timeout": "1h"}
"""No checkpoint begins amid a round; each round begins with one. All else is as PostgreSQL has it: commits are durable."""

Measure = Callable[[], Mapping[str, float]]
"""One round of one side; returns its figures by metric."""


# --- figures


@dataclass(frozen=True)
class Series:
    """One metric of one side, a figure for each round. case: what was the same for all its sides."""

    part: str
    case: str
    side: str
    metric: str
    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """From the smallest to the largest, over the median."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Report:
    """Figures, as they are kept in JSON. conditions: under which each part was measured, by its name.

    notes: what a reader must know to compare the sides.
    """

    machine: dict[str, str]
    series: list[Series]
    conditions: dict[str, str]
    notes: list[str]

    def find(self, part: str, case: str, side: str, metric: str) -> Series | None:
        wanted = (part, case, side, metric)
        return next((each for each in self.series if (each.part, each.case, each.side, each.metric) == wanted), None)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> "Report":
        found: dict[str, Any] = json.loads(text)
        found["series"] = [Series(**each) for each in found["series"]]
        return Report(**found)


def interleave(
    part: str, case: str, sides: Mapping[str, Measure], rounds: int, *, warm_ups: int = 0
) -> Iterator[Series]:
    """Measure all sides in turn (A B A B): a machine whose speed drifts slows each of them."""
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(-warm_ups, rounds):
        for side, measure in sides.items():
            figures = measure()
            for metric, value in figures.items() if number >= 0 else ():
                found.setdefault((side, metric), []).append(value)
    for (side, metric), values in found.items():
        yield Series(part, case, side, metric, values)


# --- the server


@dataclass(frozen=True)
class Server:
    """A PostgreSQL of this run's own. Each side has a database in it."""

    postmaster: int
    directory: Path
    origin: str

    def url(self, database: str) -> str:
        """For SQLAlchemy."""
        return f"postgresql+psycopg://postgres@/{database}?host={self.directory}&port=5432"

    def variables(self, database: str) -> dict[str, str]:
        """By which the clients of PostgreSQL, of whatever language, find a database."""
        return {"PGHOST": str(self.directory), "PGPORT": "5432", "PGUSER": "postgres", "PGDATABASE": database}

    def connect(self, database: str = "postgres") -> psycopg.Connection[Any]:
        return psycopg.connect(
            sa.make_url(self.url(database)).set(drivername="postgresql").render_as_string(), autocommit=True
        )

    def create(self, database: str, template: str = "template0") -> None:
        """A copy of the template; replaces what is there."""
        with self.connect() as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(database)))
            create = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
            connection.execute(create.format(sql.Identifier(database), sql.Identifier(template)))

    def tidy(self, database: str) -> None:
        """Vacuum and write out, so that no round pays for the one before."""
        with self.connect(database) as connection:
            connection.execute("VACUUM ANALYZE")
            connection.execute("CHECKPOINT")


@contextmanager
def running_server() -> Iterator[Server]:
    with postgres.temporary_postgres() as running:
        server = Server(running.pid, running.directory, running.origin)
        with server.connect() as connection:
            for name, value in SETTINGS.items():
                connection.execute(sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier(name), sql.Literal(value)))
            connection.execute("SELECT pg_reload_conf()")
        yield server


# --- what was used


def process_cpu(pid: int) -> float:
    """Seconds of CPU that a process has used, by the clock of its own that clock_getcpuclockid(3) names."""
    return time.clock_gettime((~pid << 3) | CPU_CLOCK)


def server_cpu(postmaster: int) -> float:
    """Seconds that the server has used, with processes that have ended."""
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    used = 0.0
    for child in map(int, children):
        with suppress(OSError):
            used += process_cpu(child)
    ended = Path(f"/proc/{postmaster}/stat").read_text().rpartition(")")[2].split()[13:15]
    return used + sum(map(int, ended)) / TICKS


@dataclass(frozen=True)
class Usage:
    """CPU seconds of the server, and bytes of WAL, since it was started."""

    cpu: float
    wal: float

    @staticmethod
    def now(server: Server, connection: psycopg.Connection[Any]) -> "Usage":
        row = connection.execute("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')").fetchone()
        assert row is not None
        return Usage(server_cpu(server.postmaster), float(row[0]))


def conditions(size: float) -> str:
    """When, at which load of the machine, and at which part of the usual size something is measured."""
    return f"{time.strftime('%Y-%m-%d', time.gmtime())}, at load {os.getloadavg()[0]:.1f}, at {size:g} times the usual size"


def machine(server: Server) -> dict[str, str]:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "",
    )
    return {
        "database": server.origin,
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
        "processor": model,
    }


def run(command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run a program to its end. Raises: SystemExit, with what it printed."""
    done = subprocess.run(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
