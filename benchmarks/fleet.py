"""What the databases of a fleet cost each other: `python3 -m benchmarks.fleet down` and `... backlog`, three minutes each.

down: how many entries a second the fleet sends from three databases, while a fourth one is idle, refuses connections, hangs
    (its server is stopped), or answers 200 ms late. Each has a server of its own, and the adapter does nothing. At most 5 % may
    be lost to one that is down.
backlog: how soon the fleet sends the entries of a database with ten a second, alone and beside a database in which 100,000
    are due. A send takes 20 ms.
"""

import argparse
import asyncio
import math
import multiprocessing
import os
import platform
import signal
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.orm import Session

import outbox
from benchmarks.draining import TABLES, numbers
from dispatchers import Delivered, Delivery, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.process.fleet_work import FleetWork
from dispatchers.testing.postgres import Server, temporary_postgres
from outbox import migrations

BENCH = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="bench")
ROUNDS = {"down": 8, "backlog": 3}
ENTRIES = 6_000  # in each of the three databases
EDGE = 0.1  # of them are sent before the measurement begins, and after it has ended
LATE_SECONDS = 0.2
BACKLOG = 100_000
SEND_SECONDS = 0.02
RATE = 10
SAMPLES = 200
COPIED = ("outbox_entry", "outbox_queue")  # in the order of their references


class Counting(MemoryAdapter):
    """Does nothing but note its calls.

    sent: the time of each, and the CPU seconds that this process had used by then. waited: since the entry's commit.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.sent: list[tuple[float, float]] = []
        self.waited: list[float] = []

    async def send(self, delivery: Delivery) -> Outcome:
        now = time.monotonic()
        self.sent.append((now, time.process_time()))
        if (at := delivery.payload.get("at")) is not None:
            self.waited.append(now - at)
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return Delivered()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.fleet", description=__doc__)
    parser.add_argument("part", choices=ROUNDS)
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    rounds = arguments.rounds or ROUNDS[arguments.part]
    with servers(4 if arguments.part == "down" else 2) as running:
        print(f"{running[0].origin}; Python {platform.python_version()}, {os.cpu_count()} cores; {rounds} rounds")
        measure = measure_down if arguments.part == "down" else measure_backlog
        asyncio.run(measure(running, rounds))


@contextmanager
def servers(count: int) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        running = [stack.enter_context(temporary_postgres(durable=False)) for _ in range(count)]
        for server in running:
            migrations.upgrade(server.url)
        yield running


@asynccontextmanager
async def serving(urls: Mapping[str, str], adapter: Counting) -> AsyncIterator[None]:
    stopping = asyncio.Event()
    pump = asyncio.create_task(FleetWork(urls, adapters={"noop": adapter}, outbox=BENCH).pump(stopping))
    yield
    stopping.set()
    await pump


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # a send must not pay for an event
        await asyncio.sleep(0.01)


# --- entries: written once, and copied for each round


def store(engine: Engine, count: int) -> None:
    """Write entries, and set them aside."""
    with Session(engine) as session, session.begin():
        for _ in range(count):
            BENCH.enqueue(session, "noop.charge", {"amount": 2000, "currency": "eur"}, parent=f"n:{next(numbers)}")
    with engine.begin() as connection:
        for table in COPIED:
            connection.execute(text(f"CREATE TABLE stored_{table} AS SELECT * FROM {table}"))
        connection.execute(text(f"TRUNCATE {TABLES}"))


def fill(engine: Engine, at_once: threading.Barrier) -> None:
    """Make the stored entries due, in all databases at the same time."""
    with engine.begin() as connection:
        connection.execute(text(f"TRUNCATE {TABLES}"))
        for table in COPIED:
            connection.execute(text(f"INSERT INTO {table} SELECT * FROM stored_{table}"))
        connection.execute(text(f"ANALYZE {', '.join(COPIED)}"))
        at_once.wait()


async def filled(engines: Sequence[Engine]) -> None:
    at_once = threading.Barrier(len(engines))
    await asyncio.gather(*(asyncio.to_thread(fill, engine, at_once) for engine in engines))


# --- down


async def measure_down(running: Sequence[Server], rounds: int) -> None:
    *others, fourth = running
    adapter = Counting()
    async with Relay(fourth).listening() as relay:
        urls = {f"db{number}": server.url for number, server in enumerate(others)}
        engines = [create_engine(url) for url in urls.values()]
        for engine in engines:
            await asyncio.to_thread(store, engine, ENTRIES)
        states: dict[str, Callable[[], None]] = {
            "idle": relay.carry,
            "refuses": relay.refuse,
            "hangs": lambda: send_signal(fourth, signal.SIGSTOP),
            "answers late": relay.delay,
        }
        found: dict[str, list[Figures]] = {name: [] for name in states}
        async with serving({**urls, "db3": relay.url}, adapter):
            await drained(adapter, engines)
            for _ in range(rounds):
                for name, begin in states.items():
                    begin()
                    found[name].append(await drained(adapter, engines))
                    send_signal(fourth, signal.SIGCONT)
                    relay.carry()
                    await is_served(adapter, fourth)
        for engine in engines:
            engine.dispose()
    for number, figure in enumerate(Figures._fields):
        print(f"{figure:14}{'median':>8}{'ratio':>8}  95 % of the ratio")
        for name, values in found.items():
            print_ratio(name, [each[number] for each in values], [each[number] for each in found["idle"]])


class Figures(NamedTuple):
    """Of the three databases. cpu_us: of this process, for an entry."""

    per_second: float
    cpu_us: float


async def drained(adapter: Counting, engines: Sequence[Engine]) -> Figures:
    """Send all stored entries of the three databases. The first and the last ones do not count."""
    adapter.sent.clear()
    await filled(engines)
    await until(lambda: len(adapter.sent) >= ENTRIES * len(engines))
    sent = adapter.sent
    edge = int(len(sent) * EDGE)
    count, (begun, cpu), (ended, cpu_then) = len(sent) - 2 * edge, sent[edge], sent[-edge]
    return Figures(count / (ended - begun), (cpu_then - cpu) * 1e6 / count)


def print_ratio(name: str, values: Sequence[float], idle: Sequence[float]) -> None:
    ratios = [value / base for value, base in zip(values, idle, strict=True)]
    mean = statistics.fmean(ratios)
    error = 2 * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    print(f"{name:14}{statistics.median(values):>8,.0f}{mean:>8.3f}  {mean - error:.3f} to {mean + error:.3f}")


def send_signal(server: Server, number: signal.Signals) -> None:
    """To all processes of a server."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    for pid in (server.pid, *map(int, children)):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def is_served(adapter: Counting, server: Server) -> None:
    """Wait until an entry of this database is sent."""
    adapter.sent.clear()
    await asyncio.to_thread(enqueue_one, server.url)
    await until(lambda: bool(adapter.sent))


