"""The idle connections, which wait for their next request."""

import asyncio
from contextlib import suppress
from typing import Final

from dispatchers.adapters.connection import Connection
from dispatchers.adapters.request_writer import Origin

KEEP_SECONDS: Final = 1.5
"""How long a connection waits for its next request. Servers wait longer (gunicorn 2 s, Node.js and uvicorn 5 s, by their
documentation): a request that the server's close meets on its way would be in doubt."""


class ConnectionPool:
    """Keeps connections by event loop. They end with their loop, and `asyncio.run(run_once())` creates a new loop each time.

    Several threads may use the pool, each with its own loop.
    """

    def __init__(self) -> None:
        self._idle: dict[asyncio.AbstractEventLoop, dict[Origin, list[Connection]]] = {}

    def take(self, origin: Origin) -> Connection | None:
        """Take an idle connection; None if there is none."""
        loop = asyncio.get_running_loop()
        waiting = self._waiting(loop).get(origin)
        while waiting:
            connection = waiting.pop()  # the newest one, so that the others expire and are closed
            if connection.idle_since + KEEP_SECONDS > loop.time() and connection.is_quiet():
                return connection
            connection.abort()
        return None

    def keep(self, connection: Connection, origin: Origin) -> None:
        """Keep the connection for the next request to its origin."""
        loop = connection.loop
        by_origin = self._waiting(loop)
        connection.idle_since = loop.time()
        if not by_origin:  # no origin has connections, so no timer runs yet
            loop.call_later(KEEP_SECONDS, _close_overdue, loop, by_origin)
        by_origin.setdefault(origin, []).append(connection)

    async def aclose(self) -> None:
        """Close the idle connections. The pool may be used again afterwards."""
        idle, self._idle = self._idle, {}
        for loop, by_origin in idle.items():
            for connection in (each for waiting in by_origin.values() for each in waiting):
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(connection.abort)
        await asyncio.sleep(0)

    def _waiting(self, loop: asyncio.AbstractEventLoop) -> dict[Origin, list[Connection]]:
        found = self._idle.get(loop)
        if found is None:
            self._idle = {each: waiting for each, waiting in self._idle.items() if not each.is_closed()}
            found = self._idle[loop] = {}
        return found


def _close_overdue(loop: asyncio.AbstractEventLoop, by_origin: dict[Origin, list[Connection]]) -> None:
    """Close connections that have waited too long, and set the next timer while there are others."""
    latest = loop.time() - KEEP_SECONDS
    for origin, waiting in list(by_origin.items()):
        for connection in waiting:
            if connection.idle_since <= latest:
                connection.abort()
        by_origin[origin] = [each for each in waiting if each.idle_since > latest]
        if not by_origin[origin]:
            del by_origin[origin]
    if by_origin:
        loop.call_later(KEEP_SECONDS, _close_overdue, loop, by_origin)
