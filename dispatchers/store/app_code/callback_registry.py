"""The recorded callbacks: those that any dispatcher of this database has registered, now or in an earlier deploy.

If an entry's callback is recorded, only a process with this callback settles the entry. Another process stores the outcome and
writes the callback's name into the entry's queue row. A process with the callback searches the queue for its names.

A name is the callback's kind and its operation or prefix: `on_settled bank.charge`. `on_completed` is not recorded here, because
the request's record names its completion.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from uuid import UUID

from sqlalchemy import Connection, Select, delete, func, select, update

from dispatchers.names import prefixes
from outbox.sql.clock import clock
from outbox.sql.dialect import Dialect, dialect_of
from outbox.sql.schema.identifiers import quoted_table
from outbox.sql.schema.tables import MAX_STATEMENTS, Tables
from outbox.sql.statements import read_by_index

MAX_TAKE_OVER = 1000  # in one transaction


def register(connection: Connection, tables: Tables, names: Collection[str]) -> frozenset[str]:
    """Record these callbacks of a dispatcher that starts; returns all recorded callbacks."""
    callback = tables.callback
    now = clock()
    # In one order, so that two dispatchers that start together do not deadlock.
    rows = [{"name": name, "recorded_at": now, "started_at": now} for name in sorted(names)]
    if rows:
        dialect_of(connection).upsert(connection, callback, rows, kept=["recorded_at"])
    _release_unserved_callbacks(connection, tables)
    return read(connection, tables)


def _release_unserved_callbacks(connection: Connection, tables: Tables) -> int:
    """Let any process settle the entries that wait for a callback without a record; returns how many.

    This also runs when a process starts, because an entry may begin to wait at the moment when its callback is forgotten.
    """
    read_by_index(connection)
    queue = tables.queue
    forgotten = queue.c.callback.is_not(None) & queue.c.callback.not_in(select(tables.callback.c.name))
    freed = update(queue).where(forgotten, queue.c.lease_token.is_(None)).values(callback=None, due_at=clock())
    return connection.execute(freed).rowcount


def read(connection: Connection, tables: Tables) -> frozenset[str]:
    return frozenset(connection.execute(select(tables.callback.c.name)).scalars())


def take_over(connection: Connection, tables: Tables, names: Collection[str]) -> int:
    """Make the entries due that wait for one of these callbacks; returns how many."""
    read_by_index(connection)
    queue = tables.queue
    ids = connection.execute(_waiting(dialect_of(connection), tables, tuple(sorted(names)))).scalars().all()
    if ids:
        connection.execute(update(queue).where(queue.c.id.in_(ids)).values(due_at=clock()))
    return len(ids)


@lru_cache(MAX_STATEMENTS)
def _waiting(dialect: Dialect, tables: Tables, names: tuple[str, ...]) -> Select[UUID]:
    queue = tables.queue
    waits = dialect.among(queue.c.callback, names), queue.c.lease_token.is_(None), queue.c.due_at > clock()
    return select(queue.c.id).where(*waits).limit(MAX_TAKE_OVER).with_for_update(skip_locked=True)


def forget(connection: Connection, tables: Tables, name: str) -> int | None:
    """Delete a callback's record. Returns how many entries waited for the callback and now settle without it; None if there
    was no record.
    """
    if not connection.execute(delete(tables.callback).where(tables.callback.c.name == name)).rowcount:
        return None
    return _release_unserved_callbacks(connection, tables)


def is_due(connection: Connection, tables: Tables, kind: str, operation: str) -> bool:
    """Whether a callback of this kind is recorded for the operation or for one of its prefixes."""
    on_record = read(connection, tables)
    return any(f"{kind} {name}" in on_record for name in prefixes(operation))


@dataclass(frozen=True, slots=True)
class CallbackOnRecord:
    """A recorded callback.

    recorded_at: when a dispatcher with it first started. started_at: when one last started. waiting: how many entries wait.
    """

    name: str
    recorded_at: datetime
    started_at: datetime
    waiting: int


def list_all(connection: Connection, tables: Tables) -> list[CallbackOnRecord]:
    """All recorded callbacks by name."""
    queue, callback = tables.queue, tables.callback
    waiting = select(func.count()).where(queue.c.callback == callback.c.name).scalar_subquery()
    listed = select(callback.c.name, callback.c.recorded_at, callback.c.started_at, waiting).order_by(callback.c.name)
    return [CallbackOnRecord(*row) for row in connection.execute(listed)]


# --- for the settlements, which check whether the recorded callbacks are still those that this process has read


def summary(names: Collection[str]) -> str:
    """All names as one text."""
    return ",".join(sorted(names))


def summary_sql(tables: Tables) -> str:
    """The SQL expression for `summary` of the recorded names, in PostgreSQL."""
    listed = "string_agg(c.name, ',' ORDER BY c.name COLLATE \"C\")"
    return f"COALESCE((SELECT {listed} FROM {quoted_table(tables.callback)} AS c), '')"
