"""Connections and forks: a connection belongs to the process that opened it.

Two processes that use one connection read each other's answers, so a commit seems to have succeeded that never happened. Servers
such as gunicorn (`--preload`), uWSGI and Celery load the app and then fork.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import (
    AssertionPool,
    ConnectionPoolEntry,
    NullPool,
    Pool,
    QueuePool,
    SingletonThreadPool,
    StaticPool,
)

from outbox.errors import ConfigurationError
from outbox.sql.dialect import dialect_of

_OPENED_BY = "sqlalchemy-outbox process"
"""The key in a pooled connection's `info` for the id of the process that opened it."""

_IMPORTED_BY = os.getpid()
"""The process that opened the connections without a note: they are older than this module."""

_records: WeakSet[ConnectionPoolEntry] = WeakSet()
"""The records of the pooled connections that this process has opened, or that were seen."""

_engines: WeakSet[Engine] = WeakSet()
_left_behind: list[object] = []
"""Never used, and never closed: drivers would end the parent's sessions."""


def watch(engine: Engine) -> None:
    """From now on, a fork of this process gets a new pool for this engine."""
    if not _is_in_memory(engine):  # a fork has a copy of the whole database
        _engines.add(_base(engine))


def _base(engine: Engine) -> Engine:
    """The engine itself, whose options others are: they may be made for each request."""
    while (proxied := getattr(engine, "_proxied", None)) is not None:
        engine = proxied
    return engine


def require_own(connection: Connection) -> None:
    """Raise `ConfigurationError` for a connection that another process has opened."""
    watch(connection.engine)
    pooled: Any = connection.connection
    info: dict[Any, Any] = pooled.info
    opened_by = info.get(_OPENED_BY)
    if _is_in_memory(connection.engine):
        return
    if opened_by is None:
        opened_by = info[_OPENED_BY] = _IMPORTED_BY
        if (record := pooled._connection_record) is not None:  # not detached
            _records.add(record)
    if opened_by != os.getpid():
        _let_go(connection)
        raise _inherited(opened_by)


def _inherited(opened_by: int) -> ConfigurationError:
    return ConfigurationError(
        f"process {opened_by} opened this connection, and process {os.getpid()}, which was forked from it, must not use it:"
        " close sessions and connections before the fork, or open them after it (docs/process-models.md)"
    )


class _Inherited:
    """Replaces an open connection of the parent in a fork: nothing is sent, not even at the end of a session."""

    def __init__(self, opened_by: int) -> None:
        self._opened_by = opened_by

    def rollback(self) -> None:
        """The transaction is the parent's."""

    close = terminate = rollback

    def __getattr__(self, name: str) -> Any:
        raise _inherited(self._opened_by)


def _let_go(connection: Connection) -> None:
    """Let nothing more be sent over it, neither a rollback nor a farewell: the other process may be in a transaction there."""
    pooled: Any = connection.connection
    _left_behind.append(pooled)  # the pool would roll back what is collected
    pooled.dbapi_connection = None
    connection.invalidate()


@contextmanager
def closed_afterwards(connection: Connection) -> Iterator[Connection]:
    """Leave no connection in the pool at the end of the block: an app may fork after its start.

    A database in memory ends with its connection, so that one stays.
    """
    watch(connection.engine)
    try:
        yield connection
    finally:
        if not (_is_in_memory(connection.engine) or connection.invalidated or connection.closed):
            connection.detach()


def _is_in_memory(engine: Engine) -> bool:
    return dialect_of(engine).is_file and isinstance(engine.pool, SingletonThreadPool | StaticPool)


def _replace_inherited() -> None:
    """Sessions that were open at the fork end in the child too, and would roll the parent's transaction back."""
    record: Any
    for record in list(_records):
        opened_by = record.info.get(_OPENED_BY)
        if record.dbapi_connection is None or opened_by is None or opened_by == os.getpid():
            continue
        _left_behind.append(record.dbapi_connection)
        record.dbapi_connection = _Inherited(opened_by)
        in_use = record.fairy_ref and record.fairy_ref()
        if in_use:
            in_use.dbapi_connection = record.dbapi_connection


def _renew_pools() -> None:
    """The pools' locks may be held permanently, by threads that a fork does not have."""
    _replace_inherited()
    for engine in list(_engines):
        _left_behind.append(engine.pool)
        engine.dispose(close=False)


os.register_at_fork(after_in_child=_renew_pools)


# --- the listeners of all pools of this process
#
# They are of the pools' classes, because SQLAlchemy does not expect a new listener of a pool that other threads use.


@event.listens_for(Pool, "connect")
def _note_process(connection: object, record: ConnectionPoolEntry) -> None:
    record.info[_OPENED_BY] = os.getpid()


def _note_record(connection: object, record: ConnectionPoolEntry) -> None:
    _records.add(record)


def _replace_in_fork(connection: Any, record: Any, proxy: Any) -> None:
    """Have the pool open another connection. This is for uWSGI, which forks without Python's knowledge.

    Source: docs.sqlalchemy.org/en/20/core/pooling.html, "Using Connection Pools with Multiprocessing or os.fork()".
    """
    if record.info.setdefault(_OPENED_BY, _IMPORTED_BY) != os.getpid():
        _left_behind.append(connection)
        record.dbapi_connection = proxy.dbapi_connection = None
        raise DisconnectionError("another process has opened this connection")


for _pool in (QueuePool, NullPool, AssertionPool):  # the others keep a database in memory, of which a fork has a copy
    event.listen(_pool, "connect", _note_record)
    event.listen(_pool, "checkout", _replace_in_fork)
