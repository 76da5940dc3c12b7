"""Processes that are killed, also in a callback or in a group: what the service did equals what the outbox says."""

import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import UUID

import pytest
from support.concurrency import TEST_TIMEOUT
from support.daemons import MOMENTS, Daemon, FileService, daemon, wait_for, write_factory
from support.database import CHARGE, TABLES, Database, Order
from support.entries import HOUR, age, put_one, run_once, settlement_row, states
from support.python_processes import PIPE, PythonProcess
from support.verify import broken_rules

import outbox
from dispatchers.testing.stripe_ledger import StripeLedger
from outbox.keys import Tag, encode_native
from outbox.sessions.session import flush_all

TO_STRIPE = """
def make():
    stripe = StripeAdapter(
        api_key="sk_test_fake", base_url=os.environ["STRIPE_URL"], timeout=timedelta(seconds=0.5)
    )
    stripe.find = None  # this is about kills: what cannot be looked up must stay uncertain
    return Dispatcher(
        url,
        outbox=ob,
        adapters={"stripe": stripe},
        lease=timedelta(seconds=2),
        margin=timedelta(seconds=0.2),
        poll=timedelta(seconds=0.05),
        concurrency=32,
    )
"""

TO_FILES = """
from support.daemons import FileService, OverStore, ShortLivedClaims

def make():
    moment = os.environ["MOMENT"]
    return OverStore(ShortLivedClaims(url, ob, moment), outbox=ob, adapters={"crm": FileService(here, moment)})
"""

FAULTS = {"lose": 0.04, "lose-request": 0.01, "fail": 0.01, "fail-before": 0.01, "unavailable": 0.02, "slow": 0.01}
TIMES = {"slow-for": 0.8, "latency": 0.03}  # a slow request takes longer than the adapter's timeout


@contextmanager
def stripe_process(directory: Path) -> Iterator[tuple[str, StripeLedger]]:
    """The payment service as a process of its own; yields its URL and its books."""
    path = directory / "ledger.sqlite"
    settings = [f"--{name}={value}" for name, value in {**FAULTS, **TIMES, "seed": 1, "ledger": path}.items()]
    process = PythonProcess("-m", "dispatchers.testing.stripe_service", *settings, stdout=PIPE)
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        ledger = StripeLedger(path)
        yield f"http://127.0.0.1:{port}", ledger
        ledger.close()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def enqueue_charges(database: Database, ob: outbox.Outbox, count: int) -> None:
    """One in ten is declined; each has an amount of its own."""
    with database.begin() as session:
        for number in range(count):
            card = "pm_card_chargeDeclined" if number % 10 == 0 else "pm_card_visa"
            payload = {"amount": 1000 + number, "currency": "eur", "payment_method": card, "confirm": True}
            ob.enqueue(session, CHARGE, payload, parent=f"order:{number}")


def ended(database: Database) -> int:
    return sum(count for state, count in states(database).items() if state not in ("pending", "sending", "retry"))


def cancel_some(database: Database, ob: outbox.Outbox, ids: list[UUID]) -> set[UUID]:
    """Those for which the outbox said that they are cancelled."""
    with database.begin() as session:
        return {id for id in ids if ob.cancel(session, id)}


