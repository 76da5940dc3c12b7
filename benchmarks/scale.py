"""The drain beside what is known to stop queues on PostgreSQL, and what a dispatcher uses when it has nothing to do."""

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.contestants import DEFAULT, start, working
from benchmarks.harness import Measure, Series, Server, interleave, process_cpu
from benchmarks.waiting import add_settled, add_waiting

PART = "scale"
ROUNDS = 3
JOBS = 20_000
STEPS = 50
WITHOUT = "without"

HANGING = 100_000
HANGING_MINUTES = 2
PENDING, PENDING_FULL = 300_000, 5_000_000
EARLIER = 120_000
"""So many settlements write to nearly each page of the index of 5 million. After that, few pages are written in whole."""
DESTINATIONS = 10_000
RETAINED, RETAINED_FULL = 100_000, 1_000_000
RETAINED_AGE = "400 days"
MEMORY_JOBS, MEMORY_JOBS_FULL = 100_000, 1_000_000
IDLE_SECONDS, IDLE_SETTLING_SECONDS = 20.0, 4.0
STARTS = 5

Prepare = Callable[[psycopg.Connection[Any]], None]


def xmin(server: Server, size: float, *, full: bool) -> Iterator[Series]:
    """Beside a transaction that is open the whole time, so that nothing that dies can be vacuumed."""
    jobs = scaled(JOBS * (5 if full else 2), size)
    measure = partial(drained, server, jobs)
    yield from compared("xmin", {WITHOUT: measure, "beside an old xmin horizon": partial(measure, beside=old_horizon)})


def hanging(server: Server, size: float, *, full: bool) -> Iterator[Series]:
    """Beside a destination that never answers, with many entries due; with --full also when that has lasted for minutes."""
    jobs, stuck = scaled(JOBS * 2, size), scaled(HANGING, size)
    measure = partial(drained, server, jobs)
    prepare = partial(add_waiting, count=stuck, name="hanging")
    sides: dict[str, Measure] = {WITHOUT: measure, "beside a hanging destination": partial(measure, prepare)}
    if full:
        minutes = 60 * HANGING_MINUTES * size
        sides["after minutes"] = partial(measure, prepare, waiting=minutes)
    yield from compared("hanging", sides)


def pending(server: Server, size: float, *, full: bool) -> Iterator[Series]:
    """The first entries of very many. Each round drains further ones of them."""
    jobs, many = scaled(JOBS, size), scaled(PENDING_FULL if full else PENDING, size)
    fresh(server, "bench_pending", partial(add_waiting, count=many))
    sides: dict[str, Measure] = {
        WITHOUT: partial(drained, server, jobs),
        "many pending": partial(timed, server, "bench_pending", jobs),
    }
    yield from compared("pending", sides)


def kept(server: Server, size: float, *, full: bool) -> Iterator[Series]:
    """Beside very many that have been delivered and are kept: just after a checkpoint, and long after it.

    Each round drains further ones. A settlement's page of the primary key is a random one, which PostgreSQL writes as a whole at
    its first change after a checkpoint.
    """
    jobs, many = scaled(JOBS, size), scaled(PENDING_FULL if full else PENDING, size)
    for case, earlier in (("kept", 0), ("kept, long after a checkpoint", scaled(EARLIER, size))):
        ended = partial(add_settled, count=many, age="1 hour")
        fresh(server, "bench_kept", ended, partial(add_waiting, count=(jobs + earlier) * 2 * ROUNDS))
        sides: dict[str, Measure] = {
            WITHOUT: partial(drained, server, jobs, earlier=earlier),
            "many kept": partial(timed, server, "bench_kept", jobs, earlier=earlier),
        }
        yield from compared(case, sides)


def destinations(server: Server, size: float, *, full: bool) -> Iterator[Series]:
    """As many entries, of one destination and of very many."""
    jobs = scaled(JOBS * 2, size)

    def spread() -> Mapping[str, float]:
        fresh(
            server,
            "bench_scale",
            partial(add_waiting, count=jobs, name="noop", destinations=scaled(DESTINATIONS, size)),
        )
        return timed(server, "bench_scale", jobs)

    yield from compared("destinations", {WITHOUT: partial(drained, server, jobs), "many destinations": spread})


def retention(server: Server, size: float, *, full: bool) -> Iterator[Series]:
    """Beside a process that deletes what is old enough, without a pause between its runs."""
    jobs, old = scaled(JOBS * 2, size), scaled(RETAINED_FULL if full else RETAINED, size)
    measure = partial(drained, server, jobs, partial(add_settled, count=old, age=RETAINED_AGE))
    yield from compared("retention", {WITHOUT: measure, "beside retention": partial(measure, beside=retaining)})


