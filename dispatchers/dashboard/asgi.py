"""What each dashboard is as an ASGI app: its routes, its protecting headers, and an end that closes its connections."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from dispatchers.dashboard import protection


class AsgiApp(ABC):
    """missing: answers where there is no route, or none for the method."""

    def __init__(
        self, routes: Sequence[BaseRoute], missing: Callable[[Request, Exception], Awaitable[Response]]
    ) -> None:
        self._app = Starlette(routes=routes, exception_handlers={404: missing, 405: missing})
        self._app.router.redirect_slashes = False  # it answers before the sign-in, with the Host header of the request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._app(scope, receive, protection.with_headers(send))

    async def _live(self, receive: Receive, send: Send) -> None:
        """A server's own start and end; a host app that mounts the dashboard passes neither on."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await run_in_threadpool(self.close)
        await send({"type": "lifespan.shutdown.complete"})

    @abstractmethod
    def close(self) -> None:
        """Close the connections to the database. A server's end does so; a host app may, at its own."""
