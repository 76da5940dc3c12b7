"""How soon an idle system begins to send: `python3 dev.py bench latency`.

From the commit of one entry to the start of its send, with random gaps, so that each entry meets an idle dispatcher. The sides
run in turn (A B A B), each in processes of its own. Then what hints cost: transactions a second with hints over without, in turn.
"""

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

import outbox
from benchmarks.draining import database
from benchmarks.latency_sides import SETTLING_SECONDS
from outbox import migrations

ROUNDS = 4
SAMPLES = 80  # in a round
RATE_ROUNDS = 15
RATE_TRANSACTIONS = 400
P50_MS, P99_MS = 3.0, 15.0
RATE_GOAL = 0.97
OURS = [sys.executable, "-m", "benchmarks.latency_sides"]
PEER = str(Path(__file__).with_name("pgqueuer_peer.py"))
PEER_HOME = Path(sys.prefix) / "pgqueuer"
PEER_NAME = "PGQueuer, uvloop"
SIDES = {"psycopg": ["psycopg"], "asyncpg": ["asyncpg"], "two dispatchers": ["psycopg"] * 2, "in one process": []}
"""The drivers of each side's dispatchers."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="dev.py bench latency", description=__doc__)
    parser.add_argument("--database", help="SQLAlchemy URL of a PostgreSQL database to use instead of a temporary one")
    arguments = parser.parse_args()
    peer = peer_python()
    with database(arguments.database) as (url, origin):
        print(f"{origin}; Python {platform.python_version()}, {os.cpu_count()} cores; {ROUNDS} rounds, in turn\n")
        migrations.upgrade(url)
        met = [compare_latency(url, peer), compare_rates(url)]
    sys.exit(0 if all(met) else 1)


def peer_python() -> str | None:
    """PGQueuer's environment, made at the first use; None, said aloud, where it cannot be installed."""
    python = PEER_HOME / "bin" / "python"
    imports = [python, "-c", "import pgqueuer, asyncpg, uvloop"]
    if not python.exists() or subprocess.run(imports, capture_output=True).returncode:
        venv.EnvBuilder(clear=True, symlinks=True, with_pip=True).create(PEER_HOME)
        command = [python, "-m", "pip", "install", "--quiet", "pgqueuer", "asyncpg", "uvloop"]
        if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
            print("PGQUEUER COULD NOT BE INSTALLED: there is no peer to compare with\n")
            return None
    return str(python)


# --- latency


def compare_latency(url: str, peer: str | None) -> bool:
    found: dict[str, list[float]] = {side: [] for side in [*SIDES, *([PEER_NAME] if peer else [])]}
    plain = sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    if peer is not None:
        subprocess.run([peer, PEER, "install", plain], check=True)
    for number in range(ROUNDS):
        for place, (side, drivers) in enumerate(SIDES.items()):
            first = str((number * len(SIDES) + place) * SAMPLES)
            producing = [*OURS, "produce" if drivers else "both", url, str(SAMPLES), first]
            found[side] += measured(producing, [[*OURS, "work", url, driver] for driver in drivers])
        if peer is not None:
            producing = [peer, PEER, "produce", plain, str(SAMPLES), str(number * SAMPLES)]
            found[PEER_NAME] += measured(producing, [[peer, PEER, "work", plain]])
    return report(found)


def measured(producing: Sequence[str], working: Sequence[Sequence[str]]) -> list[float]:
    """Seconds from each commit to the start of its send."""
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in working]
    time.sleep(SETTLING_SECONDS if workers else 0)
    printed = subprocess.run(producing, stdout=subprocess.PIPE, text=True, check=True).stdout
    time.sleep(SETTLING_SECONDS if workers else 0)
    for worker in workers:
        worker.terminate()
    for worker in workers:
        printed += worker.communicate()[0]
    lines = [line.split() for line in printed.splitlines()]
    commits = {number: float(at) for kind, number, at in lines if kind == "commit"}
    starts = {number: float(at) for kind, number, at in lines if kind == "start"}
    return [starts.get(number, math.inf) - at for number, at in commits.items()]


def report(found: dict[str, list[float]]) -> bool:
    theirs = percentiles(found[PEER_NAME]) if PEER_NAME in found else (math.inf, math.inf)
    print(f"commit to start of send, ms; goal: p50 <= {P50_MS:g}, p99 <= {P99_MS:g}, and at most PGQueuer's")
    print(f"{'':>22}{'samples':>9}{'p50':>9}{'p99':>9}{'of PGQueuer':>15}")
    met = True
    for side, samples in found.items():
        p50, p99 = percentiles(samples)
        line = f"{side:>22}{len(samples):>9}{p50:>9.2f}{p99:>9.2f}"
        if side != PEER_NAME:
            is_met = p50 <= min(P50_MS, theirs[0]) and p99 <= min(P99_MS, theirs[1])
            met &= is_met
            line += f"{p50 / theirs[0]:>8.2f}{p99 / theirs[1]:>7.2f}   {'met' if is_met else 'MISSED'}"
        print(line)
    print()
    return met


def percentiles(samples: list[float]) -> tuple[float, float]:
    ordered = sorted(samples)
    return ordered[len(ordered) // 2] * 1000, ordered[int(len(ordered) * 0.99)] * 1000


# --- what hints cost


def compare_rates(url: str) -> bool:
    """With nobody who listens, as fast as one session goes."""
    keyring = outbox.Keyring({"k1": bytes(range(32))})
    sides = [(outbox.Outbox(keyring, env="bench", hints=hints), sa.create_engine(url)) for hints in (True, False)]
    for bench, engine in sides:
        transactions_a_second(bench, engine, -1)  # warm-up
    rates = [[transactions_a_second(*side, number) for side in sides] for number in range(RATE_ROUNDS)]
    ratio = statistics.median(hinted / without for hinted, without in rates)
    verdict = "met" if ratio >= RATE_GOAL else "MISSED"
    with_hints, without = (statistics.median(rate[side] for rate in rates) for side in (0, 1))
    print(f"transactions of one entry a second: {with_hints:.0f} with hints, {without:.0f} without;")
    print(f"ratio {ratio:.3f}, goal >= {RATE_GOAL:g}: {verdict}")
    for _, engine in sides:
        engine.dispose()
    return ratio >= RATE_GOAL


def transactions_a_second(bench: outbox.Outbox, engine: sa.Engine, number: int) -> float:
    began = time.perf_counter()
    for each in range(RATE_TRANSACTIONS):
        parent = f"r:{bench.configuration.hints}:{number}:{each}"
        with Session(engine) as session, session.begin():
            bench.enqueue(session, "rate.send", {"number": each}, parent=parent)
    return RATE_TRANSACTIONS / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
