"""Gives entries their positions in their ordering groups, in commit order.

A flush locks its ordering keys until the end of its transaction, and then takes positions: on PostgreSQL from a sequence, on the
others after the last one in the queue. So a transaction that sees an entry also sees every earlier entry of its ordering key.
Only transactions that enqueue take these locks, and no dispatcher waits for one.

The locks are in PostgreSQL's lock table, which all databases of the server share, so `BUDGET` limits their number in one
transaction. Each flush also takes a shared lock of the whole queue. A flush with more ordering keys than the budget allows takes
this lock exclusively, instead of the locks of its keys. Then no other transaction can enqueue with an ordering key before this
one has ended.
"""

from collections.abc import Collection, Sequence
from hashlib import sha256
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import DBAPIError

from outbox.sql.connections.requirements import LockBudget
from outbox.sql.dialect import dialect_of
from outbox.sql.errors.driver import DEADLOCK, sqlstate
from outbox.sql.schema.identifiers import quoted_table
from outbox.sql.schema.tables import Tables

BUDGET = LockBudget(250)

DEADLOCK_NOTE = (
    "two transactions locked the same ordering keys in different orders: run the transaction again. To avoid this, enqueue the"
    " entries of several ordering keys before one flush: a flush always locks its keys in the same order"
)


def take_positions(connection: Connection, tables: Tables, ordering_keys: Sequence[str]) -> list[int]:
    """Lock the keys for this transaction, and return an ascending position for each. PostgreSQL only.

    The rollback of a savepoint releases its locks. The keys are locked in the order of their numbers, so that two flushes
    cannot deadlock. Two transactions that each flush twice can.
    """
    keys = {*ordering_keys}
    asked = {
        "queue": quoted_table(tables.queue),
        "sequence": _sequence(connection, tables),
        "count": len(ordering_keys),
    }
    if BUDGET.take(connection, len(keys)):
        statement, asked = _TAKE_POSITIONS, asked | {"keys": list(keys)}
    else:
        statement = _TAKE_POSITIONS_ALONE
    try:
        return list(connection.execute(statement, asked).scalars())
    except DBAPIError as error:
        if sqlstate(error.orig) == DEADLOCK:
            error.add_note(DEADLOCK_NOTE)
        raise


# The oid identifies the table, because a table may have two names: with a schema, and by the search_path. No ordering key is
# empty, so the empty text is the key of the whole queue. The counts force the order: first the shared lock, then the locks of all
# keys, then the positions.
_TAKE_POSITIONS = text("""
    SELECT nextval(CAST(:sequence AS regclass)) FROM generate_series(1, :count), (
        SELECT count(pg_advisory_xact_lock(lock.number)::text) FROM (
            SELECT DISTINCT hashtextextended(k.ordering_key, share.queue) AS number
            FROM unnest(CAST(:keys AS text[])) AS k(ordering_key), (
                SELECT q.oid AS queue, count(pg_advisory_xact_lock_shared(hashtextextended('', q.oid))::text) AS held
                FROM (SELECT CAST(CAST(CAST(:queue AS regclass) AS oid) AS bigint) AS oid) AS q GROUP BY q.oid
            ) AS share WHERE share.held = 1 ORDER BY number
        ) AS lock
    ) AS held
""")

_TAKE_POSITIONS_ALONE = text("""
    SELECT nextval(CAST(:sequence AS regclass)) FROM generate_series(1, :count), (
        SELECT count(pg_advisory_xact_lock(hashtextextended('', CAST(CAST(CAST(:queue AS regclass) AS oid) AS bigint)))::text)
    ) AS held
""")


def lock_ordering_keys(connection: Connection, tables: Tables, ordering_keys: Collection[str]) -> dict[str, int]:
    """Lock the keys for this transaction, on MariaDB or MySQL. Returns the last position of each key with entries in the queue.

    Positions do not come from a sequence: each node of a Galera cluster would take them from a block of its own.
    """
    ids = [UUID(bytes=sha256(b"ordering\0" + key.encode()).digest()[:16]) for key in ordering_keys]
    try:
        dialect_of(connection).lock_ids(connection, tables, ids)
    except DBAPIError as error:
        if sqlstate(error.orig) == DEADLOCK:
            error.add_note(DEADLOCK_NOTE)
        raise
    queue = tables.queue
    last = select(queue.c.ordering_key, func.max(queue.c.position).label("last"))
    of_keys = last.where(queue.c.ordering_key.in_(ordering_keys)).group_by(queue.c.ordering_key)
    return {row.ordering_key: row.last for row in connection.execute(of_keys)}


def _sequence(connection: Connection, tables: Tables) -> str:
    name: str = connection.dialect.identifier_preparer.format_sequence(tables.position)
    return name


def next_position(tables: Tables, ordering_key: str) -> Any:
    """The position after all others of the ordering key, on SQLite, where only one transaction writes."""
    queue = tables.queue.alias()
    last = select(func.max(queue.c.position)).where(queue.c.ordering_key == ordering_key).scalar_subquery()
    return func.coalesce(last, 0) + 1
