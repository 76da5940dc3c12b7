"""What the benchmarks of a whole drain share: where it runs, and entries as they are after a while of ordinary life."""

import argparse
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import outbox
from dispatchers import Dispatcher, Operations
from dispatchers.testing import temporary_postgres
from outbox import migrations

ROUNDS = 9
numbers = count()
TABLES = ", ".join(
    f"outbox_{name}" for name in ("queue", "entry", "settlement", "event", "destination", "blocked_group")
)


@contextmanager
def database(url: str | None) -> Iterator[tuple[str, str]]:
    if url is not None:
        yield url, "the given database"
        return
    with temporary_postgres() as server:
        yield server.url, server.origin


@contextmanager
def draining_engine(prog: str, description: str | None) -> Iterator[Engine]:
    """An engine on the database that the command line names, or on a temporary one, with the tables in it."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--database", help="SQLAlchemy URL of a PostgreSQL database to use instead of a temporary one")
    arguments = parser.parse_args()
    with database(arguments.database) as (url, origin):
        print(f"{origin}; Python {platform.python_version()}, {os.cpu_count()} cores; {ROUNDS} rounds, in turn")
        migrations.upgrade(url)
        engine = create_engine(url)
        yield engine
        engine.dispose()


@contextmanager
def filling(engine: Engine) -> Iterator[Session]:
    """A session for all the entries; afterwards the tables are vacuumed, and written out."""
    with engine.begin() as connection:
        connection.execute(text(f"TRUNCATE {TABLES}"))
    with Session(engine) as session, session.begin():
        yield session
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(text(f"VACUUM ANALYZE {TABLES}"))
        connection.execute(text("CHECKPOINT"))


async def drained(engine: Engine, bench: outbox.Outbox, operations: Operations) -> tuple[int, float, float]:
    """How many entries a new dispatcher settles, when it began, and how many seconds it took."""
    async_engine = create_async_engine(engine.url)
    dispatcher = Dispatcher(async_engine, outbox=bench, include=[operations])
    started = time.perf_counter()
    settled = await dispatcher.run_once()
    taken = time.perf_counter() - started
    await async_engine.dispose()
    return settled, started, taken
