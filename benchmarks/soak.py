"""Hours of an app and a dispatcher under a mixed load, and whether their memory ends flat: `python3 dev.py soak --hours 6`.

Orders arrive at a steady rate, each twentieth one twice. Of the sends to a service some are refused, some fail at first, and some
lose their answer. Callbacks, hints and retention run as they do for users. The verdict: the slope of each process's memory after
the warm-up, and at the service each effect exactly once.
"""

import argparse
import asyncio
import math
import os
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping, MutableSequence, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import combinations
from pathlib import Path

import aiohttp
from aiohttp import web
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from benchmarks.harness import Server, running_server
from benchmarks.requests import TIMEOUT_SECONDS, serving
from benchmarks.scale import resident_mb
from benchmarks.shop import AUTHORIZATION, BODY, Base, Customer
from benchmarks.waiting import add_settled
from outbox import migrations

DATABASE = "soak"
SAMPLES = 300  # over the whole run
WARM_UP = 1 / 3  # of the run: caches and pools fill, and the allocator finds its size
WARM_UP_ORDERS = 30_000  # and at least so many: a process warms up by what it does, not by the time
MAX_MB_AN_HOUR = 0.1
REPEATED = 20  # one of so many orders is sent twice
OLD_ENTRIES, OLD_AGE = 500, "400 days"  # before each sample, for retention
SPARE_NUMBERS = 10_000  # of orders that were rolled back
CLIENTS = 8
END_SECONDS = 180  # for what waits when the load ends
PRINTED = 60
FAILED = -1

Sample = tuple[float, float]
"""Hours since the start, and MB."""


class Service:
    """Executes each order once under each key. doubled: the orders that came under a second key.

    contacts, mails: by the order's number the hash of its key, 0 before it came, FAILED after a failure without an effect.
    """

    def __init__(self, orders: int) -> None:
        self.contacts, self.mails = (array("q", bytes(8 * (orders + SPARE_NUMBERS))) for _ in range(2))
        self.doubled: list[int] = []
        self.repeated = 0

    async def contact(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self.contacts)

    async def mail(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self.mails)

    async def _answer(self, request: web.Request, executed: MutableSequence[int]) -> web.StreamResponse:
        number, key = (await request.json())["order"], hash(request.headers["Idempotency-Key"])
        found, executed[number] = executed[number], key
        if executed is self.contacts and is_refused(number):
            return web.json_response({"error": "no such customer"}, status=422)
        if not found and number % 20 == 2:
            executed[number] = FAILED
            return web.json_response({"error": "busy"}, status=503)
        if found in (0, FAILED):
            if number % 50 == 3 and request.transport is not None:
                request.transport.abort()  # executed, and its answer is lost
        else:
            self.repeated += 1
            if found != key:
                self.doubled.append(number)
        return web.json_response({"id": number}, status=201)


def is_refused(number: int) -> bool:
    return number % 50 == 1


async def soak(server: Server, hours: float, rate: float) -> list[str]:
    """What is wrong at the end."""
    url = server.url(DATABASE)
    service = Service(math.ceil(hours * 3600 * rate))
    async with serving_service(service) as service_url:
        with serving("soaked", url, CLIENTS, "benchmarks.soaked") as shop, dispatching(url, service_url) as dispatcher:
            loading = asyncio.create_task(order_all(shop.port, hours * 3600, rate))
            samples = await sample_all(server, {"app": shop.process.pid, "dispatcher": dispatcher.pid}, hours)
            orders = await loading
            await wait_until_settled(server)
    warm_up = max(hours * WARM_UP, WARM_UP_ORDERS / rate / 3600)
    return [*memory_faults(samples, warm_up), *effect_faults(service, orders)]