def enqueue_one(url: str) -> None:
    engine = create_engine(url)
    with Session(engine) as session, session.begin():
        BENCH.enqueue(session, "noop.charge", {}, parent=f"n:{next(numbers)}")
    engine.dispose()


class Relay:
    """Carries connections to a server: at once, 200 ms late, or not at all."""

    def __init__(self, server: Server) -> None:
        self._directory = make_url(server.url).query["host"]
        self._late, self._is_refusing = 0.0, False
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""

    def carry(self) -> None:
        self._late, self._is_refusing = 0.0, False

    def delay(self) -> None:
        self._late = LATE_SECONDS

    def refuse(self) -> None:
        self._is_refusing = True
        for writer in self._writers:
            writer.transport.abort()

    @asynccontextmanager
    async def listening(self) -> "AsyncIterator[Relay]":
        listener = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        self.url = f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
        yield self
        listener.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_refusing:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_unix_connection(f"{self._directory}/.s.PGSQL.5432")
        both = {writer, far_writer}
        self._writers |= both
        with suppress(ConnectionError):
            await asyncio.gather(
                self._copy(reader, far_writer, lambda: 0.0), self._copy(far_reader, writer, lambda: self._late)
            )
        self._writers -= both
        for each in both:
            each.transport.abort()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: Callable[[], float]
    ) -> None:
        while data := await reader.read(65536):
            await asyncio.sleep(seconds())
            writer.write(data)
            await writer.drain()
        writer.close()


# --- backlog


async def measure_backlog(running: Sequence[Server], rounds: int) -> None:
    large, small = running
    engine = create_engine(large.url)
    await asyncio.to_thread(store, engine, BACKLOG)
    found: dict[str, list[float]] = {"alone": [], "beside": []}
    for _ in range(rounds):
        for name in found:
            adapter = Counting(SEND_SECONDS)
            if name == "beside":
                await filled([engine])
            async with serving({"large": large.url, "small": small.url}, adapter):
                await is_served(adapter, small)
                enqueuing = multiprocessing.get_context("spawn").Process(target=enqueue_steadily, args=(small.url,))
                enqueuing.start()
                await until(lambda: len(adapter.waited) >= SAMPLES)  # noqa: B023
                print(f"{name}: {len(adapter.sent):,} sent")
                found[name] += adapter.waited
            enqueuing.join()
            with engine.begin() as connection:
                connection.execute(text(f"TRUNCATE {TABLES}"))
    engine.dispose()
    print(f"milliseconds from the commit to the send\n{'':8}{'p50':>8}{'p99':>8}{'most':>8}")
    for name, waited in found.items():
        waited.sort()
        shown = (waited[len(waited) // 2], waited[math.ceil(len(waited) * 0.99) - 1], waited[-1])
        print(f"{name:8}" + "".join(f"{seconds * 1000:>8.1f}" for seconds in shown))


def enqueue_steadily(url: str) -> None:
    engine = create_engine(url)
    for _ in range(SAMPLES):
        with Session(engine) as session, session.begin():
            BENCH.enqueue(session, "noop.charge", {"at": time.monotonic()}, parent=f"s:{time.time_ns()}")
        time.sleep(1 / RATE)
    engine.dispose()


if __name__ == "__main__":
    main()
