"""Opens a connection outside an engine's pool, with the pool's settings; reads and closes connections of a driver."""

import socket
from collections.abc import Collection
from typing import Any

from sqlalchemy import URL, Dialect, Engine, Pool, create_engine, event


class SharedConnection(Exception):
    """The engine's `creator` has returned a connection that is in use."""


def separate_engine(url: URL, pool: Pool, *, taken: Collection[int] = ()) -> Engine:
    """An engine with `pool`, which the caller has made by `recreate` of another engine's pool, with its settings and listeners.

    taken: the server processes of connections that are in use. If a new connection leads to one of them, it is not separate:
    `SharedConnection` is raised before anything is sent over it.
    """
    engine = create_engine(url, pool=pool, hide_parameters=True)
    _refuse_shared(pool, engine.dialect, taken)
    return engine


def separate_async_engine(url: URL, pool: Pool, *, taken: Collection[int] = ()) -> Any:
    """`separate_engine` for the pool of an AsyncEngine."""
    from sqlalchemy.ext.asyncio import create_async_engine  # an extra, which every AsyncEngine needs

    engine = create_async_engine(url, pool=pool, hide_parameters=True)
    _refuse_shared(pool, engine.dialect, taken)
    return engine


def _refuse_shared(pool: Pool, dialect: Dialect, taken: Collection[int]) -> None:
    def refuse(connection: Any, record: object) -> None:
        pid = backend_pid(getattr(connection, "driver_connection", connection))
        if taken and (pid is None or pid in taken):
            for name in (
                "do_close",
                "do_terminate",
                "do_rollback",
            ):  # only of this dialect: another owner has the connection
                setattr(dialect, name, _leave_alone)
            raise SharedConnection("the engine's creator returned a connection that is already in use")

    event.listen(pool, "connect", refuse, insert=True)  # before listeners that send statements


def _leave_alone(connection: object) -> None:
    """Do nothing, because another owner uses the connection."""


def backend_pid(driver_connection: Any) -> int | None:
    """The process id that the server sent at the connection's start. A pooler sends a number of its own."""
    try:
        get_server_pid = getattr(driver_connection, "get_server_pid", None)  # asyncpg's
        pid: int = driver_connection.info.backend_pid if get_server_pid is None else get_server_pid()
    except Exception:  # another driver, or a closed connection
        return None
    return pid


def break_off(connection: Any) -> bool:
    """Close a driver's connection while another thread or task waits for it, which then gets the driver's error. Returns whether
    that was possible.
    """
    terminate = getattr(connection, "terminate", None)  # asyncpg's
    if terminate is not None:
        terminate()
        return True
    try:
        with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as same:
            same.shutdown(socket.SHUT_RDWR)
    except Exception:  # the driver has no socket, or it is closed already
        return False
    return True
