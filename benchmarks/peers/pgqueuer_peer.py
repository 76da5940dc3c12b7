"""PGQueuer as a contestant: `benchmarks/contestants.py` says what each command does.

It runs in the peers' environment, which has nothing of this project.
"""

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

PAYLOAD = b'{"amount": 2000, "currency": "eur", "description": "one line of an order", "pad": "%s"}' % (b"." * 140)
AT_ONCE = 5_000
DRAIN_BATCH = 500
LATENCY_BATCH = 10


async def install() -> None:
    await Queries(AsyncpgDriver(await asyncpg.connect())).install()


async def fill(count: int) -> None:
    queries = Queries(AsyncpgDriver(await asyncpg.connect()))
    for first in range(0, count, AT_ONCE):
        jobs = min(AT_ONCE, count - first)
        await queries.enqueue(["noop"] * jobs, [PAYLOAD] * jobs, [0] * jobs)


async def run(seen: Callable[[Any], None], batch: int) -> None:
    queue = PgQueuer(AsyncpgDriver(await asyncpg.connect()))

    async def noop(job: Any) -> None:
        seen(job)

    queue.entrypoint("noop")(noop)
    await queue.run(batch_size=batch, dequeue_timeout=timedelta(seconds=30))


async def drain(step: int) -> None:
    count = 0

    def seen(job: Any) -> None:
        nonlocal count
        if count % step == 0:
            print(f"{os.getpid()}\n", end="", flush=True)  # in one write: others write here too
        count += 1

    await run(seen, DRAIN_BATCH)


async def work() -> None:
    await run(
        lambda job: print(f"start {job.payload.decode()} {time.monotonic()}\n", end="", flush=True), LATENCY_BATCH
    )


async def produce(count: int, first: int, least: int, most: int) -> None:
    connection = await asyncpg.connect()
    queries = Queries(AsyncpgDriver(connection))
    for number in range(first, first + count):
        async with connection.transaction():
            await queries.enqueue("noop", str(number).encode())
        print(f"commit {number} {time.monotonic()}\n", end="", flush=True)
        await asyncio.sleep(random.uniform(least, most) / 1000)


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    commands: dict[str, Any] = {"install": install, "fill": fill, "drain": drain, "work": work, "produce": produce}
    uvloop.run(commands[command](*map(int, rest)))
