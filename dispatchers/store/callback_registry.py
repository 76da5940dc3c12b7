"""The callbacks on record: which ones some dispatcher of this database has registered, now or in an earlier deploy.

An entry whose callback is on record settles only in a process that has that callback. A process that does not have it stores the
outcome and names the callback in the entry's row of the queue; the processes that have it search there for their names.

A name is the callback's kind and what it was registered for: `on_settled bank.charge`. `on_completed` is not among them: what
answers a request is in the request's record.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from dispatchers.names import prefixes
from outbox.sql.dialect import clock, read_by_index
from outbox.sql.identifiers import quoted_table
from outbox.sql.schema import Tables

TAKE_OVER_MAX = 1000  # in one transaction


def register(connection: Connection, tables: Tables, names: Collection[str]) -> frozenset[str]:
    """Put these on record, as a dispatcher that has them starts; returns all that are on record."""
    callback = tables.callback
    on_conflict = {"index_elements": ["name"], "set_": {"started_at": clock()}}
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    for name in sorted(names):  # in one order for all that start at once
        started = dialect.insert(callback).values(name=name, recorded_at=clock(), started_at=clock())
        connection.execute(started.on_conflict_do_update(**on_conflict))
    _release_unserved_callbacks(connection, tables)
    return read(connection, tables)


def _release_unserved_callbacks(connection: Connection, tables: Tables) -> int:
    """Let any process settle what waits for a callback that is not on record; returns how many entries.

    Also when a process starts: an entry may have been handed over just when its callback was forgotten.
    """
    read_by_index(connection)
    queue = tables.queue
    forgotten = queue.c.callback.is_not(None) & queue.c.callback.not_in(select(tables.callback.c.name))
    freed = update(queue).where(forgotten, queue.c.lease_token.is_(None)).values(callback=None, due_at=clock())
    return connection.execute(freed).rowcount


def read(connection: Connection, tables: Tables) -> frozenset[str]:
    return frozenset(connection.execute(select(tables.callback.c.name)).scalars())


def take_over(connection: Connection, tables: Tables, names: Collection[str]) -> int:
    """Make entries due that wait for one of these callbacks, for those that have it; returns how many."""
    read_by_index(connection)
    queue = tables.queue
    waits = queue.c.callback.in_(sorted(names)), queue.c.lease_token.is_(None), queue.c.due_at > clock()
    waiting = select(queue.c.id).where(*waits).limit(TAKE_OVER_MAX).with_for_update(skip_locked=True)
    ids = connection.execute(waiting).scalars().all()
    if ids:
        connection.execute(update(queue).where(queue.c.id.in_(ids)).values(due_at=clock()))
    return len(ids)


def forget(connection: Connection, tables: Tables, name: str) -> int | None:
    """Take a callback off the record. Returns how many entries waited for it, which now settle without it; None if it was not
    on record.
    """
    if not connection.execute(delete(tables.callback).where(tables.callback.c.name == name)).rowcount:
        return None
    return _release_unserved_callbacks(connection, tables)


def is_due(connection: Connection, tables: Tables, kind: str, operation: str) -> bool:
    """Whether a callback of this kind is on record for the operation, or for the beginning of its name."""
    on_record = read(connection, tables)
    return any(f"{kind} {name}" in on_record for name in prefixes(operation))


@dataclass(frozen=True, slots=True)
class CallbackOnRecord:
    """recorded_at: when a dispatcher first had it. started_at: when the last one that has it started. waiting: entries."""

    name: str
    recorded_at: datetime
    started_at: datetime
    waiting: int


def list_all(connection: Connection, tables: Tables) -> list[CallbackOnRecord]:
    """By name, each with how many entries wait for a dispatcher that has it."""
    queue, callback = tables.queue, tables.callback
    waiting = select(func.count()).where(queue.c.callback == callback.c.name).scalar_subquery()
    listed = select(callback.c.name, callback.c.recorded_at, callback.c.started_at, waiting).order_by(callback.c.name)
    return [CallbackOnRecord(*row) for row in connection.execute(listed)]


# --- what a settlement asks: whether the record still is what this process has read


def summary(names: Collection[str]) -> str:
    """The whole record as one text."""
    return ",".join(sorted(names))


def summary_sql(tables: Tables) -> str:
    """The registered names as a PostgreSQL array."""
    listed = "string_agg(c.name, ',' ORDER BY c.name COLLATE \"C\")"
    return f"COALESCE((SELECT {listed} FROM {quoted_table(tables.callback)} AS c), '')"
