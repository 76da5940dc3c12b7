"""What the tests of retention share: requests and entries of any age, and one maintenance over them."""

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

import sqlalchemy as sa

import outbox
from dispatchers.cli.connections import repeated_after_conflicts
from dispatchers.maintenance.jobs import Maintenance
from dispatchers.maintenance.retention import Retention
from dispatchers.settings import RETENTION
from dispatchers.time_limits import Window
from outbox.sql.clock import clock, earlier
from support.database import TABLES, Database

DAY = timedelta(days=1)
A_MOMENT = timedelta(minutes=1)
WINDOW = timedelta(days=1)
Result = TypeVar("Result")

INSTANTS = {
    TABLES.entry: ("due_at", "created_at"),
    TABLES.queue: ("lease_until", "leased_at", "first_leased_at", "in_doubt_since"),
    TABLES.settlement: ("settled_at",),
    TABLES.event: ("at",),
    TABLES.record: ("created_at", "answered_at", "lease_until", "replay_until", "keep_until"),
    TABLES.tombstone: ("forget_at",),
}


def maintenance(
    database: Database | sa.Engine, retention: timedelta = RETENTION, *windows: Window, **settings: Any
) -> Maintenance:
    engine = database.dispatchers_engine if isinstance(database, Database) else database

    async def run(work: Callable[[sa.Connection], Result]) -> Result:
        @repeated_after_conflicts
        def blocking() -> Result:
            with engine.begin() as connection:
                return work(connection)

        result: Result = await asyncio.to_thread(blocking)
        return result

    return Maintenance(run, TABLES, Retention.of(retention, windows or (WINDOW,)), **{"pause_ratio": 0, **settings})


def clean(
    database: Database | sa.Engine, retention: timedelta = RETENTION, *windows: Window, **settings: Any
) -> Counter[str]:
    """One run of an maintenance; what it deleted, steps that deleted nothing left out."""
    return +asyncio.run(maintenance(database, retention, *windows, **settings).run_once())


def elapse(database: Database, by: timedelta) -> None:
    """As if all that is in the outbox had happened `by` earlier."""
    for table, columns in INSTANTS.items():
        for column in columns:
            shift(database, table.c[column], by)


def shift(database: Database, column: sa.Column[Any], by: timedelta, *where: Any) -> None:
    database.execute(sa.update(column.table).where(*where).values({column.name: earlier(column, by)}))


def request(
    database: Database, ob: outbox.Outbox, key: str = "retry-001", *operations: str, **settings: Any
) -> list[UUID]:
    """Answer a request that asks for the operations; the ids of its entries. Raises what refuses it."""
    with database.begin() as session:
        with ob.idempotent(session, key, scope="acct_1", content={"amount": 1}, **settings) as claim:
            ids = [ob.enqueue(session, operation, {"amount": 1}).id for operation in operations]
            claim.respond(201)
        return ids


def settle_all(database: Database, state: str = "delivered", *ids: UUID) -> None:
    """End entries, by default all, now."""
    queue = TABLES.queue
    chosen = [row.id for row in database.queue if not ids or row.id in ids]
    if not chosen:
        return
    with database.dispatchers_engine.begin() as connection:
        connection.execute(sa.delete(queue).where(queue.c.id.in_(chosen)))
        now = connection.execute(sa.select(clock())).scalar_one()
        ended = {"state": state, "deliveries": 1, "attempts": 1, "key_epoch": 0, "settled_at": now}
        connection.execute(sa.insert(TABLES.settlement), [{"id": id, **ended} for id in chosen])
        noted = {"at": now, "kind": "attempt", "reason": "slow"}
        connection.execute(sa.insert(TABLES.event), [{"entry_id": id, **noted} for id in chosen])


def kept(database: Database) -> dict[str, int]:
    """How many rows of each kind there are, kinds without any left out."""
    tables = ("record", "tombstone", "entry", "queue", "settlement", "event")
    counts = {name: len(database.rows(getattr(TABLES, name))) for name in tables}
    return {name: count for name, count in counts.items() if count}
