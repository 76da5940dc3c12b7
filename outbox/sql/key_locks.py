"""Locks of keys that end with the transaction.

PostgreSQL has advisory locks, and SQLite one writer, which has all locks. Named locks of MariaDB and MySQL belong to the
session and outlive its transaction, and the portable mode uses no advisory locks. So there a lock is a row that its holder has
inserted and deleted, and has not committed yet: until then another transaction cannot insert it, and afterwards nothing is left
of it.
"""

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import lru_cache
from hashlib import sha256
from time import monotonic
from typing import TypeAlias
from uuid import UUID

from sqlalchemy import BigInteger, Connection, Dialect, Table, TextClause, bindparam, text
from sqlalchemy.exc import DBAPIError

from outbox.sql.dialect import Lock, dialect_of
from outbox.sql.errors.driver import LOCK_NOT_AVAILABLE, is_timeout, sqlstate
from outbox.sql.schema.column_types import ID
from outbox.sql.schema.tables import MAX_STATEMENTS, Tables, key_lock
from outbox.sql.statements import deleting_by_index

MAX_LOCK_TIMEOUT = 2**31 - 1  # milliseconds: PostgreSQL, pg_settings
PAUSE_SECONDS = 0.02
"""The pause between two attempts. The server's own wait is in whole seconds, and a deadlock ends the transaction."""

DELETED_AT_ONCE = 1000
"""MariaDB plans no use of the index for more than 32,000 values (optimizer_max_sel_arg_weight), and then refuses the DELETE."""


def try_lock(connection: Connection, tables: Tables, id: UUID) -> Lock:
    """Take the transaction-level lock of `id` if it is free."""
    return dialect_of(connection).lock_key(connection, tables, id)


def wait_for_lock(connection: Connection, tables: Tables, id: UUID, budget: timedelta) -> bool:
    """`try_lock` that waits: at most for `budget`, for a shorter statement_timeout, or until PostgreSQL detects a deadlock. In
    each case the caller can continue its transaction, with its own lock_timeout.
    """
    return dialect_of(connection).wait_for_key(connection, tables, id, budget)


def milliseconds_of(budget: timedelta) -> int:
    return min(max(1, int(budget.total_seconds() * 1000)), MAX_LOCK_TIMEOUT)


# --- PostgreSQL


def try_advisory(connection: Connection, id: UUID) -> Lock:
    return Lock._make(connection.execute(_TRY_LOCK, {"lock": lock_number(id)}).one())


def wait_for_advisory(connection: Connection, id: UUID, budget: timedelta) -> bool:
    def lock() -> bool:
        connection.execute(_LOCK, {"key": lock_number(id)})
        return True

    return impatiently(connection, lock, milliseconds_of(budget))


# At REPEATABLE READ and SERIALIZABLE a transaction may not see what the last holder of a lock has committed.
_TRY_LOCK = text(
    "SELECT pg_try_advisory_xact_lock(:lock), current_setting('transaction_isolation') IN ('repeatable read', 'serializable')"
).bindparams(bindparam("lock", type_=BigInteger))
_LOCK = text("SELECT pg_advisory_xact_lock(:key)")


def lock_number(id: UUID) -> int:
    """PostgreSQL's number for the lock of `id`."""
    return int.from_bytes(id.bytes[:8], "big", signed=True)


def impatiently(connection: Connection, work: Callable[[], bool], milliseconds: int = 1) -> bool:
    """The result of `work`, which waits at most so long for each lock; False, with nothing written, if one is not free."""
    before = connection.execute(text("SELECT current_setting('lock_timeout')")).scalar_one()
    savepoint = connection.begin_nested()  # without a savepoint, a timeout would end the caller's transaction
    try:
        connection.execute(_SET_LOCK_TIMEOUT, {"value": f"{milliseconds}ms"})
        done = work()
        connection.execute(_SET_LOCK_TIMEOUT, {"value": before})
    except DBAPIError as error:
        savepoint.rollback()
        if not is_timeout(error):
            raise
        return False
    savepoint.commit()
    return done