@pytest.mark.parametrize(("kind", "count", "kills"), [("postgresql", 120, 3), ("sqlite", 100, 2)])
def test_after_kills_the_services_books_equal_the_outbox_entry_by_entry(
    request: pytest.FixtureRequest, ob: outbox.Outbox, tmp_path: Path, kind: str, count: int, kills: int
) -> None:
    database: Database = request.getfixturevalue(kind)
    rng = random.Random(7)
    enqueue_charges(database, ob, count)
    ids = [entry.id for entry in database.entries]
    cancelled = cancel_some(database, ob, ids[:3])
    write_factory(tmp_path, TO_STRIPE)

    with ExitStack() as stack:
        url, ledger = stack.enter_context(stripe_process(tmp_path))

        def start() -> Daemon:
            return stack.enter_context(daemon(tmp_path, database.url, STRIPE_URL=url))

        workers = [start(), start()]
        killed = 0
        for kill in range(kills):
            reached = (kill + 1) * count // (kills + 2)
            wait_for(lambda reached=reached: ended(database) >= reached, f"{reached} to end", 300, workers)
            wait_for(lambda: states(database)["sending"], "a process to send", 300, workers)
            time.sleep(rng.uniform(0, 0.05))
            victims = [rng.randrange(2)] if kill else [0, 1]  # both, once: one of them is the sender
            for victim in victims:
                killed += workers[victim].process.poll() is None
                workers[victim].kill()
                workers[victim] = start()
            cancelled |= cancel_some(database, ob, rng.sample(ids, 3))
        wait_for(lambda: ended(database) == count, "every entry to end", 300, workers)
        for worker in workers:  # the one that was started last may not have its handlers yet
            wait_for(lambda worker=worker: "started: " in worker.output, "its start", workers=[worker])
            worker.terminate()
        assert [worker.wait() for worker in workers] == [0, 0]

        audit(database, ledger, cancelled)
        assert killed == kills + 1
        assert ledger.count("lost") > 0
        assert ledger.count("replayed") > 0
    assert interrupted(database) > 0


def audit(database: Database, ledger: StripeLedger, cancelled: set[UUID]) -> None:
    """Each entry against the charges under its key, and each charge against the entries."""
    charges = Counter(charge.key for charge in ledger.charges)
    sizes = {charge.key: charge.amount for charge in ledger.charges}
    found = states(database)
    state_of = {row.id: row.state for row in (*database.queue, *database.rows(TABLES.settlement))}
    allowed = {"delivered": {1}, "failed": {0}, "cancelled": {0}, "uncertain": {0, 1}}
    for entry in database.entries:
        key = encode_native(Tag(bytes(entry.tag)))
        happened = charges.pop(key, 0)
        assert happened in allowed[state_of[entry.id]], (state_of[entry.id], happened)
        if happened:
            assert sizes[key] == 1000 + int(entry.parent.partition(":")[2])
    assert not charges, "charges that no entry asked for"
    assert {id for id, state in state_of.items() if state == "cancelled"} == cancelled
    assert found["delivered"] > 0.75 * sum(found.values())  # a tenth is declined, and up to a tenth cancelled
    assert found["failed"] > 0.05 * sum(found.values())
    assert found["uncertain"] < 0.1 * sum(found.values())  # a fiftieth, by chance up to six of a hundred
    assert broken_rules(database) == {}


def interrupted(database: Database) -> int:
    """How many entries lost a sender: a delivery of which nothing was ever noted, neither a success nor a reason."""
    noted = Counter(event.entry_id for event in database.rows(TABLES.event))
    rows = [*database.queue, *database.rows(TABLES.settlement)]
    return sum(row.deliveries > noted[row.id] + (row.state == "delivered") for row in rows)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_moment_leaves_work_that_ends_under_the_same_key(
    database: Database, ob: outbox.Outbox, tmp_path: Path, moment: str
) -> None:
    id = put_one(database, ob, parent="invoice:42")
    write_factory(tmp_path, TO_FILES)
    service = FileService(tmp_path)
    settled = moment == "after settling"

    with daemon(tmp_path, database.url, MOMENT=moment) as process:
        assert process.wait() == -signal.SIGKILL, process.output
    assert states(database) == {"delivered" if settled else "sending": 1}
    age(database, HOUR)
    finished = run_once(database, ob, adapters={"crm": service})

    key = ob.child_key("invoice:42", "crm.upsert")
    assert finished == (0 if settled else 1)
    assert states(database) == {"delivered": 1}
    assert service.effects == [key]
    assert set(service.sent) == {key}
    assert len(service.sent) == (2 if moment in ("on the way back", "before settling") else 1)
    assert settlement_row(database, id).attempts == (1 if settled else 2)


