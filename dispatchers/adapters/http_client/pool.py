"""The idle connections, which wait for their next request."""

import asyncio
from bisect import bisect_right
from contextlib import suppress
from operator import attrgetter
from typing import Final

from dispatchers.adapters.http_client.belonging import Belonging
from dispatchers.adapters.http_client.connection import Connection
from dispatchers.adapters.http_client.request_writer import Origin

KEEP_SECONDS: Final = 1.5
"""How long a connection waits for its next request. Servers wait longer (gunicorn 2 s, Node.js and uvicorn 5 s, by their
documentation): a request that the server's close meets on its way would be in doubt."""

REST_SECONDS: Final = 0.01
"""How long a connection rests after an answer. A faulty server or proxy that answers twice does so at once: the second answer
then meets a connection without a request, which is closed. It costs some connections, but no send waits for it."""

_idle_since: Final = attrgetter("idle_since")


class ConnectionPool:
    """Keeps connections by event loop. They end with their loop, and `asyncio.run(run_once())` creates a new loop each time.

    Several threads may use the pool, each with its own loop. belonging: is informed of services that send unasked.
    """

    def __init__(self, belonging: Belonging) -> None:
        self._belonging = belonging
        self._idle: dict[asyncio.AbstractEventLoop, dict[Origin, list[Connection]]] = {}

    def take(self, origin: Origin) -> Connection | None:
        """Take the connection used last of those that have rested; None if no connection may be reused."""
        loop = asyncio.get_running_loop()
        waiting = self._waiting(loop).get(origin)
        while waiting and self._belonging.may_reuse(origin, loop.time()):
            rested = bisect_right(waiting, loop.time() - REST_SECONDS, key=_idle_since)
            if not rested:
                return None
            connection = waiting.pop(rested - 1)  # the newest one, so that the others expire and are closed
            if connection.idle_since + KEEP_SECONDS > loop.time() and connection.is_quiet():
                connection.is_reused = True
                return connection
            if connection.has_spoken():
                self._belonging.distrust(origin, loop.time())
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
