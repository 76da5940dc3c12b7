"""The first figures, in about a minute: `python3 dev.py bench --quick`.

Two questions: what enqueueing adds to a transaction, in CPU of client and server together; and how near the dispatcher comes
to the least that could be done, a bare psycopg loop that claims a batch and deletes it. With `--requests` a third one instead:
what a claim adds to a request.
Both sides run in turn (A B A B), so that a machine whose speed drifts slows both; the median of the rounds is printed.
"""

import argparse
import asyncio
import gc
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from uuid import uuid4

import psycopg
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import outbox
from benchmarks.cpu import process_cpu
from benchmarks.draining import database, filling
from benchmarks.requests import compare_requests
from dispatchers import Delivered, Delivery, Dispatcher, Operations
from dispatchers.daemon import tuned_interpreter
from outbox import migrations

ROUNDS = 7
ENQUEUE_ROUNDS = 25  # short ones: a machine's speed may change by a third within seconds
TRANSACTIONS = 40
DRAINED = 10_000
BATCH = 500
GOALS = {1: 1.5, 10: 2.0, 100: 6.0}
DRAIN_GOAL = 0.5
PLAIN_CORE = {
    "outbox_plain_core": True
}  # what the short way to the driver is compared with: outbox/sql/fast_execute.py

numbers = count()


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "bench_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    amount: Mapped[int]


@dataclass(frozen=True)
class Rate:
    """entries a second; CPU of client and server, microseconds an entry."""

    per_second: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="dev.py bench", description=__doc__)
    parser.add_argument("--requests", action="store_true", help="what a claim adds to a request, instead of the others")
    parser.add_argument("--database", help="SQLAlchemy URL of a PostgreSQL database to use instead of a temporary one")
    arguments = parser.parse_args()
    with database(arguments.database) as (url, origin):
        print(
            f"{origin}; Python {platform.python_version()}, {os.cpu_count()} cores; medians of {ROUNDS} rounds, in turn\n"
        )
        migrations.upgrade(url)
        engine = create_engine(url)
        Base.metadata.create_all(engine)
        bench = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="bench")
        if arguments.requests:
            met = [compare_requests(url)]
        else:
            met = [compare_enqueue(engine, bench), asyncio.run(compare_drain(engine, bench))]
        engine.dispose()
    sys.exit(0 if all(met) else 1)


# --- enqueue


def compare_enqueue(engine: Engine, bench: outbox.Outbox) -> bool:
    """CPU of a transaction with entries over one without."""
    counts = (0, *GOALS)
    for entries in counts:
        transactions_cpu(engine, bench, entries)  # warm-up
    gc.freeze()  # what is loaded by now is not walked at each collection, whichever side caused it
    plain, short, core = engine.execution_options(**PLAIN_CORE), [], []
    transactions_cpu(plain, bench, 1)  # warm-up
    rounds = []
    for _ in range(ENQUEUE_ROUNDS):
        rounds.append({entries: transactions_cpu(engine, bench, entries) for entries in counts})
        short.append(transactions_cpu(engine, bench, 1))
        core.append(transactions_cpu(plain, bench, 1))
    print("a transaction with entries, over the same transaction (one ORM row) without: CPU of client and server;")
    print(f"medians of {ENQUEUE_ROUNDS} rounds")
    print(f"{'entries':>10}{'us':>10}{'ratio':>10}{'at most':>10}")
    print(f"{0:>10}{statistics.median(r[0] for r in rounds):>10.0f}")
    met = True
    for entries, most in GOALS.items():
        ratio = statistics.median(r[entries] / r[0] for r in rounds)
        met &= ratio <= most
        print(f"{entries:>10}{statistics.median(r[entries] for r in rounds):>10.0f}{ratio:>10.2f}{most:>10.1f}")
    saved = statistics.median(b - a for a, b in zip(short, core, strict=True))
    print(
        f"with 1 entry through plain Core: {statistics.median(core):.0f} us; the short way to the driver saves {saved:.0f} us"
    )
    print()
    return met


def transactions_cpu(engine: Engine, bench: outbox.Outbox, entries: int) -> float:
    """Microseconds of CPU for each of some transactions, each in a session of its own, as a request's is."""
    with Session(engine) as session:
        backend = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        session.commit()  # at a rollback psycopg forgets what it has prepared, and the first transactions would be colder
    server, client = process_cpu(backend), time.process_time()
    for _ in range(TRANSACTIONS):
        order = next(numbers)
        with Session(engine) as session, session.begin():
            session.add(Order(customer="ada", amount=2000))
            for line in range(entries):
                payload = {
                    "amount": 2000,
                    "currency": "eur",
                    "customer": "cus_1",
                    "description": "one line of an order",
                }
                bench.enqueue(session, "noop.charge", payload, parent=f"order:{order}", discriminator=str(line))
    # One thread: the pool hands out the same connection, so the same server process, each time.
    return (time.process_time() - client + process_cpu(backend) - server) / TRANSACTIONS * 1e6


