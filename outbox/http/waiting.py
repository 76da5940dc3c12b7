"""Limits how many requests wait at the same time for the one in flight, so that other requests get connections."""

from collections.abc import Callable
from datetime import timedelta
from threading import Lock
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Pool

from outbox.sql.key_locks import wait_for_lock
from outbox.sql.schema.tables import Tables

MAX_WAITING = 2
"""The default. A server of four threads then still has one for other requests: three wait, or are waited for."""

_lock = Lock()
_waiting: WeakKeyDictionary[Pool, int] = WeakKeyDictionary()  # of this process, whichever route they are for


def limited_wait(max_waiting: int) -> Callable[[Connection, Tables, UUID, timedelta], bool]:
    """`wait_for_lock` for as many requests as may wait at the same time; for one more it returns False without waiting."""

    def wait(connection: Connection, tables: Tables, id: UUID, budget: timedelta) -> bool:
        pool = connection.engine.pool
        with _lock:
            count = _waiting.get(pool, 0)
            if count >= min(max_waiting, _size(pool) - 1):
                return False
            _waiting[pool] = count + 1
        try:
            return wait_for_lock(connection, tables, id, budget)
        finally:
            with _lock:
                _waiting[pool] -= 1

    return wait


def _size(pool: Any) -> float:
    """How many connections the pool keeps, without those that it opens beyond: a waiting request holds one of them."""
    size: Any = getattr(pool, "size", 0)  # a number, and no method, in a SingletonThreadPool
    if callable(size):
        size = size()
    return float(size or "inf")  # a pool of size 0 has no limit
