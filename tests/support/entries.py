"""What the tests of the sending side share: entries to send, rows to look at and to age, services that misbehave."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import sqlalchemy as sa

import outbox
from dispatchers import Delivery, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.flow_control.quota import Quota
from dispatchers.flow_control.state import as_record, on_record
from dispatchers.process.dispatcher_work import DispatcherWork, Simulation
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Exchange
from dispatchers.store.queue.claim_request import ClaimRequest, Forms
from dispatchers.stored_outcome import read_outcome
from dispatchers.transitions import ClaimedEntry, Ending, Transition
from outbox.sql.clock import earlier
from outbox.times import EPOCH, NEVER
from support.database import TABLES, Database

LEASE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
NO_LEASE: dict[str, Any] = {"lease_token": None, "lease_until": None, "leased_at": None}
CLEAN: dict[str, Any] = {"reason": None, "result": None}


# --- entries


def put(
    database: Database, ob: outbox.Outbox, operation: str = "crm.upsert", *, count: int = 1, **settings: Any
) -> list[UUID]:
    """Enqueue and commit entries of one operation, in one transaction; the parents are numbered on."""
    with database.observer.connect() as connection:
        first = connection.scalar(sa.select(sa.func.count()).select_from(TABLES.entry)) or 0
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
    # One table in each transaction: it waits for those that write to it, and they may wait for another
    with database.owner() as connection:
        _shift(connection, queue, by, "lease_until", "leased_at", "first_leased_at", "in_doubt_since", "waiting_since")
        _shift(connection, queue, by, "due_at", where=queue.c.due_at < NEVER)
    with database.owner() as connection:
        _shift(connection, entry, by, "due_at", "created_at")
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
    if rows := database.rows(destination):
        with database.owner() as connection:
            _shift(connection, destination, by, "cooldown_until", "breaker_until", "rate_at", "decided_at")
    for row in rows:
        taken = as_record(each._replace(until=each.until - by) for each in on_record(row.permits_taken))
        database.execute(sa.update(destination).where(destination.c.name == row.name).values(permits_taken=taken))


def _shift(connection: sa.Connection, table: sa.Table, by: timedelta, *columns: str, where: Any = None) -> None:
    statement = sa.update(table).values({name: earlier(table.c[name], by) for name in columns})
    # PostgreSQL may still be at work for a process that was killed, row by row
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE")
    connection.execute(statement if where is None else statement.where(where))


# --- claims


def quota(destination: str = "crm", permits: int = 64, due_from: Any = EPOCH) -> Quota:
    return Quota(destination, permits, due_from)


def claim_request(*quotas: Quota, **settings: Any) -> ClaimRequest:
    given: dict[str, Any] = {
        "quotas": quotas or [quota()],
        "max_entries": 500,
        "token": uuid4(),
        "lease": LEASE,
        "forms": Forms(),
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
    """Returns the ids of the entries that were settled."""
    return {id for id, _ in asyncio.run(store.exchange(settlements, None)).settled}


# --- dispatchers


def dispatcher(target: Any, ob: outbox.Outbox, **settings: Any) -> DispatcherWork:
    """The work of a dispatcher. settings: those of a `Dispatcher`, and of the work's `Simulation`."""
    engine = target.dispatchers_engine if isinstance(target, Database) else target
    simulation = Simulation(**{name: settings.pop(name) for name in ("store", "clock", "rng") if name in settings})
    return DispatcherWork(engine, outbox=ob, simulation=simulation, **{"poll": timedelta(milliseconds=20), **settings})


def run_once(target: Any, ob: outbox.Outbox, **settings: Any) -> int:
    """One call of a dispatcher made for it; returns how many it settled."""

    async def main() -> int:
        working = dispatcher(target, ob, **settings)
        try:
            return await working.run_once()
        finally:
            await working.close()

    return asyncio.run(main())


async def pumping(working: DispatcherWork, until: Callable[[], bool], seconds: float = 60) -> None:
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


def pauses() -> Iterator[float]:
    """The seconds between two looks at what is waited for, ever longer: each look takes CPU time from the others."""
    pause = 0.005
    while True:
        yield pause
        pause = min(pause * 1.2, 0.1)


async def claims_again(database: Database, ob: outbox.Outbox, *services: MemoryAdapter) -> None:
    """Entries for other services come and are sent, each service gets two: what else could be claimed meanwhile has been."""
    while any(len(service.deliveries) < 2 for service in services):
        before = sum(len(service.deliveries) for service in services)
        await asyncio.to_thread(put, database, ob, "mail.send")
        await until_true(lambda: sum(len(service.deliveries) for service in services) > before)  # noqa: B023


class Blocking(MemoryAdapter):
    """Answers no send until `released` is set; counts how many wait at the same time."""

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
