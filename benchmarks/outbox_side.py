"""The outbox as a contestant: `benchmarks.contestants` says what each command does.

`drain` takes the dispatcher's concurrency as a second argument, `work` the driver; without one they are the default. A third
and a fourth argument of `drain` are the URL of a NATS server and a stream, to which it publishes each job. With `answered` as
the third one, the adapter publishes nothing, but each send waits for a turn of the event loop and has a result like a message's.
`write STEP ENTRIES` commits transactions of so many entries until terminated, and prints the process's id before each STEP-th.
`both COUNT FIRST LEAST MOST` is `work` and `produce` in one process; `retain` deletes what is old enough, and `poll` reads the
pages of the dashboard, until terminated.
"""

import asyncio
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import outbox
from dispatchers import Adapter, Delivered, Delivery, Dispatcher, Operations, Outcome
from dispatchers.adapters import NatsAdapter
from dispatchers.maintenance.jobs import Maintenance
from dispatchers.maintenance.retention import Retention
from dispatchers.process.daemon import tuned_interpreter
from dispatchers.process.dispatcher_work import DispatcherWork
from dispatchers.settings import RETENTION
from outbox import migrations
from outbox.sql.deployment import record_secrets
from outbox.sql.schema.tables import define_tables

URL = "postgresql+psycopg://"  # the rest is in libpq's variables
BENCH = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="bench")
PAYLOAD = {
    "amount": 2000,
    "currency": "eur",
    "customer": "cus_1",
    "description": "one line of an order",
    "pad": "." * 120,
}
AT_ONCE = 5_000  # entries in a transaction of `fill`
HANGING_SECONDS = 3600
ANSWERED = "answered"
SETTLING_SECONDS = 2.0  # until a dispatcher that has started is idle


def install() -> None:
    """With the secret on record: entries that are written by SQL have keys that no secret derives."""
    migrations.upgrade(URL)
    with sa.create_engine(URL).begin() as connection:
        record_secrets(connection, define_tables(sa.MetaData()), BENCH.configuration.keyring)


def fill(count: int) -> None:
    engine = sa.create_engine(URL)
    for first in range(0, count, AT_ONCE):
        with Session(engine) as session, session.begin():
            for number in range(first, min(first + AT_ONCE, count)):
                BENCH.enqueue(session, "noop.send", PAYLOAD, parent=f"n:{number}")


def write(step: int, entries: int) -> None:
    engine = sa.create_engine(URL)
    for number in itertools.count():
        if number % step == 0:
            print(f"{os.getpid()}\n", end="", flush=True)  # in one write: others write here too
        with Session(engine) as session, session.begin():
            for line in range(entries):
                BENCH.enqueue(session, "noop.send", PAYLOAD, parent=f"{os.getpid()}:{number}", discriminator=str(line))


def noop(seen: Callable[[Delivery], None]) -> Operations:
    operations = Operations()

    # As Stripe does: a service that remembers no keys is sent one claim at a time, so that a crash leaves little in doubt.
    @operations.operation("noop", window=timedelta(hours=24))
    async def deliver(delivery: Delivery) -> Delivered:
        seen(delivery)
        return Delivered()

    @operations.operation("hanging")
    async def hang(delivery: Delivery) -> Delivered:
        await asyncio.sleep(HANGING_SECONDS)
        return Delivered()

    return operations


async def retain() -> None:
    """Delete what is old enough, without an end."""
    engine = sa.create_engine(URL)
    tables = define_tables(sa.MetaData())

    async def run(work: Callable[[sa.Connection], Any]) -> Any:
        with engine.begin() as connection:
            return work(connection)

    retention = Retention.of(RETENTION, [timedelta(days=1)])
    while True:
        await Maintenance(run, tables, retention).run_once()


def drain(step: int, concurrency: int | None = None, url: str = "", stream: str = "") -> None:
    count = 0

    def seen(delivery: Delivery) -> None:
        nonlocal count
        if count % step == 0:
            print(f"{os.getpid()}\n", end="", flush=True)  # in one write: others write here too
        count += 1

    settings: dict[str, Any] = {} if concurrency is None else {"concurrency": concurrency}
    if url == ANSWERED:
        settings["adapters"] = {"noop": Answered(seen)}
    elif url:
        settings["adapters"] = {"noop": Counted(url, stream, seen)}
    else:
        settings["include"] = [noop(seen)]
    Dispatcher(sa.create_engine(URL), outbox=BENCH, **settings).run()


class Counted(NatsAdapter):
    """Publishes each job. seen: is called with each."""

    def __init__(self, url: str, stream: str, seen: Callable[[Delivery], None]) -> None:
        super().__init__(urls=url, stream=stream, window=timedelta(hours=1))
        self._seen = seen

    async def send_batch(self, deliveries: Sequence[Delivery], answered: Callable[[int, Outcome], None]) -> None:
        for delivery in deliveries:
            self._seen(delivery)
        await super().send_batch(deliveries, answered)


class Answered(Adapter):
    """Answers all sends of one turn of the event loop in the next turn. seen: is called with each."""

    window = timedelta(hours=1)

    def __init__(self, seen: Callable[[Delivery], None]) -> None:
        self._seen = seen
        self._waiting: list[asyncio.Future[Outcome]] = []
        self._count = 0

    async def send(self, delivery: Delivery) -> Outcome:
        self._seen(delivery)
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._answer)
        answer: asyncio.Future[Outcome] = loop.create_future()
        self._waiting.append(answer)
        return await answer

    def _answer(self) -> None:
        answered, self._waiting = self._waiting, []
        for answer in answered:
            self._count += 1
            answer.set_result(Delivered({"stream": "RELAY", "seq": self._count}))


# --- latency


def started(delivery: Delivery) -> None:
    print(f"start {delivery.payload['number']} {time.monotonic()}\n", end="", flush=True)


def work(driver: str = "psycopg") -> None:
    engine = create_async_engine("postgresql+asyncpg://") if driver == "asyncpg" else sa.create_engine(URL)
    Dispatcher(engine, outbox=BENCH, include=[noop(started)]).run()


def produce(count: int, first: int, least: int, most: int) -> None:
    engine = sa.create_engine(URL)
    for number in range(first, first + count):
        with Session(engine) as session, session.begin():
            BENCH.enqueue(session, "noop.send", {"number": number}, parent=f"n:{number}")
        print(f"commit {number} {time.monotonic()}\n", end="", flush=True)
        time.sleep(random.uniform(least, most) / 1000)


async def both(count: int, first: int, least: int, most: int) -> None:
    stopping = asyncio.Event()
    work = DispatcherWork(sa.create_engine(URL), outbox=BENCH, include=[noop(started)])
    working = asyncio.create_task(work.pump(stopping))
    await asyncio.sleep(SETTLING_SECONDS)
    await asyncio.to_thread(produce, count, first, least, most)
    await asyncio.sleep(SETTLING_SECONDS)
    stopping.set()
    await working


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    match command:
        case "install":
            install()
        case "fill":
            fill(int(rest[0]))
        case "drain":
            drain(int(rest[0]), int(rest[1]) if rest[1:] else None, *rest[2:])
        case "write":
            write(int(rest[0]), int(rest[1]))
        case "work":
            work(*rest)
        case "produce":
            produce(*map(int, rest))
        case "retain":
            asyncio.run(retain())
        case "poll":
            from benchmarks.dashboard import poll

            asyncio.run(poll(URL))
        case "both":
            with tuned_interpreter():
                asyncio.run(both(*map(int, rest)))
