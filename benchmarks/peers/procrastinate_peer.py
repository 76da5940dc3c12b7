"""Procrastinate as a contestant: `benchmarks/contestants.py` says what each command does."""

import asyncio
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import procrastinate
import uvloop

DRAIN_CONCURRENCY = 20
LATENCY_CONCURRENCY = 10
AT_ONCE = 1_000
PADDING = "." * 200


def ignore(number: int) -> None:
    pass


seen: Callable[[int], None] = ignore  # what a job does; a command sets it

logging.getLogger("procrastinate").setLevel(logging.ERROR)  # it warns of an app in the main module
app = procrastinate.App(connector=procrastinate.PsycopgConnector())


async def noop(number: int, padding: str = "") -> None:
    seen(number)


task = app.task(name="noop")(noop)


async def install() -> None:
    await app.schema_manager.apply_schema_async()


async def fill(count: int) -> None:
    for first in range(0, count, AT_ONCE):
        jobs = range(first, min(first + AT_ONCE, count))
        await task.batch_defer_async(*({"number": number, "padding": PADDING} for number in jobs))


async def drain(step: int) -> None:
    global seen
    count = 0

    def report(number: int) -> None:
        nonlocal count
        if count % step == 0:
            print(f"{os.getpid()}\n", end="", flush=True)
        count += 1

    seen = report
    await app.run_worker_async(concurrency=DRAIN_CONCURRENCY, delete_jobs="always")


async def work() -> None:
    global seen

    def report(number: int) -> None:
        print(f"start {number} {time.monotonic()}\n", end="", flush=True)

    seen = report
    await app.run_worker_async(concurrency=LATENCY_CONCURRENCY, delete_jobs="always")


async def produce(count: int, first: int, least: int, most: int) -> None:
    for number in range(first, first + count):
        await task.defer_async(number=number)
        print(f"commit {number} {time.monotonic()}\n", end="", flush=True)
        await asyncio.sleep(random.uniform(least, most) / 1000)


async def main(command: str, *arguments: int) -> None:
    commands: dict[str, Any] = {"install": install, "fill": fill, "drain": drain, "work": work, "produce": produce}
    async with app.open_async():
        await commands[command](*arguments)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], *map(int, sys.argv[2:])))
