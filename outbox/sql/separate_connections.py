"""A connection of our own beside an engine's pool, made as the pool makes its own; what a driver's connection can be asked."""

import socket
from collections.abc import Collection
from typing import Any

from sqlalchemy import URL, Dialect, Engine, Pool, create_engine, event


class SharedConnection(Exception):
    """The engine's `creator` hands out a connection that is in use already."""


def separate_engine(url: URL, pool: Pool, *, taken: Collection[int] = ()) -> Engine:
    """An engine on `pool`, which its caller has made by `recreate` of another engine's: same settings, same listeners.

    taken: the server processes of connections that are in use. A new connection to one of them is no connection of our own:
    it raises `SharedConnection` before anything is sent over it.
    """
    engine = create_engine(url, pool=pool, hide_parameters=True)
    _refuse_shared(pool, engine.dialect, taken)
    return engine


def separate_async_engine(url: URL, pool: Pool, *, taken: Collection[int] = ()) -> Any:
    """`separate_engine` for the pool of an AsyncEngine."""
    from sqlalchemy.ext.asyncio import create_async_engine  # an extra: installed where there is an AsyncEngine

    engine = create_async_engine(url, pool=pool, hide_parameters=True)
    _refuse_shared(pool, engine.dialect, taken)
    return engine


def _refuse_shared(pool: Pool, dialect: Dialect, taken: Collection[int]) -> None:
    def refuse(connection: Any, record: object) -> None:
        pid = backend_pid(getattr(connection, "driver_connection", connection))
        if taken and (pid is None or pid in taken):
            for name in ("do_close", "do_terminate", "do_rollback"):  # of our own dialect: it is not ours to close
                setattr(dialect, name, _leave_alone)
            raise SharedConnection("the engine's creator returned a connection that is already in use")

    event.listen(pool, "connect", refuse, insert=True)  # before listeners that send statements


def _leave_alone(connection: object) -> None:
    """Another owner uses the connection."""


def backend_pid(driver_connection: Any) -> int | None:
    """The server process as the connection learned it at its start; a pooler sends a number of its own."""
    try:
        get_server_pid = getattr(driver_connection, "get_server_pid", None)  # asyncpg's
        pid: int = driver_connection.info.backend_pid if get_server_pid is None else get_server_pid()
    except Exception:  # another driver, or a connection that is closed
        return None
    return pid


def break_off(connection: Any) -> bool:
    """End a driver's connection from outside, during any wait; the waiting caller gets the driver's error. Returns whether it
    did."""
    terminate = getattr(connection, "terminate", None)  # asyncpg's
    if terminate is not None:
        terminate()
        return True
    try:
        with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as same:
            same.shutdown(socket.SHUT_RDWR)
    except Exception:  # a driver without a socket, or one that is closed already
        return False
    return True
