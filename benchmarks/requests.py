"""What a claim adds to a request over HTTP, in CPU of the web process and the database's, and what a replay costs.

The request, to a FastAPI app under uvicorn: JSON in and out, one transaction that reads its customer, writes an order with
three lines, and enqueues one entry. The clients' own CPU does not count.
"""

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from benchmarks.harness import Measure, Series, Server, interleave, process_cpu
from benchmarks.shop import AUTHORIZATION, BODY, Base, Customer
from outbox import migrations

PART = "requests"
DATABASE = "bench_requests"
ROUNDS = 25  # short ones: a machine's speed may change by a third within seconds
REQUESTS = 64
CLIENTS = (1, 16)
TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Shop:
    """A web process, and the name by which the server knows its connections."""

    name: str
    process: subprocess.Popen[bytes]
    port: int


def measure(server: Server, size: float) -> Iterator[Series]:
    server.create(DATABASE)
    url = server.url(DATABASE)
    migrations.upgrade(url)
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.merge(Customer(id=1, name="Ada"))
    for clients in CLIENTS:
        with serving("plain", url, clients) as plain, serving("claimed", url, clients) as claimed:
            shops = {"plain": plain, "claimed": claimed, "replayed": claimed}
            sides = {side: _measuring(engine, shop, clients) for side, shop in shops.items()}
            yield from interleave(PART, f"clients: {clients}", sides, max(int(ROUNDS * size), 2), warm_ups=1)
    engine.dispose()


def _measuring(engine: Engine, shop: Shop, clients: int) -> Measure:
    """Each side goes through the same keys, round after round: so the replayed ones are those just claimed."""
    rounds = count()

    def measure_round() -> Mapping[str, float]:
        number = next(rounds)
        keys = [f"order:{clients}:{number}:{each}" for each in range(REQUESTS)]
        return {"cpu_us": _cpu(engine, shop, clients, keys)}

    return measure_round


def _cpu(engine: Engine, shop: Shop, clients: int, keys: list[str]) -> float:
    """Microseconds of CPU for each request, made by so many concurrent clients, each over its own connection."""
    before = _used(engine, shop)
    with ThreadPoolExecutor(clients) as pool:
        for made in [pool.submit(_post, shop.port, keys[first::clients]) for first in range(clients)]:
            made.result()
    return (_used(engine, shop) - before) / len(keys) * 1e6


def _post(port: int, keys: list[str]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    for key in keys:
        headers = {"Content-Type": "application/json", "Authorization": AUTHORIZATION, "Idempotency-Key": f'"{key}"'}
        connection.request("POST", "/orders", BODY, headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 201:
            raise SystemExit(f"{response.status}: {answer!r}")
    connection.close()


def _used(engine: Engine, shop: Shop) -> float:
    """Seconds of CPU that the web process and its connections' server processes have used. The pool keeps all of them."""
    connections = text("SELECT pid FROM pg_stat_activity WHERE application_name = :name")
    with engine.connect() as connection:
        backends = connection.execute(connections, {"name": shop.name}).scalars().all()
    return sum(map(process_cpu, (shop.process.pid, *backends)))


@contextmanager
def serving(kind: str, url: str, clients: int, module: str = "benchmarks.shop") -> Iterator[Shop]:
    """A web process with as many connections to the database as there are clients, all of them open and warm."""
    name = f"bench-{kind}-{clients}"
    port = _free_port()
    # By its port: over a socket that is handed in, uvicorn waits 40 ms with the body of each answer (Nagle's algorithm).
    command = ["uvicorn", f"{module}:create_{kind}", "--factory", "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        env=os.environ | {"BENCH_URL": url, "BENCH_CLIENTS": str(clients), "BENCH_NAME": name},
    )
    try:
        _wait_until_up(port)
        yield Shop(name, process, port)
    finally:
        process.terminate()
        process.wait(TIMEOUT_SECONDS)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait_until_up(port: int) -> None:
    """Its socket takes connections before the server answers: so wait for an answer."""
    latest = time.monotonic() + TIMEOUT_SECONDS
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
            connection.request("GET", "/")
            connection.getresponse().read()
            return
        except OSError:
            if time.monotonic() > latest:
                raise
            time.sleep(0.05)
