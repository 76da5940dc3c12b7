"""What the tests of the sending side share: entries to send, rows to look at and to age, services that misbehave."""

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import sqlalchemy as sa

import outbox
from dispatchers import FOREVER, Adapter, Delivered, Delivery, Dispatcher, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.flow_control.quota import Quota
from dispatchers.flow_control.state import as_record, on_record
from dispatchers.process.dispatcher import Simulation
from dispatchers.store.claim_request import ClaimRequest
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Exchange
from dispatchers.stored_outcome import read_outcome
from dispatchers.time_limits import Window
from dispatchers.transitions import ClaimedEntry, Ending, Transition
from outbox.sql.dialect import earlier
from outbox.times import EPOCH, NEVER
from support.database import IMPORT_PATH, TABLES, Database
from support.python_processes import STDOUT, PythonProcess

LEASE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
NO_LEASE: dict[str, Any] = {"lease_token": None, "lease_until": None, "leased_at": None}
CLEAN: dict[str, Any] = {"reason": None, "result": None}


# --- entries


def put(
    database: Database, ob: outbox.Outbox, operation: str = "crm.upsert", *, count: int = 1, **settings: Any
) -> list[UUID]:
    """Enqueue and commit entries of one operation, in one transaction; the parents are numbered on."""
    first = len(database.entries)
    with database.begin() as session:
        given = {"payload": {"amount": 2000}, **settings}
        return [
            ob.enqueue(session, operation, **{"parent": f"order:{first + number}", **given}).id
            for number in range(count)
        ]


def put_one(database: Database, ob: outbox.Outbox, operation: str = "crm.upsert", **settings: Any) -> UUID:
    return put(database, ob, operation, **settings)[0]


# --- rows


def queue_row(database: Database, id: UUID) -> Any:
    """The entry's row in the queue, or None once it has ended."""
    return next((row for row in database.queue if row.id == id), None)


def settlement_row(database: Database, id: UUID) -> Any:
    return next((row for row in database.rows(TABLES.settlement) if row.id == id), None)


def reasons(database: Database, id: UUID) -> list[str | None]:
    """Why the attempts at the entry did not deliver, from its events."""
    return [row.reason for row in database.rows(TABLES.event) if row.entry_id == id]


def states(database: Database) -> Counter[str]:
    """How many entries are in each state, ended ones included."""
    found: Counter[str] = Counter()
    for table in (TABLES.queue, TABLES.settlement):
        with database.observer.connect() as connection:
            for name, count in connection.execute(sa.select(table.c.state, sa.func.count()).group_by(table.c.state)):
                found[name] += count
    return found


def state(database: Database, id: UUID) -> str:
    row = queue_row(database, id) or settlement_row(database, id)
    found: str = row.state
    return found


def change(database: Database, id: UUID, **values: Any) -> None:
    """Write to the entry's queue row as only a test would."""
    database.execute(sa.update(TABLES.queue).where(TABLES.queue.c.id == id).values(values))


def age(database: Database, by: timedelta) -> None:
    """As if everything in the outbox had happened `by` earlier."""
    queue, entry = TABLES.queue, TABLES.entry
    _shift(database, queue, by, "lease_until", "leased_at", "first_leased_at", "in_doubt_since", "waiting_since")
    _shift(database, queue, by, "due_at", where=queue.c.due_at < NEVER)
    _shift(database, entry, by, "due_at", "created_at")
    for row in database.queue:
        lookup = read_outcome(row.outcome).lookup
        if lookup is not None:
            record = json.loads(row.outcome)
            record["lookup"]["fenced_at"] = (lookup.fenced_at - by).isoformat()
            change(database, row.id, outcome=json.dumps(record))
        known = read_outcome(row.outcome).known
        if known is not None and known.decided_at is not None:
            record = json.loads(row.outcome)
            record["known"]["decided_at"] = (known.decided_at - by).isoformat()
            change(database, row.id, outcome=json.dumps(record))
    destination = TABLES.destination
    _shift(database, destination, by, "cooldown_until", "breaker_until", "rate_at", "decided_at")
    for row in database.rows(destination):
        taken = as_record(each._replace(until=each.until - by) for each in on_record(row.permits_taken))
        database.execute(sa.update(destination).where(destination.c.name == row.name).values(permits_taken=taken))


