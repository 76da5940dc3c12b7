"""How fast jobs that do nothing are drained, beside the peers and the least that PostgreSQL could do."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import psycopg

from benchmarks.contestants import DEFAULT, TUNED, TWO, Contestant, available, start, variables
from benchmarks.harness import Series, Server, Usage, interleave, process_cpu, run

PART = "drain"
ROUNDS = 3
STEPS = 100  # reports of progress in a round
POLL_SECONDS = 0.002
QUICK_JOBS = 10_000
LIMIT = "server-side limit"
LIMIT_JOBS = 100_000
LIMIT_BATCH = 1000


def measure(server: Server, size: float) -> Iterator[Series]:
    return compare(server, size, [DEFAULT, TUNED, TWO, *available()])


def measure_quickly(server: Server, size: float) -> Iterator[Series]:
    """Without the peers."""
    return compare(server, size, [DEFAULT, TUNED])


def compare(server: Server, size: float, contestants: Sequence[Contestant]) -> Iterator[Series]:
    for each in {each.installed: each for each in contestants}.values():
        each.install(server)
    sides = {each.name: partial(drained, server, each, size) for each in contestants}
    yield from interleave(PART, "", sides, ROUNDS)


def drained(server: Server, contestant: Contestant, size: float) -> Mapping[str, float]:
    """From the start of the first job until no job is left; CPU and WAL for each job."""
    jobs = max(int(contestant.jobs * size), STEPS)
    server.create(contestant.database, contestant.installed)
    given = server.variables(contestant.database)
    run([*contestant.command, "fill", str(jobs)], variables(given))
    server.tidy(contestant.database)
    step = jobs // STEPS
    reading, writing = os.pipe()
    with server.connect(contestant.database) as connection, os.fdopen(reading) as progress:
        before = Usage.now(server, connection)
        workers = [
            start(contestant, given, "drain", str(step), *contestant.settings, stdout=writing)
            for _ in range(contestant.workers)
        ]
        os.close(writing)
        try:
            began, at_first = 0.0, dict[int, float]()
            for _ in range(jobs // step - contestant.workers):
                if not (line := progress.readline()):
                    raise SystemExit(f"{contestant.name}: its processes ended before the jobs were done")
                began = began or time.perf_counter()
                at_first.setdefault(int(line), process_cpu(int(line)))
            wait_until_done(connection, contestant.left)
            seconds = time.perf_counter() - began
            after = Usage.now(server, connection)
            client = sum(process_cpu(pid) - cpu for pid, cpu in at_first.items())
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait()
    return figures(jobs, seconds, client, before, after)


def figures(jobs: int, seconds: float, client: float, before: Usage, after: Usage) -> Mapping[str, float]:
    server = after.cpu - before.cpu
    return {
        "per_second": jobs / seconds,
        "client_us": client / jobs * 1e6,
        "server_us": server / jobs * 1e6,
        "cpu_us": (client + server) / jobs * 1e6,
        "wal_bytes": (after.wal - before.wal) / jobs,
    }


def wait_until_done(connection: psycopg.Connection[tuple[bool]], left: str) -> None:
    while True:
        row = connection.execute(left.encode()).fetchone()
        if row is None or not row[0]:
            return
        time.sleep(POLL_SECONDS)
