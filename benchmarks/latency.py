"""How soon an idle system begins to send, what each entry costs it then, and what the hints that wake it cost the app."""

import math
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count

import sqlalchemy as sa
from sqlalchemy.orm import Session

import outbox
from benchmarks.contestants import DEFAULT, Contestant, available, start
from benchmarks.harness import Series, Server, interleave, process_cpu, server_cpu
from benchmarks.outbox_side import SETTLING_SECONDS

PART = "latency"
ROUNDS = 3
SAMPLES = 80  # in a round
APART_MS = (30, 120)  # from one to the next, at random
TRICKLE_SAMPLES = 600
TRICKLE_APART_MS = (30, 30)
TRICKLE_PEER = "PGQueuer"
RATE_ROUNDS = 15
RATE_TRANSACTIONS = 400
SIDES = {"psycopg": ["psycopg"], "asyncpg": ["asyncpg"], "two dispatchers": ["psycopg"] * 2, "in one process": []}
"""The drivers of each side's dispatchers."""

numbers = count(step=1_000_000)  # the first of each round


def measure(server: Server, size: float) -> Iterator[Series]:
    samples = max(int(SAMPLES * size), 5)
    peers = [each for each in available() if each.wakes]
    for each in (DEFAULT, *peers):
        each.install(server)
        server.create(each.database, each.installed)
    sides = {
        side: partial(latency, server, DEFAULT, samples, [["work", each] for each in drivers])
        for side, drivers in SIDES.items()
    }
    sides |= {each.name: partial(latency, server, each, samples, [["work"]]) for each in peers}
    yield from interleave(PART, "", sides, ROUNDS)
    yield from trickle(server, size)
    yield from cost_of_hints(server.url(DEFAULT.database), max(int(RATE_TRANSACTIONS * size), 10))


def trickle(server: Server, size: float) -> Iterator[Series]:
    """One entry every 30 ms, in the databases of `measure`. Each side has a batch of one to claim and to settle."""
    samples = max(int(TRICKLE_SAMPLES * size), 5)
    sides = {
        side: partial(latency, server, DEFAULT, samples, [["work", each] for each in SIDES[side]], TRICKLE_APART_MS)
        for side in ("psycopg", "asyncpg")
    }
    sides |= {
        each.name: partial(latency, server, each, samples, [["work"]], TRICKLE_APART_MS)
        for each in available()
        if each.name == TRICKLE_PEER
    }
    yield from interleave(PART, "trickle", sides, ROUNDS)


def latency(
    server: Server,
    contestant: Contestant,
    samples: int,
    working: Sequence[Sequence[str]],
    apart: tuple[int, int] = APART_MS,
) -> Mapping[str, float]:
    """Milliseconds from each commit to the start of its send; CPU of the workers and of the server for each entry.

    working: the arguments of each worker; none: in one process, whose CPU is not measured, because it is also the app's.
    apart: from each commit to the next, at least and at most, in milliseconds.
    """
    given = server.variables(contestant.database)
    workers = [start(contestant, given, *each, stdout=subprocess.PIPE) for each in working]
    time.sleep(SETTLING_SECONDS if workers else 0)
    arguments = [str(number) for number in (samples, next(numbers), *apart)]
    workers_before, server_before = workers_cpu(workers), server_cpu(server.postmaster)
    producing = start(contestant, given, "produce" if workers else "both", *arguments, stdout=subprocess.PIPE)
    printed = producing.communicate()[0]
    used = {
        "client_us": workers_cpu(workers) - workers_before,
        "server_us": server_cpu(server.postmaster) - server_before,
    }
    time.sleep(SETTLING_SECONDS if workers else 0)
    for worker in workers:
        worker.terminate()
    for worker in workers:
        printed += worker.communicate()[0]
    return delays(contestant, samples, printed) | {
        metric: seconds / samples * 1e6 for metric, seconds in used.items() if workers
    }


def workers_cpu(workers: Sequence[subprocess.Popen[str]]) -> float:
    return sum(process_cpu(worker.pid) for worker in workers)


def delays(contestant: Contestant, samples: int, printed: str) -> dict[str, float]:
    """Percentiles of the milliseconds from each commit to the start of its send, of the lines that the processes have printed."""
    lines = [line.split() for line in printed.splitlines()]
    commits = {number: float(at) for kind, number, at in lines if kind == "commit"}
    starts = {number: float(at) for kind, number, at in lines if kind == "start"}
    if len(commits) < samples or not commits.keys() <= starts.keys():
        raise SystemExit(f"{contestant.name}: {len(commits)} of {samples} were committed, {len(starts)} begun")
    ordered = sorted((starts[number] - at) * 1000 for number, at in commits.items())
    return {"p50_ms": ordered[samples // 2], "p99_ms": ordered[math.ceil(samples * 0.99) - 1]}


# --- what hints cost


def cost_of_hints(url: str, transactions: int) -> Iterator[Series]:
    """Without a listener, as fast as one session goes."""
    keyring = outbox.Keyring({"k1": bytes(range(32))})
    engine = sa.create_engine(url)
    hinted, silent = (outbox.Outbox(keyring, env="bench", hints=hints) for hints in (True, False))
    sides = {
        "with hints": partial(rate, hinted, engine, transactions),
        "without hints": partial(rate, silent, engine, transactions),
    }
    yield from interleave(PART, "cost of hints", sides, RATE_ROUNDS, warm_ups=1)
    engine.dispose()


def rate(bench: outbox.Outbox, engine: sa.Engine, transactions: int) -> Mapping[str, float]:
    began = time.perf_counter()
    for _ in range(transactions):
        with Session(engine) as session, session.begin():
            bench.enqueue(session, "rate.send", {"number": 1}, parent=f"rate:{next(numbers)}")
    return {"per_second": transactions / (time.perf_counter() - began)}
