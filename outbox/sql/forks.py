"""Connections and forks: a connection belongs to the process that opened it.

Two processes that use one connection read each other's answers, so a commit seems to have succeeded that never happened. Servers
such as gunicorn (`--preload`), uWSGI and Celery load the app and then fork.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Dialect, Engine, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry, SingletonThreadPool, StaticPool

from outbox.errors import ConfigurationError

_OPENED_BY = "sqlalchemy-outbox process"
"""The key in a pooled connection's `info` for the id of the process that opened it."""

_watching: WeakKeyDictionary[Dialect, int] = WeakKeyDictionary()
"""Of each engine's dialect, which its options share: the process that began to watch it."""

_engines: WeakSet[Engine] = WeakSet()
_left_behind: list[object] = []
"""Never used, and never closed: drivers would end the parent's sessions."""


def watch(engine: Engine) -> None:
    """From now on, no fork of this process gets a connection of this engine that another process has opened."""
    if engine.dialect not in _watching:
        _watching[engine.dialect] = os.getpid()
        _engines.add(engine)
        event.listen(engine, "connect", _note_process)
        event.listen(engine, "checkout", _replacing_inherited(os.getpid()))


def require_own(connection: Connection) -> None:
    """Raise `ConfigurationError` for a connection that another process has opened, if the engine was watched before the fork."""
    watch(connection.engine)
    info: dict[Any, Any] = connection.connection.info
    opened_by = info.setdefault(_OPENED_BY, _watching[connection.dialect])
    if opened_by != os.getpid():
        _let_go(connection)
        raise ConfigurationError(
            f"process {opened_by} opened this connection, and process {os.getpid()}, which was forked from it, must not use it:"
            " close sessions and connections before the fork, or open them after it (docs/process-models.md)"
        )


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
    return engine.dialect.name == "sqlite" and isinstance(engine.pool, SingletonThreadPool | StaticPool)


def _note_process(connection: object, record: ConnectionPoolEntry) -> None:
    record.info[_OPENED_BY] = os.getpid()


def _renew_pools() -> None:
    """The pools' locks may be held permanently, by threads that a fork does not have."""
    for engine in list(_engines):
        if not _is_in_memory(engine):
            _left_behind.append(engine.pool)
            engine.dispose(close=False)


os.register_at_fork(after_in_child=_renew_pools)


def _replacing_inherited(watching: int) -> Callable[[Any, Any, Any], None]:
    """Have the pool open another connection. This is for uWSGI, which forks without Python's knowledge.

    watching: the process that has opened the connections without a note.
    Source: docs.sqlalchemy.org/en/20/core/pooling.html, "Using Connection Pools with Multiprocessing or os.fork()".
    """

    def replace(connection: Any, record: Any, proxy: Any) -> None:
        if record.info.setdefault(_OPENED_BY, watching) != os.getpid():
            _left_behind.append(connection)
            record.dbapi_connection = proxy.dbapi_connection = None
            raise DisconnectionError("another process has opened this connection")

    return replace
