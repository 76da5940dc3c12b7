"""PGQueuer, for `benchmarks.latency`: runs in an environment of its own, which has nothing of this project.

python pgqueuer_peer.py install URL
python pgqueuer_peer.py work URL            prints "start NUMBER SECONDS" when a job begins, until it is terminated
python pgqueuer_peer.py produce URL COUNT FIRST   prints "commit NUMBER SECONDS" after each commit
"""

import asyncio
import random
import sys
import time
from datetime import timedelta
from typing import Any

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import uvloop  # type: ignore[import-not-found,unused-ignore]
from pgqueuer import PgQueuer  # type: ignore[import-not-found,unused-ignore]
from pgqueuer.db import AsyncpgDriver  # type: ignore[import-not-found,unused-ignore]
from pgqueuer.queries import Queries  # type: ignore[import-not-found,unused-ignore]


async def install(url: str) -> None:
    await Queries(AsyncpgDriver(await asyncpg.connect(url))).install()


async def work(url: str) -> None:
    queue = PgQueuer(AsyncpgDriver(await asyncpg.connect(url)))

    @queue.entrypoint("noop")
    async def noop(job: Any) -> None:
        print("start", job.payload.decode(), time.monotonic(), flush=True)

    await queue.run(batch_size=10, dequeue_timeout=timedelta(seconds=30))


async def produce(url: str, count: int, first: int) -> None:
    connection = await asyncpg.connect(url)
    queries = Queries(AsyncpgDriver(connection))
    for number in range(first, first + count):
        async with connection.transaction():
            await queries.enqueue("noop", str(number).encode())
        print("commit", number, time.monotonic(), flush=True)
        await asyncio.sleep(random.uniform(0.03, 0.12))


if __name__ == "__main__":
    command, url, *rest = sys.argv[1:]
    match command:
        case "install":
            uvloop.run(install(url))
        case "work":
            uvloop.run(work(url))
        case "produce":
            uvloop.run(produce(url, *map(int, rest)))