@asynccontextmanager
async def serving_service(service: Service) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.post("/contacts", service.contact), web.post("/mails", service.mail)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextmanager
def dispatching(url: str, service_url: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [str(Path(sys.executable).with_name("outbox")), "run", "benchmarks.soaked:make_dispatcher"]
    variables = {"BENCH_URL": url, "BENCH_SERVICE": service_url}
    process = subprocess.Popen([*command, "--log-level", "error"], env=os.environ | variables)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(TIMEOUT_SECONDS)


async def order_all(port: int, seconds: float, rate: float) -> list[int]:
    """Order at the given rate. Returns the numbers of the orders that were taken."""
    began, requests, taken = time.monotonic(), iter(range(int(seconds * rate))), array("q")
    headers = {"Content-Type": "application/json", "Authorization": AUTHORIZATION}

    async def order(session: aiohttp.ClientSession, number: int) -> int:
        key = {"Idempotency-Key": f'"order:{number}"'}
        async with session.post(f"http://127.0.0.1:{port}/orders", data=BODY, headers=headers | key) as answer:
            if answer.status != 201:
                raise SystemExit(f"the app answered {answer.status}: {await answer.text()}")
            return int((await answer.json())["order"])

    async def order_some(session: aiohttp.ClientSession) -> None:
        for number in requests:
            await asyncio.sleep(began + number / rate - time.monotonic())
            taken.append(await order(session, number))
            if number % REPEATED == 0:
                await order(session, number)

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(order_some(session))
    return list(taken)


async def sample_all(server: Server, pids: Mapping[str, int], hours: float) -> dict[str, list[Sample]]:
    """The memory of each process over the run. Before each sample entries are added that retention then deletes."""
    samples: dict[str, list[Sample]] = {name: [] for name in pids}
    began = time.monotonic()
    with server.connect(DATABASE) as connection:
        for number in range(1, SAMPLES + 1):
            await asyncio.to_thread(add_settled, connection, OLD_ENTRIES, OLD_AGE)
            await asyncio.sleep(began + hours * 3600 * number / SAMPLES - time.monotonic())
            for name, pid in pids.items():
                samples[name].append(((time.monotonic() - began) / 3600, resident_mb(pid)))
            if number % (SAMPLES // PRINTED) == 0:
                memory = "".join(f"{name:>12}{each[-1][1]:>8.2f} MB" for name, each in samples.items())
                print(f"{number / SAMPLES * hours:>8.2f} h{memory}", flush=True)
    return samples


async def wait_until_settled(server: Server) -> None:
    with server.connect(DATABASE) as connection:
        waiting: list[tuple[str, int]] = []
        for _ in range(END_SECONDS):
            waiting = connection.execute("SELECT state, count(*) FROM outbox_queue GROUP BY 1").fetchall()
            if not waiting:
                return
            await asyncio.sleep(1)
        raise SystemExit(f"entries that did not end within {END_SECONDS} s: {waiting}")


# --- the verdict


def slope(samples: Sequence[Sample]) -> float:
    """MB an hour, by Theil and Sen: the median of the slopes between all pairs, so that no single leap decides."""
    return statistics.median(
        (later[1] - sooner[1]) / (later[0] - sooner[0]) for sooner, later in combinations(samples, 2)
    )


def memory_faults(samples: Mapping[str, Sequence[Sample]], warm_up: float) -> Iterator[str]:
    """warm_up: hours."""
    for name, each in samples.items():
        judged = [sample for sample in each if sample[0] > warm_up]
        if len(judged) < len(each) / 3:
            yield f"too short to judge the memory of the {name}: the warm-up takes {warm_up:.2f} hours of the run"
            continue
        growth = slope(judged)
        print(f"memory of the {name}: {each[-1][1]:.2f} MB, {growth:+.3f} MB an hour after the warm-up")
        if growth > MAX_MB_AN_HOUR:
            yield f"the memory of the {name} grows by more than {MAX_MB_AN_HOUR} MB an hour"


def effect_faults(service: Service, orders: Sequence[int]) -> Iterator[str]:
    lost = [number for number in orders if service.contacts[number] in (0, FAILED)]
    lost += [number for number in orders if not is_refused(number) and service.mails[number] in (0, FAILED)]
    print(
        f"{len(orders)} orders: {len(lost)} effects lost, {len(service.doubled)} doubled, {service.repeated} repeated sends"
    )
    if lost:
        yield f"effects that were lost, of the orders {lost[:10]}"
    if service.doubled:
        yield f"effects under two keys, of the orders {service.doubled[:10]}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="dev.py soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--rate", type=float, default=50.0, help="orders a second; each is one request and two sends")
    arguments = parser.parse_args()
    with running_server() as server:
        prepare(server)
        print(f"{server.origin}; {arguments.hours:g} hours, {arguments.rate:g} orders a second", flush=True)
        faults = asyncio.run(soak(server, arguments.hours, arguments.rate))
    print("\n".join(faults) or "flat, and each effect exactly once")
    sys.exit(1 if faults else 0)


def prepare(server: Server) -> None:
    server.create(DATABASE)
    migrations.upgrade(server.url(DATABASE))
    engine = create_engine(server.url(DATABASE))
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(Customer(id=1, name="Ada"))
    engine.dispose()


if __name__ == "__main__":
    main()
