"""What ordering lanes cost the entries that have no order: `python3 -m benchmarks.lanes`, about three minutes.

The same unordered entries are drained with lanes beside them and without any, in turn (A B A B), to adapters that do nothing:

- blocked: as many entries wait in the same destination, in lanes that have halted behind uncertain heads; without them, nothing.
- drained: as many entries of another destination are drained at the same time by the same dispatcher, in lanes; without, as many
  that are unordered, too.

The median of the rounds' ratios is printed, of the time until the last unordered entry was sent. Lanes that stand still are to
cost nothing, 5 % at most. An entry that leaves a lane takes its dispatcher longer than one that has no order, and so those wait
that are claimed beside it: three times as long at most.
"""

import argparse
import asyncio
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import outbox
from benchmarks.quick import database, numbers
from dispatchers import Delivered, Delivery, Dispatcher, Operations
from outbox import migrations

ROUNDS = 9
ENTRIES = 10_000
LANES = 1_000
TABLES = [f"outbox_{name}" for name in ("queue", "entry", "settlement", "event", "destination", "halted")]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.lanes", description=__doc__)
    parser.add_argument("--database", help="SQLAlchemy URL of a PostgreSQL database to use instead of a temporary one")
    arguments = parser.parse_args()
    with database(arguments.database) as (url, origin):
        print(f"{origin}; Python {platform.python_version()}, {os.cpu_count()} cores; {ROUNDS} rounds, in turn")
        migrations.upgrade(url)
        engine = create_engine(url)
        print(f"until {ENTRIES} unordered entries were sent, seconds; beside them {ENTRIES} in {LANES} lanes")
        print(f"{'lanes':>10}{'without':>10}{'with':>10}{'ratio':>10}{'at most':>10}")
        bench = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="bench")
        met = [
            compare(engine, bench, "blocked", 1.05, nothing, halted_lanes),
            compare(engine, bench, "drained", 3, others, lanes_elsewhere),
        ]
        engine.dispose()
    sys.exit(0 if all(met) else 1)


Beside = Callable[[outbox.Outbox, Session], None]
"""Enqueues what is there beside the unordered entries."""


def compare(engine: Engine, bench: outbox.Outbox, name: str, goal: float, *sides: Beside) -> bool:
    pairs = [[asyncio.run(seconds(engine, bench, beside)) for beside in sides] for _ in range(ROUNDS)]
    without, with_lanes = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratio = statistics.median(lanes / none for none, lanes in pairs)
    print(f"{name:>10}{without:>10.2f}{with_lanes:>10.2f}{ratio:>10.3f}{goal:>10.2f}")
    return ratio <= goal


# --- what is there beside them


def nothing(bench: outbox.Outbox, session: Session) -> None:
    pass


def others(bench: outbox.Outbox, session: Session) -> None:
    put(bench, session, "other.charge")


def lanes_elsewhere(bench: outbox.Outbox, session: Session) -> None:
    put(bench, session, "other.charge", lanes=LANES)


def halted_lanes(bench: outbox.Outbox, session: Session) -> None:
    put(bench, session, "noop.charge", lanes=LANES)
    session.flush()
    for statement in (
        "UPDATE outbox_queue SET state = 'uncertain', due_at = '9999-12-31 00:00:00Z', maybe_sent = true"
        " WHERE position IS NOT NULL AND due_at < '9999-12-31 00:00:00Z'",
        "INSERT INTO outbox_halted (ordering_key, entry_id, reason, since)"
        " SELECT ordering_key, id, 'no answer', now() FROM outbox_queue WHERE state = 'uncertain'",
    ):
        session.execute(text(statement))


def put(bench: outbox.Outbox, session: Session, operation: str, lanes: int = 0) -> None:
    for number in range(ENTRIES):
        ordering_key = f"lane {number % lanes}" if lanes else None
        payload = {"amount": 2000, "currency": "eur"}
        bench.enqueue(session, operation, payload, parent=f"n:{next(numbers)}", ordering_key=ordering_key)


# --- the drain


async def seconds(engine: Engine, bench: outbox.Outbox, beside: Beside) -> float:
    """How long a new dispatcher takes until it has sent the last unordered entry."""
    operations, left, sent_at = Operations(), ENTRIES, 0.0

    @operations.operation("noop")
    async def deliver(delivery: Delivery) -> Delivered:
        nonlocal left, sent_at
        left, sent_at = left - 1, time.perf_counter()
        return Delivered()

    @operations.operation("other")
    async def deliver_other(delivery: Delivery) -> Delivered:
        return Delivered()

    with engine.begin() as connection:
        connection.execute(text(f"TRUNCATE {', '.join(TABLES)}"))
    with Session(engine) as session, session.begin():
        beside(bench, session)
        put(bench, session, "noop.charge")
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(text(f"VACUUM ANALYZE {', '.join(TABLES)}"))
        connection.execute(text("CHECKPOINT"))
    async_engine = create_async_engine(engine.url)
    dispatcher = Dispatcher(async_engine, outbox=bench, include=[operations])
    started = time.perf_counter()
    await dispatcher.run_once()
    await async_engine.dispose()
    if left:
        raise SystemExit(f"{left} unordered entries were not sent, or some twice")
    return sent_at - started


if __name__ == "__main__":
    main()