def memory(server: Server, size: float, *, full: bool) -> Iterator[Series]:
    """Of one dispatcher that drains very many."""
    jobs = scaled(MEMORY_JOBS_FULL if full else MEMORY_JOBS, size)
    fresh(server, "bench_scale", partial(add_waiting, count=jobs))
    step = jobs // STEPS
    with working(DEFAULT, server.variables("bench_scale"), "drain", str(step)) as progress:
        sizes = [resident_mb(int(line)) for line in islice(progress, STEPS - 1)]
    yield Series(PART, "memory", "after a tenth", "memory_mb", [sizes[STEPS // 10]])
    yield Series(PART, "memory", "at the end", "memory_mb", [sizes[-1]])


def idle(server: Server, size: float, *, full: bool) -> Iterator[Series]:
    """A dispatcher without entries."""
    fresh(server, "bench_scale")
    worker = start(DEFAULT, server.variables("bench_scale"), "work", stdout=subprocess.DEVNULL)
    try:
        with server.connect() as connection:
            time.sleep(IDLE_SETTLING_SECONDS)
            cpu, transactions, began = process_cpu(worker.pid), committed(connection, "bench_scale"), time.monotonic()
            time.sleep(max(IDLE_SECONDS * size, 1))
            seconds = time.monotonic() - began
            transactions = committed(connection, "bench_scale") - transactions
        percent = (process_cpu(worker.pid) - cpu) / seconds * 100
    finally:
        worker.terminate()
        worker.wait()
    yield Series(PART, "idle", "idle", "cpu_percent", [percent])
    yield Series(PART, "idle", "idle", "queries_per_second", [transactions / seconds])


def first_send(server: Server, size: float, *, full: bool) -> Iterator[Series]:
    """From the start of the process to its first send."""

    def measure() -> Mapping[str, float]:
        fresh(server, "bench_scale", partial(add_waiting, count=1))
        began = time.monotonic()
        with working(DEFAULT, server.variables("bench_scale"), "drain", "1") as progress:
            next(progress)
            return {"first_send_ms": (time.monotonic() - began) * 1000}

    yield from interleave(PART, "start", {"started": measure}, scaled(STARTS, size), warm_ups=1)


CASES = {
    "xmin": xmin,
    "hanging": hanging,
    "pending": pending,
    "kept": kept,
    "destinations": destinations,
    "retention": retention,
    "memory": memory,
    "idle": idle,
    "start": first_send,
}


# --- what they share


def scaled(count: int, size: float) -> int:
    return max(int(count * size), min(count, 2 * STEPS))


def compared(case: str, sides: Mapping[str, Measure]) -> Iterator[Series]:
    return interleave(PART, case, sides, ROUNDS)


def fresh(server: Server, database: str, *prepare: Prepare) -> None:
    server.create(database, DEFAULT.installed)
    with server.connect(database) as connection:
        for each in prepare:
            each(connection)
    server.tidy(database)


Beside = Callable[[Server, str], AbstractContextManager[Any]]


def drained(
    server: Server,
    jobs: int,
    *prepare: Prepare,
    beside: Beside = lambda server, database: nullcontext(),
    waiting: float = 0,
    earlier: int = 0,
) -> Mapping[str, float]:
    """The rate of so many jobs, in a new database. waiting: for how many seconds the dispatcher runs before they are due."""
    due = partial(add_waiting, count=jobs + earlier)
    fresh(server, "bench_scale", *prepare, *(() if waiting else (due,)))
    with beside(server, "bench_scale"):
        return timed(server, "bench_scale", jobs, waiting, earlier)


def timed(server: Server, database: str, jobs: int, waiting: float = 0, earlier: int = 0) -> Mapping[str, float]:
    """From the start of the first job to that of the last, after so many earlier ones."""
    step = jobs // STEPS
    with working(DEFAULT, server.variables(database), "drain", str(step)) as progress:
        if waiting:
            time.sleep(waiting)
            with server.connect(database) as connection:
                add_waiting(connection, jobs)
        for _ in islice(progress, 1 + earlier // step):
            pass
        began = time.perf_counter()
        for _ in islice(progress, STEPS - 1):
            pass
        return {"per_second": step * (STEPS - 1) / (time.perf_counter() - began)}


@contextmanager
def old_horizon(server: Server, database: str) -> Iterator[None]:
    with server.connect(database) as connection, connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT pg_current_xact_id(), (SELECT count(*) FROM outbox_meta)")
        yield


@contextmanager
def retaining(server: Server, database: str) -> Iterator[None]:
    deleting = start(DEFAULT, server.variables(database), "retain", stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)  # until it deletes
        yield
        if deleting.poll() is not None:
            raise SystemExit("the process that deletes what is old has ended")
    finally:
        deleting.kill()
        deleting.wait()


def resident_mb(pid: int) -> float:
    """Memory that a process has in use."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def committed(connection: psycopg.Connection[Any], database: str) -> int:
    statement = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s"
    row = connection.execute(statement, [database]).fetchone()
    assert row is not None
    return int(row[0])
