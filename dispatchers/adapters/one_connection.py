"""One connection for all sends of an adapter. The first send opens it, and the next send after its end opens another one."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

from dispatchers.delivery import Deferred

CLOSE_SECONDS: Final = 5.0  # a client may wait for a server that hangs, and ignore its cancellation


class NotReady(Exception):
    """Nothing may be sent over this connection. outcome: of each send."""

    def __init__(self, reason: str, *, cooldown: bool = False) -> None:
        super().__init__(reason)
        self.outcome = Deferred(reason, cooldown=cooldown)


class Connection(Protocol):
    """An open connection to a service, or one that was open."""

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent over it."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether a send waits for an answer over it."""
        ...

    async def aclose(self) -> None:
        """Close it now. The sends that wait for an answer end without one."""
        ...


def no_connection(error: Exception) -> Deferred:
    """The outcome of a send for which no connection could be opened."""
    return Deferred(f"nothing was sent, no connection: {type(error).__name__}")


Opened = TypeVar("Opened", bound=Connection)


class OneConnection(Generic[Opened]):
    """The present connection to a service. All sends without a connection wait for one attempt to open it.

    open: opens a connection, or raises what the client raises.
    """

    def __init__(self, open: Callable[[], Awaitable[Opened]]) -> None:
        self._open = open
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[Opened] | None = None
        self._opened: list[Opened] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._present: Opened | None = None

    def present(self) -> Opened | None:
        """The connection, if there is one that can be used in this event loop."""
        connection = self._present
        if connection is None or self._loop is not asyncio.get_running_loop() or not connection.is_usable:
            return None
        return connection

    async def ready(self, latest: float) -> Opened:
        """The connection; opened if need be. Raises TimeoutError at `latest` (the event loop's clock), and what `open` raises."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # connections end with their event loop, and each `asyncio.run` creates a new one
            self._loop, self._opening, self._opened, self._closing, self._present = loop, None, [], set(), None
        connection = self.present()
        if connection is not None:
            return connection
        if self._opening is None:
            self._opening = loop.create_task(self._open_one())
            self._opening.add_done_callback(self._has_ended)
        async with asyncio.timeout_at(latest):
            return await asyncio.shield(self._opening)

    async def ready_or_refusal(self, latest: float, failures: tuple[type[Exception], ...]) -> Opened | Deferred:
        """The connection; or, if it is not ready, the outcome of each send. failures: of the client while it connects."""
        try:
            return self.present() or await self.ready(latest)
        except NotReady as problem:
            return problem.outcome
        except failures as error:
            return no_connection(error)

    async def aclose(self) -> None:
        """Close all connections of this event loop, within `CLOSE_SECONDS`. You may use the object again afterwards."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            return
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        opened, self._opened, self._present = self._opened, [], None
        for connection in opened:
            self._close(connection, loop)
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_SECONDS)

    async def _open_one(self) -> Opened:
        for connection in [each for each in self._opened if not (each.is_usable or each.is_awaited)]:
            self._opened.remove(connection)
            self._close(connection, asyncio.get_running_loop())
        connection = await self._open()
        self._opened.append(connection)
        self._present = connection
        return connection

    def _close(self, connection: Opened, loop: asyncio.AbstractEventLoop) -> None:
        closing = loop.create_task(connection.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _has_ended(self, opening: asyncio.Task[Opened]) -> None:
        if self._opening is opening:
            self._opening = None
        with suppress(BaseException):  # a send that waited has raised it
            opening.exception()
