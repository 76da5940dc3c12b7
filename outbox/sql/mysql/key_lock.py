"""The locks of keys on MySQL, which cannot insert a row without waiting for another transaction that has inserted it.

The lock itself is the row of `outbox.sql.key_locks`. While a transaction searches for the row and inserts it, it holds a named
lock of the server, so that no other transaction inserts the row between the two. If several waited to insert it, they would
deadlock: when the server removes the deleted row, each gets a lock of the gap, in which none of them can insert it then.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from uuid import UUID

from sqlalchemy import Connection, Table, select
from sqlalchemy.exc import DBAPIError

from outbox.sql.errors.driver import LOCK_NOT_AVAILABLE, sqlstate
from outbox.sql.key_locks import inserting
from outbox.sql.schema.tables import Tables, key_lock
from outbox.sql.statements import deleting_by_index

LOCKED_AT_ONCE = 100
"""Named locks, each of which takes memory of the server."""

INSERTING_SECONDS = 1
"""How long `lock_ids` waits for a named lock. A process that has stopped may keep it, and then the row's lock must do alone."""


def insert_lock(connection: Connection, tables: Tables, id: UUID) -> bool:
    """Take the lock of the key if it is free, without waiting."""
    return _insert_locks(connection, tables, [id])


def lock_ids(connection: Connection, tables: Tables, ids: Sequence[UUID]) -> None:
    """Take the locks, in the order of the ids, waiting for each as the session waits for any row."""
    table = key_lock(tables)
    ordered = sorted(set(ids))
    for start in range(0, len(ordered), LOCKED_AT_ONCE):
        page = ordered[start : start + LOCKED_AT_ONCE]
        if _insert_locks(connection, tables, page):
            continue
        for id in page:
            while not _insert_locks(connection, tables, [id], INSERTING_SECONDS):
                connection.execute(select(table.c.id).where(table.c.id == id).with_for_update()).first()


def _insert_locks(connection: Connection, tables: Tables, ids: Sequence[UUID], seconds: int = 0) -> bool:
    """Take all these locks, if all are free. seconds: how long to wait for those that insert them now, before it tries without
    the named locks; 0: it does not try.
    """
    table = key_lock(tables)
    with _named_locks(connection, [_name(table, id) for id in ids], seconds) as are_held:
        if not are_held and not seconds:
            return False
        try:
            connection.execute(select(table.c.id).where(table.c.id.in_(ids)).with_for_update(nowait=True)).all()
        except DBAPIError as error:
            if sqlstate(error.orig) != LOCK_NOT_AVAILABLE:
                raise
            return False
        connection.execute(inserting(connection.dialect, table), [{"id": id} for id in ids])
    connection.execute(deleting_by_index(connection.dialect, table.c.id), {"ids": list(ids)})
    return True


@contextmanager
def _named_locks(connection: Connection, names: Sequence[str], seconds: int) -> Iterator[bool]:
    """Hold these locks for the block, if all are free; yields whether it does. The end of a session ends its locks too."""
    taking = " + ".join([f"GET_LOCK({name}, {seconds})" for name in names])
    try:
        yield connection.exec_driver_sql(f"SELECT {taking}").scalar() == len(names)
    finally:
        if not connection.invalidated:
            connection.exec_driver_sql("DO " + ", ".join([f"RELEASE_LOCK({name})" for name in names]))


def _name(table: Table, id: UUID) -> str:
    """As SQL. The server compares names of all its databases, up to 64 characters."""
    schema = "DATABASE()" if table.schema is None else f"_utf8mb4 X'{table.schema.encode().hex()}'"
    return f"SHA2(CONCAT({schema}, ' {sha256(f'{table.name} {id.hex}'.encode()).hexdigest()}'), 256)"
