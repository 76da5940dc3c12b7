"""What a dead destination costs the others: `python3 -m benchmarks.bulkheads`, about half a minute.

The same entries are drained by a dispatcher that runs, with a backlog of a destination that never answers beside them, and
without one, in turn (A B A B). The median of the rounds' ratios is printed; at most 5 % more time is the goal.
"""

import argparse
import asyncio
import os
import platform
import statistics
import sys
import time

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import outbox
from benchmarks.quick import database, numbers
from dispatchers import Delivered, Delivery, Dispatcher, Operations, Unknown
from outbox import migrations

ROUNDS = 9
ALIVE = 10_000
DEAD = 10_000
DEAD_SECONDS = 0.05  # until a send to it fails
GOAL = 1.05
TABLES = [f"outbox_{name}" for name in ("queue", "entry", "settlement", "event", "destination")]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.bulkheads", description=__doc__)
    parser.add_argument("--database", help="SQLAlchemy URL of a PostgreSQL database to use instead of a temporary one")
    arguments = parser.parse_args()
    with database(arguments.database) as (url, origin):
        print(f"{origin}; Python {platform.python_version()}, {os.cpu_count()} cores; {ROUNDS} rounds, in turn")
        migrations.upgrade(url)
        engine = create_engine(url)
        bench = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="bench")
        pairs = [tuple(asyncio.run(seconds(engine, bench, dead)) for dead in (0, DEAD)) for _ in range(ROUNDS)]
        engine.dispose()
    ratio = statistics.median(beside / alone for alone, beside in pairs)
    alone, beside = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    print(f"draining {ALIVE} entries: alone {alone:.2f} s, beside {DEAD} of a dead destination {beside:.2f} s")
    print(f"ratio {ratio:.3f}, at most {GOAL}")
    sys.exit(0 if ratio <= GOAL else 1)


async def seconds(engine: Engine, bench: outbox.Outbox, dead: int) -> float:
    """How long a new dispatcher takes for the living ones; what it takes to notice that the others are dead is in it."""
    operations = Operations()

    @operations.operation("alive")
    async def deliver(delivery: Delivery) -> Delivered:
        return Delivered()

    @operations.operation("dead", at_least_once=True)
    async def fail(delivery: Delivery) -> Unknown:
        await asyncio.sleep(DEAD_SECONDS)
        return Unknown("no answer")

    with engine.begin() as connection:
        connection.execute(text(f"TRUNCATE {', '.join(TABLES)}"))
    with Session(engine) as session, session.begin():
        for operation, count in (("dead.charge", dead), ("alive.charge", ALIVE)):
            for _ in range(count):
                bench.enqueue(session, operation, {"amount": 2000, "currency": "eur"}, parent=f"n:{next(numbers)}")
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(text(f"VACUUM ANALYZE {', '.join(TABLES)}"))
        connection.execute(text("CHECKPOINT"))
    async_engine = create_async_engine(engine.url)
    dispatcher = Dispatcher(async_engine, outbox=bench, include=[operations])
    started = time.perf_counter()
    settled = await dispatcher.run_once()
    taken = time.perf_counter() - started
    await async_engine.dispose()
    if not ALIVE <= settled < ALIVE + 1000:
        raise SystemExit(f"the dispatcher settled {settled}, {ALIVE} of them alive")
    return taken


if __name__ == "__main__":
    main()
