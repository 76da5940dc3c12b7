"""The processes of `benchmarks.latency`: dispatchers, and an app that enqueues now and then.

python -m benchmarks.latency_sides work URL DRIVER   prints "start NUMBER SECONDS" when a send begins, until it is terminated
python -m benchmarks.latency_sides produce URL COUNT FIRST   prints "commit NUMBER SECONDS" after each commit
python -m benchmarks.latency_sides both URL COUNT FIRST      both in one process
"""

import asyncio
import random
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import outbox
from dispatchers import Delivered, Delivery, Dispatcher, Operations
from dispatchers.daemon import tuned_interpreter

SETTLING_SECONDS = 2.0  # until a dispatcher that has started is idle
BENCH = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="bench")
operations = Operations()


@operations.operation("noop")
async def noop(delivery: Delivery) -> Delivered:
    print("start", delivery.payload["number"], time.monotonic(), flush=True)
    return Delivered()


async def work(url: str, driver: str, stopping: asyncio.Event) -> None:
    asynchronous = sa.make_url(url).set(drivername="postgresql+asyncpg")
    engine = create_async_engine(asynchronous) if driver == "asyncpg" else sa.create_engine(url)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await Dispatcher(engine, outbox=BENCH, include=[operations]).pump(stopping)


def produce(url: str, count: int, first: int) -> None:
    engine = sa.create_engine(url)
    for number in range(first, first + count):
        with Session(engine) as session, session.begin():
            BENCH.enqueue(session, "noop.send", {"number": number}, parent=f"n:{number}")
        print("commit", number, time.monotonic(), flush=True)
        time.sleep(random.uniform(0.03, 0.12))


async def both(url: str, count: int, first: int) -> None:
    stopping = asyncio.Event()
    working = asyncio.create_task(work(url, "psycopg", stopping))
    await asyncio.sleep(SETTLING_SECONDS)
    await asyncio.to_thread(produce, url, count, first)
    await asyncio.sleep(SETTLING_SECONDS)
    stopping.set()
    await working


def run(main: Coroutine[Any, Any, None]) -> None:
    with tuned_interpreter():
        asyncio.run(main)


if __name__ == "__main__":
    command, url, *rest = sys.argv[1:]
    match command:
        case "work":
            run(work(url, rest[0], asyncio.Event()))
        case "produce":
            produce(url, *map(int, rest))
        case "both":
            run(both(url, *map(int, rest)))