# --- A chain of effects, its processes killed around a callback: each link happens once on the remote service.


CHAIN = """
from support.daemons import FileService, OverStore, die_at
from dispatchers.store.database import DatabaseStore
from support.database import CHARGE, Order

moment = os.environ["MOMENT"]
effects = Operations()

@effects.on_settled(CHARGE)
def charged(session, settlement):
    die_at(moment, here="as the callback begins")
    session.add(Order(customer=settlement.entry.parent.key, amount=2000))
    ob.enqueue(session, "mail.receipt", {"charge": settlement.result["key"]})
    session.flush()
    die_at(moment, here="before the callback's commit")

class DyingStore(DatabaseStore):
    async def settle_with(self, entry, end, callback):
        settled = await super().settle_with(entry, end, callback)
        die_at(moment, here="after the callback's commit")
        return settled

def make():
    service = FileService(here)
    return OverStore(
        DyingStore(url, ob.configuration), outbox=ob, include=[effects], poll=timedelta(seconds=0.02),
        adapters={"stripe": service, "mail": service},
    )
"""

HANGING = """
from support.daemons import FileService
from support.database import CHARGE

effects = Operations()

@effects.on_settled(CHARGE)
def charged(session, settlement):
    (here / "entered").touch()
    time.sleep(600)

def make():
    return Dispatcher(
        url, outbox=ob, include=[effects], adapters={"stripe": FileService(here)}, grace=timedelta(seconds=0.3),
        poll=timedelta(seconds=0.02),
    )
"""


@pytest.mark.parametrize(
    "moment", ["as the callback begins", "before the callback's commit", "after the callback's commit"]
)
def test_a_chain_killed_around_the_callback_has_each_effect_once(
    database: Database, ob: outbox.Outbox, tmp_path: Path, moment: str
) -> None:
    put_one(database, ob, CHARGE, parent="invoice:42")
    write_factory(tmp_path, CHAIN)
    service = FileService(tmp_path)
    committed = moment == "after the callback's commit"

    with daemon(tmp_path, database.url, MOMENT=moment) as process:
        assert process.wait() == -signal.SIGKILL, process.output
    assert len(database.orders) == committed
    # the other claim loop may have claimed the receipt already
    assert states(database) in (
        [{"delivered": 1, "pending": 1}, {"delivered": 1, "sending": 1}] if committed else [{"sending": 1}]
    )
    age(database, HOUR)
    with daemon(tmp_path, database.url, MOMENT="") as process:
        wait_for(lambda: states(database) == {"delivered": 2}, "the receipt", workers=[process])
        process.terminate()
        assert process.wait() == 0, process.output

    keys = [ob.child_key("invoice:42", operation) for operation in (CHARGE, "mail.receipt")]
    assert sorted(service.effects) == sorted(keys)
    assert [order.customer for order in database.orders] == ["invoice:42"]
    assert service.sent.count(keys[0]) == (1 if committed else 2)


def test_a_process_with_a_callback_that_never_ends_ends_all_the_same(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    put_one(postgresql, ob, CHARGE)
    write_factory(tmp_path, HANGING)

    with daemon(tmp_path, postgresql.url) as process:
        wait_for((tmp_path / "entered").exists, "the callback", workers=[process])
        process.terminate()
        assert process.wait() == 0, process.output

    assert states(postgresql) == {"sending": 1}
    assert run_once(postgresql, ob, adapters={"stripe": FileService(tmp_path)}) == 0, "its lease still holds"
    age(postgresql, HOUR)
    assert run_once(postgresql, ob, adapters={"stripe": FileService(tmp_path)}) == 1
    assert len(FileService(tmp_path).effects) == 1


# --- Processes that are killed while they send groups: what came to the remote service came in commit order.


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