def _shift(database: Database, table: sa.Table, by: timedelta, *columns: str, where: Any = None) -> None:
    statement = sa.update(table).values({name: earlier(table.c[name], by) for name in columns})
    with database.owner() as connection:
        if database.name == "postgresql":  # the server may still be at work for a process that was killed, row by row
            connection.exec_driver_sql(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE")
        connection.execute(statement if where is None else statement.where(where))


# --- claims


def quota(destination: str = "crm", permits: int = 64, due_from: Any = EPOCH) -> Quota:
    return Quota(destination, permits, due_from)


def claim_request(*quotas: Quota, **settings: Any) -> ClaimRequest:
    given: dict[str, Any] = {
        "quotas": quotas or [quota()],
        "entries_max": 500,
        "token": uuid4(),
        "lease": LEASE,
        "forms": {},
    }
    return ClaimRequest(**given | settings)


def claim(store: DatabaseStore, *quotas: Quota, **settings: Any) -> list[ClaimedEntry]:
    return asyncio.run(store.exchange([], claim_request(*quotas, **settings))).claimed


def claim_at_once(database: Database, ob: outbox.Outbox, permits: int) -> list[ClaimedEntry]:
    """All that four claimers get that begin together, each with connections of its own, and claim until nothing is left."""
    barrier = threading.Barrier(4)

    def claimer(_: int) -> list[ClaimedEntry]:
        store = DatabaseStore(database.new_engine(), ob.configuration)
        barrier.wait(60)
        taken: list[ClaimedEntry] = []
        while batch := claim(store, quota(permits=permits)):
            taken += batch
        return taken

    with ThreadPoolExecutor(4) as pool:
        return [entry for taken in pool.map(claimer, range(4)) for entry in taken]


def claim_one(store: DatabaseStore, **settings: Any) -> ClaimedEntry:
    (claimed,) = claim(store, **settings)
    return claimed


def settle(store: DatabaseStore, *settlements: tuple[ClaimedEntry, Transition]) -> set[UUID]:
    return asyncio.run(store.exchange(settlements, None)).settled


# --- dispatchers


def dispatcher(target: Any, ob: outbox.Outbox, **settings: Any) -> Dispatcher:
    """settings: those of a `Dispatcher`, and of its `Simulation`."""
    engine = target.dispatchers_engine if isinstance(target, Database) else target
    simulation = Simulation(**{name: settings.pop(name) for name in ("store", "clock", "rng") if name in settings})
    return Dispatcher(engine, outbox=ob, simulation=simulation, **{"poll": timedelta(milliseconds=20), **settings})


def run_once(target: Any, ob: outbox.Outbox, **settings: Any) -> int:
    """One call of a dispatcher made for it; returns how many it settled."""

    async def main() -> int:
        working = dispatcher(target, ob, **settings)
        try:
            return await working.run_once()
        finally:
            await working.close()

    return asyncio.run(main())


async def pumping(working: Dispatcher, until: Callable[[], bool], seconds: float = 60) -> None:
    """Let the dispatcher work until `until()` is true, then let it drain."""
    stopping = asyncio.Event()
    pump = asyncio.create_task(working.pump(stopping))
    try:
        await until_true(lambda: until() or pump.done(), seconds)
    finally:
        stopping.set()
        await pump


async def until_true(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        for pause in pauses():
            if condition():
                return
            await asyncio.sleep(pause)


async def claims_again(database: Database, ob: outbox.Outbox, *services: MemoryAdapter) -> None:
    """Entries for other services come and are sent, each service gets two: what else could be claimed meanwhile has been."""
    while any(len(service.deliveries) < 2 for service in services):
        before = sum(len(service.deliveries) for service in services)
        await asyncio.to_thread(put, database, ob, "mail.send")
        await until_true(lambda: sum(len(service.deliveries) for service in services) > before)  # noqa: B023


class Blocking(MemoryAdapter):
    """Answers no send until `released` is set; counts how many wait at once."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()
        self.waiting = 0
        self.most = 0

    async def send(self, delivery: Delivery) -> Outcome:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await self.released.wait()
        self.waiting -= 1
        return await super().send(delivery)


class WrappedStore:
    """A store with faults: `failing` names the next exchanges' fates, "before", "after" the commit or ""."""

    def __init__(self, store: DatabaseStore, *failing: str) -> None:
        self._store = store
        self.failing = list(failing)
        self.settlements: list[list[Ending]] = []

    async def exchange(self, settlements: Sequence[Ending], request: ClaimRequest | None) -> Exchange:
        fate = self.failing.pop(0) if self.failing else ""
        self.settlements.append(list(settlements))
        if fate == "before":
            raise sa.exc.OperationalError("exchange", {}, Exception("the server is unavailable"))
        exchange = await self._store.exchange(settlements, request)
        if fate == "after":
            raise sa.exc.OperationalError("exchange", {}, Exception("the acknowledgement was lost"))
        return exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


# --- processes


FACTORY_HEAD = """
import os
import time
from datetime import timedelta
from pathlib import Path

import outbox
from dispatchers import *
from dispatchers.adapters import HttpAdapter, MemoryAdapter, SmtpAdapter, StripeAdapter

ob = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}, current="k1"), env="test")
here = Path(__file__).parent
url = os.environ["SHOP_URL"]
"""


class Daemon:
    """`python -m dispatchers run factory:make` in a directory, its output in a file. start: PythonProcess or new_process."""

    def __init__(
        self,
        directory: Path,
        url: sa.URL,
        reference: str = "factory:make",
        *options: str,
        start: Callable[..., Any] = PythonProcess,
        **environment: str,
    ) -> None:
        self.log = directory / f"{uuid4().hex}.log"
        self.started = time.monotonic()
        shown = url.render_as_string(hide_password=False)
        with self.log.open("wb") as output:
            self.process = start(
                *("-m", "dispatchers", "run", reference, *options),
                cwd=directory,
                env=os.environ | {"SHOP_URL": shown, "PYTHONPATH": IMPORT_PATH} | environment,
                stdout=output,
                stderr=STDOUT,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float = 60) -> int:
        """Its exit status."""
        return self.process.wait(seconds)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def daemon(directory: Path, url: sa.URL, *arguments: str, **settings: Any) -> Iterator[Daemon]:
    """A dispatcher's process for a block; killed at its end if it still runs."""
    running = Daemon(directory, url, *arguments, **settings)
    try:
        yield running
    finally:
        running.kill()


def write_factory(directory: Path, body: str, name: str = "factory") -> None:
    (directory / f"{name}.py").write_text(FACTORY_HEAD + body)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60, workers: Sequence[Daemon] = ()) -> Any:
    """Poll for something that other processes do; fails after `seconds`, or when one of the workers has ended."""
    latest = time.monotonic() + seconds
    longer = pauses()
    while not (found := condition()):
        over = time.monotonic() > latest or any(worker.process.poll() is not None for worker in workers)
        if over and not (found := condition()):
            output = "\n".join(worker.output[-2000:] for worker in workers)
            raise AssertionError(f"timed out waiting for {what}\n{output}")
        time.sleep(next(longer))
    return found


def pauses() -> Iterator[float]:
    """The seconds between two looks at what is waited for, ever longer: each look takes CPU time from the others."""
    pause = 0.005
    while True:
        yield pause
        pause = min(pause * 1.2, 0.1)


# --- a remote service that outlives its callers, and callers that do not live long

MOMENTS = (
    "after the claim",
    "on the way to the service",
    "on the way back",
    "before settling",
    "after settling",
)


def die_at(moment: str, *, here: str) -> None:
    if moment == here:
        os.kill(os.getpid(), signal.SIGKILL)


class FileService(Adapter):
    """A service that keeps its books in a directory: one file for each key that it executed, and all that it was sent."""

    timeout = timedelta(seconds=5)
    window: Window = FOREVER

    def __init__(self, books: Path, moment: str = "") -> None:
        self._books = books
        self._moment = moment

    @property
    def sent(self) -> list[str]:
        """The key of every request that came in."""
        log = self._books / "sent.txt"
        return log.read_text().split() if log.exists() else []

    @property
    def effects(self) -> list[str]:
        """The keys that were executed."""
        return [path.stem for path in self._books.glob("*.effect")]

    async def send(self, delivery: Delivery) -> Outcome:
        die_at(self._moment, here="on the way to the service")
        with (self._books / "sent.txt").open("a") as log:
            log.write(f"{delivery.key}\n")
        effect = self._books / f"{delivery.key}.effect"
        replayed = effect.exists()
        effect.touch()
        die_at(self._moment, here="on the way back")
        return Delivered({"key": delivery.key}, replayed=replayed)


class GatedService(FileService):
    """Lets no send through before its gate, a file, exists; reports which sends wait."""

    timeout = timedelta(seconds=30)

    @property
    def waiting(self) -> int:
        return len(list(self._books.glob("*.waiting")))

    def open(self) -> None:
        (self._books / "gate").touch()

    async def send(self, delivery: Delivery) -> Outcome:
        (self._books / f"{delivery.key}.waiting").touch()
        while not (self._books / "gate").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return await super().send(delivery)


class ShortLivedClaims(DatabaseStore):
    """The real store of a process that dies at a given moment."""

    def __init__(self, target: Any, ob: outbox.Outbox, moment: str) -> None:
        super().__init__(target, ob.configuration)
        self._moment = moment

    async def exchange(self, settlements: Sequence[Ending], request: ClaimRequest | None) -> Exchange:
        if settlements:
            die_at(self._moment, here="before settling")
        exchange = await super().exchange(settlements, request)
        if exchange.claimed:
            die_at(self._moment, here="after the claim")
        if exchange.settled:
            die_at(self._moment, here="after settling")
        return exchange
