"""An entry's position among those of its ordering key: positions are in commit order.

A flush locks its ordering keys until its transaction ends, and then draws positions from a sequence. So a visible entry has every
earlier one of its ordering key visible beside it. Only transactions that enqueue take these locks; no dispatcher waits for one.

The locks are in PostgreSQL's lock table, which all of the server's databases share. So a transaction takes no more of them than
`BUDGET` says, whatever it enqueues: each flush also takes one lock of the whole queue, shared with others, and a flush with
more ordering keys than are left takes that lock for itself alone, in place of theirs. No other transaction then enqueues with
an ordering key before this one has ended.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import DBAPIError

from outbox.sql.connections import LockBudget
from outbox.sql.dialect import DEADLOCK, sqlstate
from outbox.sql.identifiers import quoted_table
from outbox.sql.schema import Tables

BUDGET = LockBudget(250)

DEADLOCK_NOTE = (
    "two transactions locked the same ordering keys in different orders: run the transaction again. To avoid this, enqueue the"
    " entries of several ordering keys before one flush: a flush always locks its keys in the same order"
)


def take_positions(connection: Connection, tables: Tables, ordering_keys: Sequence[str]) -> list[int]:
    """Ascending positions, one for each of the keys, once all of these are locked for this transaction. PostgreSQL only.

    A savepoint that is rolled back gives its locks back. Locked in the order of their numbers, so that flushes cannot wait for
    each other in a circle; transactions that flush twice can.
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


# Tables are distinguished by their oid: one may have two names, by a schema and by a search_path. No ordering key is empty.
# The counts are there for the locks: no position is drawn before the last of them is held, and no key's before the share.
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


def _sequence(connection: Connection, tables: Tables) -> str:
    name: str = connection.dialect.identifier_preparer.format_sequence(tables.position)
    return name


def next_position(tables: Tables, ordering_key: str) -> Any:
    """The position after all others of the ordering key, for the only writer of a SQLite database."""
    queue = tables.queue.alias()
    last = select(func.max(queue.c.position)).where(queue.c.ordering_key == ordering_key).scalar_subquery()
    return func.coalesce(last, 0) + 1
