"""Processes that are killed while they send groups: what came to the remote service came in commit order."""

import random
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from support.concurrency import TEST_TIMEOUT
from support.daemons import Daemon, daemon, wait_for, write_factory
from support.database import Database, Order
from support.entries import states

import outbox
from outbox.sessions.session import flush_all

FACTORY = """
import asyncio

class Ledger(Adapter):
    timeout = timedelta(seconds=0.5)
    window = FOREVER

    async def send(self, delivery):
        payload = delivery.payload
        with (here / "ledger.txt").open("a") as ledger:
            ledger.write(f"{payload['group']} {payload['number']}\\n")
        await asyncio.sleep(0.002)
        return Delivered()

def make():
    return Dispatcher(
        url, outbox=ob, adapters={"crm": Ledger()}, lease=timedelta(seconds=3), margin=timedelta(seconds=1),
        poll=timedelta(seconds=0.05),
    )
"""

GROUPS, WRITERS, EACH = 10, 5, 2  # 10 groups of 10 entries


def enqueue_all(database: Database, ob: outbox.Outbox) -> None:
    """Concurrent writers, each with one entry of each group at a time. Each is rolled back once before it is committed.

    The order's id is drawn while the group is locked: it shows the commit order, whatever the outbox thinks of it.
    """
    barrier = threading.Barrier(WRITERS)

    def write(writer: int) -> None:
        rng = random.Random(writer)
        barrier.wait(TEST_TIMEOUT)
        for turn in range(EACH):
            for group in rng.sample(range(GROUPS), GROUPS):
                with database.session() as session:
                    for commits in (False, True):
                        number = 100 * writer + turn
                        payload = {"group": group, "number": number}
                        parent = f"{group} {number}"
                        ob.enqueue(session, "crm.upsert", payload, parent=parent, ordering_key=f"group {group}")
                        flush_all(session)
                        session.add(Order(customer=str(group), amount=number))
                        session.flush()
                        session.commit() if commits else session.rollback()

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(WRITERS)))


def test_after_kills_every_group_has_come_in_commit_order(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    rng = random.Random(7)
    write_factory(tmp_path, FACTORY)
    total = GROUPS * WRITERS * EACH

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
                wait_for(lambda reached=reached: delivered() >= reached, f"{reached} to be delivered", 300, workers)
                victim = rng.randrange(2)
                workers[victim].kill()
                workers[victim] = start()
            enqueuing.result(300)
        wait_for(lambda: delivered() == total, "every entry to be delivered", 300, workers)

    came = groups_of(tmp_path / "ledger.txt")
    assert came == orders_of(postgresql)
    assert postgresql.queue == []


def groups_of(ledger: Path) -> dict[str, list[str]]:
    """What came to the service, by group. After a kill an entry may come again, but before any other of its group."""
    came: dict[str, list[str]] = defaultdict(list)
    for line in ledger.read_text().splitlines():
        group, number = line.split()
        if came[group][-1:] != [number]:
            came[group].append(number)
    return came


def orders_of(database: Database) -> dict[str, list[str]]:
    """What was committed, group by group."""
    groups: dict[str, list[str]] = defaultdict(list)
    for order in database.orders:
        groups[order.customer].append(str(order.amount))
    return groups
