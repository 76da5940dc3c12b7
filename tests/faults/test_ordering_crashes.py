"""Processes that are killed while they send lanes: what came to the far side came in commit order."""

import random
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from support.concurrency import PATIENCE
from support.database import Database, Order
from support.entries import Daemon, daemon, states, wait_for, write_factory

import outbox
from outbox.session import flush_all

FACTORY = """
import asyncio

class Ledger(Adapter):
    timeout = timedelta(seconds=0.5)
    window = FOREVER

    async def send(self, delivery):
        payload = delivery.payload
        with (here / "ledger.txt").open("a") as ledger:
            ledger.write(f"{payload['lane']} {payload['number']}\\n")
        await asyncio.sleep(0.002)
        return Delivered()

def make():
    return Dispatcher(
        url, outbox=ob, adapters={"crm": Ledger()}, lease=timedelta(seconds=1), margin=timedelta(seconds=0.1),
        poll=timedelta(seconds=0.05),
    )
"""

CLAIM_LOOPS, WRITERS, EACH = 20, 5, 5  # 20 lanes of 25 entries


def enqueue_all(database: Database, ob: outbox.Outbox) -> None:
    """Writers at once, each with one entry of each lane at a time. Each is rolled back once before it is committed.

    The order's id is drawn while the lane is locked: it tells the commit order, whatever the outbox thinks of it.
    """
    barrier = threading.Barrier(WRITERS)

    def write(writer: int) -> None:
        rng = random.Random(writer)
        barrier.wait(PATIENCE)
        for turn in range(EACH):
            for lane in rng.sample(range(CLAIM_LOOPS), CLAIM_LOOPS):
                with database.session() as session:
                    for commits in (False, True):
                        number = 100 * writer + turn
                        payload = {"lane": lane, "number": number}
                        parent = f"{lane} {number}"
                        ob.enqueue(session, "crm.upsert", payload, parent=parent, ordering_key=f"lane {lane}")
                        flush_all(session)
                        session.add(Order(customer=str(lane), amount=number))
                        session.flush()
                        session.commit() if commits else session.rollback()

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(WRITERS)))


def test_after_kills_every_lane_has_come_in_commit_order(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    rng = random.Random(7)
    write_factory(tmp_path, FACTORY)
    total = CLAIM_LOOPS * WRITERS * EACH

    def delivered() -> int:
        return states(postgresql)["delivered"]

    with ExitStack() as stack:

        def start() -> Daemon:
            return stack.enter_context(daemon(tmp_path, postgresql.url))

        workers = [start(), start()]
        with ThreadPoolExecutor(1) as pool:
            enqueuing = pool.submit(enqueue_all, postgresql, ob)
            for kill in range(4):
                reached = (kill + 1) * total // 6
                wait_for(lambda reached=reached: delivered() >= reached, f"{reached} to be delivered", 90, workers)
                victim = rng.randrange(2)
                workers[victim].kill()
                workers[victim] = start()
            enqueuing.result(90)
        wait_for(lambda: delivered() == total, "every entry to be delivered", 90, workers)

    came = lanes_of(tmp_path / "ledger.txt")
    assert came == orders_of(postgresql)
    assert postgresql.queue == []


def lanes_of(ledger: Path) -> dict[str, list[str]]:
    """What came to the far side, lane by lane. After a kill an entry may come again, but before any other of its lane."""
    came: dict[str, list[str]] = defaultdict(list)
    for line in ledger.read_text().splitlines():
        lane, number = line.split()
        if came[lane][-1:] != [number]:
            came[lane].append(number)
    return came


def orders_of(database: Database) -> dict[str, list[str]]:
    """What was committed, lane by lane."""
    lanes: dict[str, list[str]] = defaultdict(list)
    for order in database.orders:
        lanes[order.customer].append(str(order.amount))
    return lanes
