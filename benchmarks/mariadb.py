"""MariaDB, or MySQL, beside PostgreSQL: `python3 -m benchmarks.mariadb URL [URL ...]`, about two minutes for two URLs.

Each URL names a database of its own on a MariaDB or a MySQL, with the driver to measure; its tables of the outbox are replaced.
PostgreSQL is a temporary one. All sides are measured in turn (A B A B), with the servers' durability as it is:

- drain: how many entries a second a dispatcher settles, to an adapter that does nothing.
- commit: how long a transaction with one entry takes, divided by one without: each inserts one row of the app's.

The goals are half of PostgreSQL's drain, and a commit of at most 1.6 times one without an entry.
"""

import argparse
import asyncio
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping

from sqlalchemy import Engine, MetaData, create_engine, text
from sqlalchemy.orm import Session

from benchmarks.enqueue import BENCH, PAYLOAD, Base, Order, numbers
from dispatchers import Delivered, Delivery, Dispatcher, Operations
from dispatchers.testing import temporary_postgres
from outbox import migrations
from outbox.sql.schema.tables import define_tables

ROUNDS = 7
ENTRIES = 10_000
COMMITS = 300
DRAIN_GOAL = 0.5
COMMIT_GOAL = 1.6


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.mariadb", description=__doc__)
    parser.add_argument(
        "urls", nargs="+", metavar="URL", help="such as mariadb+mysqldb://root@/bench?binary_prefix=1&unix_socket=..."
    )
    urls = parser.parse_args().urls
    with temporary_postgres() as server:
        engines = {"postgresql+psycopg": create_engine(server.url)}
        for url in urls:
            engine = create_engine(url, isolation_level="READ COMMITTED")
            engines[engine.url.drivername] = engine
        print(f"{server.origin}; Python {platform.python_version()}, {os.cpu_count()} cores; {ROUNDS} rounds, in turn")
        for engine in engines.values():
            prepare(engine)
        met = [*compare_drains(engines), *compare_commits(engines)]
        for engine in engines.values():
            engine.dispose()
    sys.exit(0 if all(met) else 1)


def prepare(engine: Engine) -> None:
    if engine.dialect.name in ("mariadb", "mysql"):
        migrations.downgrade(engine.url)
        Base.metadata.drop_all(engine)
    migrations.upgrade(engine.url)
    Base.metadata.create_all(engine)


# --- drain


def compare_drains(engines: Mapping[str, Engine]) -> list[bool]:
    rounds = [{name: asyncio.run(drain(engine)) for name, engine in engines.items()} for _ in range(ROUNDS)]
    first = next(iter(engines))
    print(f"draining {ENTRIES} entries\n{'':24}{'a second':>10}{'client us':>11}{'ratio':>8}{'at least':>10}")
    met = []
    for name in engines:
        rate, cpu = (statistics.median(each[name][figure] for each in rounds) for figure in (0, 1))
        ratio = statistics.median(each[name][0] / each[first][0] for each in rounds)
        print(f"{name:24}{rate:>10,.0f}{cpu:>11.0f}{ratio:>8.2f}{DRAIN_GOAL:>10.1f}")
        met.append(ratio >= DRAIN_GOAL)
    return met


async def drain(engine: Engine) -> tuple[float, float]:
    """Entries a second, and microseconds of this process's CPU for each."""
    operations = Operations()

    @operations.operation("noop")
    async def deliver(delivery: Delivery) -> Delivered:
        return Delivered()

    fill(engine)
    dispatcher = Dispatcher(engine, outbox=BENCH, include=[operations])
    started, cpu = time.perf_counter(), time.process_time()
    settled = await dispatcher.run_once()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    if settled != ENTRIES:
        raise SystemExit(f"the dispatcher settled {settled} of {ENTRIES}")
    return settled / seconds, cpu / settled * 1e6


def fill(engine: Engine) -> None:
    tables = define_tables(MetaData())
    emptied = [table.name for table in (tables.queue, tables.entry, tables.settlement, tables.event)]
    with engine.begin() as connection:
        for statement in [f"TRUNCATE {each}" for each in emptied]:
            connection.execute(text(statement))
    with Session(engine) as session, session.begin():
        for _ in range(ENTRIES):
            BENCH.enqueue(session, "noop.charge", PAYLOAD, parent=f"n:{next(numbers)}")
    analyze = "VACUUM ANALYZE" if engine.dialect.name == "postgresql" else "ANALYZE TABLE"
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(text(f"{analyze} {', '.join(emptied)}"))


# --- commit


def compare_commits(engines: Mapping[str, Engine]) -> list[bool]:
    rounds = [
        {(name, entries): commit(engine, entries) for name, engine in engines.items() for entries in (0, 1)}
        for _ in range(ROUNDS)
    ]
    print(f"{COMMITS} commits, ms\n{'':24}{'without':>10}{'1 entry':>11}{'ratio':>8}{'at most':>10}")
    met = []
    for name in engines:
        without, with_entry = (statistics.median(each[name, entries] for each in rounds) for entries in (0, 1))
        ratio = statistics.median(each[name, 1] / each[name, 0] for each in rounds)
        print(f"{name:24}{without:>10.3f}{with_entry:>11.3f}{ratio:>8.2f}{COMMIT_GOAL:>10.1f}")
        met.append(ratio <= COMMIT_GOAL)
    return met


def commit(engine: Engine, entries: int) -> float:
    """Milliseconds that a transaction takes, each in a session of its own, as a request's is."""
    gc.collect()
    started = time.perf_counter()
    for _ in range(COMMITS):
        number = next(numbers)
        with Session(engine) as session, session.begin():
            session.add(Order(customer="ada", amount=2000))
            for line in range(entries):
                BENCH.enqueue(session, "noop.charge", PAYLOAD, parent=f"order:{number}", discriminator=str(line))
    return (time.perf_counter() - started) / COMMITS * 1000


if __name__ == "__main__":
    main()