_SET_LOCK_TIMEOUT = text("SELECT set_config('lock_timeout', :value, true)")


# --- in the portable mode


def lock_by_row(connection: Connection, tables: Tables, id: UUID, milliseconds: int) -> bool:
    """Insert and delete the lock's row, waiting at most so long for another transaction that has done so."""
    table = key_lock(tables)

    def lock() -> bool:
        connection.execute(table.insert(), {"id": id})
        connection.execute(table.delete().where(table.c.id == id))
        return True

    return impatiently(connection, lock, milliseconds)


# --- MariaDB and MySQL


def lock_ids(connection: Connection, tables: Tables, ids: Sequence[UUID]) -> None:
    """Take the locks, in the order of the ids, waiting for each as the session waits for any row."""
    table = key_lock(tables)
    rows = [{"id": id} for id in sorted(set(ids))]
    if rows:
        connection.execute(inserting(connection.dialect, table), rows)
    for start in range(0, len(rows), DELETED_AT_ONCE):
        page = [row["id"] for row in rows[start : start + DELETED_AT_ONCE]]
        connection.execute(deleting_by_index(connection.dialect, table.c.id), {"ids": page})


def certify(connection: Connection, tables: Tables, names: Collection[str], *, waits: bool = True) -> set[str]:
    """On a Galera cluster, let only one of the transactions commit that certify one of these names at the same time.

    A lock of a row excludes only transactions on its own node, and Galera compares only what was written: so write, and delete.
    waits: whether to wait for such a transaction on this node. Returns the names that are certified; elsewhere all of them.
    """
    if not names or not dialect_of(connection).is_galera(connection):
        return set(names)
    ids = {name: UUID(bytes=sha256(b"certified\0" + name.encode()).digest()[:16]) for name in names}
    if waits:
        lock_ids(connection, tables, [*ids.values()])
        return set(names)
    return {name for name, id in sorted(ids.items(), key=lambda each: each[1]) if insert_lock(connection, tables, id)}


TryToInsert: TypeAlias = Callable[[Connection, Tables, UUID], bool]


def insert_lock(connection: Connection, tables: Tables, id: UUID) -> bool:
    table = key_lock(tables)
    try:
        connection.execute(inserting(connection.dialect, table, _AT_ONCE), {"id": id})
    except DBAPIError as error:
        if sqlstate(error.orig) != LOCK_NOT_AVAILABLE:
            raise
        return False
    connection.execute(table.delete().where(table.c.id == id))
    return True


def insert_lock_within(
    connection: Connection, tables: Tables, id: UUID, budget: timedelta, try_to_insert: TryToInsert = insert_lock
) -> bool:
    """The server pauses between two attempts: an event loop under the connection is not blocked."""
    until = monotonic() + budget.total_seconds()
    while not try_to_insert(connection, tables, id):
        if monotonic() >= until:
            return False
        connection.execute(_PAUSE, {"seconds": PAUSE_SECONDS})
    return True


_PAUSE = text("SELECT SLEEP(:seconds)")


@lru_cache(MAX_STATEMENTS)
def inserting(dialect: Dialect, table: Table, before: str = "") -> TextClause:
    """ON DUPLICATE KEY UPDATE, though there is never a row: so each transaction that waits asks for the exclusive lock, and gets
    it in its turn. A plain INSERT asks for a shared one first: all get it, and then they deadlock.
    """
    name = dialect.identifier_preparer.format_table(table)
    insert = text(f"{before}INSERT INTO {name} (id) VALUES (:id) ON DUPLICATE KEY UPDATE id = id")
    return insert.bindparams(bindparam("id", type_=ID))


_AT_ONCE = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "
"""Sets the wait for a locked row to 0 s, for this statement only."""