# --- drain


async def compare_drain(engine: Engine, bench: outbox.Outbox) -> bool:
    """The dispatcher with an adapter that does nothing, over a bare loop that claims and deletes."""
    operations = Operations()

    @operations.operation("noop")
    async def deliver(delivery: Delivery) -> Delivered:
        return Delivered()

    ours: list[Rate] = []
    core: list[Rate] = []
    bare: list[Rate] = []
    with tuned_interpreter():  # as the daemon does
        for measured in [False] + [True] * ROUNDS:
            # Twice the batch: one half is sent while the other is settled and claimed.
            rates = []
            for each in (engine, engine.execution_options(**PLAIN_CORE)):
                dispatcher = Dispatcher(each, outbox=bench, include=[operations], concurrency=2 * BATCH)
                fill(engine, bench)
                rates.append(await drain_by_dispatcher(dispatcher))
            fill(engine, bench)
            floor = drain_bare(engine)
            if measured:
                ours.append(rates[0])
                core.append(rates[1])
                bare.append(floor)
    ratio = statistics.median(a.per_second / b.per_second for a, b in zip(ours, bare, strict=True))
    print(f"draining {DRAINED} entries to an adapter that does nothing, one process, batches of {BATCH}")
    print(f"{'':>34}{'a second':>10}{'ratio':>10}{'at least':>10}{'client us':>11}")
    print(f"{'bare psycopg, claim and delete':>34}{median(bare):>10.0f}{'':>20}{median_cpu(bare):>11.1f}")
    print(f"{'the dispatcher':>34}{median(ours):>10.0f}{ratio:>10.2f}{DRAIN_GOAL:>10.1f}{median_cpu(ours):>11.1f}")
    print(f"{'the dispatcher, plain Core':>34}{median(core):>10.0f}{'':>20}{median_cpu(core):>11.1f}")
    return ratio >= DRAIN_GOAL


def fill(engine: Engine, bench: outbox.Outbox) -> None:
    with filling(engine) as session:
        for _ in range(DRAINED):
            bench.enqueue(session, "noop.charge", {"amount": 2000, "currency": "eur"}, parent=f"n:{next(numbers)}")


async def drain_by_dispatcher(dispatcher: Dispatcher) -> Rate:
    started, cpu = time.perf_counter(), time.process_time()
    settled = await dispatcher.run_once()
    rate = Rate(settled / (time.perf_counter() - started), (time.process_time() - cpu) / settled * 1e6)
    if settled != DRAINED:
        raise SystemExit(f"the dispatcher settled {settled} of {DRAINED}")
    return rate


CLAIM = """
    UPDATE outbox_queue AS q SET lease_until = now() + %(lease)s, lease_token = %(token)s, leased_at = now(),
        state = 'sending', deliveries = deliveries + 1
    FROM outbox_entry AS e
    WHERE e.id = q.id AND q.id = ANY (ARRAY(
        SELECT id FROM outbox_queue
        WHERE destination = 'noop' AND due_at <= now() AND (lease_until IS NULL OR lease_until < now())
        ORDER BY due_at LIMIT %(most)s FOR UPDATE SKIP LOCKED
    ))
    RETURNING q.id, e.operation, e.payload, e.tag
"""


def drain_bare(engine: Engine) -> Rate:
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    drained = 0
    with psycopg.connect(url) as connection:
        started, cpu = time.perf_counter(), time.process_time()
        while True:
            claim = {"lease": timedelta(seconds=60), "token": uuid4(), "most": BATCH}
            rows = connection.execute(CLAIM, claim).fetchall()
            connection.commit()
            if not rows:
                break
            connection.execute("DELETE FROM outbox_queue WHERE id = ANY (%s)", [[row[0] for row in rows]])
            connection.commit()
            drained += len(rows)
        rate = Rate(drained / (time.perf_counter() - started), (time.process_time() - cpu) / drained * 1e6)
    if drained != DRAINED:
        raise SystemExit(f"the bare loop drained {drained} of {DRAINED}")
    return rate


def median(rates: list[Rate]) -> float:
    return statistics.median(rate.per_second for rate in rates)


def median_cpu(rates: list[Rate]) -> float:
    return statistics.median(rate.cpu for rate in rates)


if __name__ == "__main__":
    main()
