"""ASGI apps of one handler, called without a server, and what they send."""

import asyncio
from collections.abc import Callable
from typing import Any

from sqlalchemy.ext.asyncio import async_sessionmaker
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from outbox.http.starlette import Idempotency, IdempotencyMiddleware
from support.http_requests import caller_of
from support.http_shop import Shop

HEADERS = {"Authorization": "ada-token", "Idempotency-Key": "retry-001"}
Handler = Callable[[Request], Any]


def idempotency_of(shop: Shop) -> Idempotency[Any]:
    return Idempotency(async_sessionmaker(shop.database.async_engine()), scope=caller_of, policy=shop.policy)


def app_of(handler: Handler, **middleware: Any) -> Starlette:
    routes = [Route("/orders", handler, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(IdempotencyMiddleware, **middleware)])


def scope_of(path: str = "/orders", **more: Any) -> dict[str, Any]:
    headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    return {**scope, "asgi": {"spec_version": "2.3"}, "root_path": "", **more}


class Wire:
    """The server's side of one exchange. sent: the messages that have left, in order."""

    def __init__(self, body: bytes = b"{}") -> None:
        self.sent: list[Any] = []
        self.hung_up = asyncio.Event()
        self._body = [body]

    async def receive(self) -> Any:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


def answer_of(app: Any, **scope: Any) -> list[Any]:
    wire: list[Any] = []

    async def exchange() -> None:
        made = Wire()
        await app(scope_of(**scope), made.receive, made.send)
        wire.extend(made.sent)

    asyncio.run(exchange())
    return wire


class LoginNeeded(Exception):
    pass


async def to_login(request: Request, error: Exception) -> Response:
    return RedirectResponse("/login", 303)
