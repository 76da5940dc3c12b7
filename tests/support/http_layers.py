"""The layers between a claim and the client: apps and middleware that hide errors, and what the client gets through them."""

import asyncio
import json
from collections.abc import Callable
from typing import Annotated, Any

import anyio
import httpx
from fastapi import Depends, FastAPI
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route, Router

from outbox.http import ClaimedRequest, fastapi
from outbox.http.starlette import Idempotency, IdempotencyMiddleware
from support.database import Order
from support.http_requests import caller_of
from support.http_shop import Shop

App = Any
HEADERS = {"Authorization": "ada-token", "Idempotency-Key": "retry-001"}
REFUSED = JSONResponse({"error": "an answer that hides the refusal"}, 500, {"X-Page": "error"})


# --- an app that claims


def place(shop: Shop) -> Route:
    """A route that claims its requests and places an order; {"reject": true} has the answer of an error kept."""
    idempotency = Idempotency(async_sessionmaker(shop.database.async_engine()), scope=caller_of, policy=shop.policy)

    async def handler(request: Request) -> Response:
        async with idempotency.claim(request) as claimed:
            shop.calls += 1
            claimed.session.add(Order(customer="ada", amount=2000))
            return JSONResponse({"call": shop.calls}, 201, {"Location": "/orders/1"})

    return Route("/orders", handler, methods=["POST"])


def fastapi_place(shop: Shop, **settings: Any) -> FastAPI:
    app = FastAPI(**settings)
    sessions = sessionmaker(shop.database.engine)
    dependency = fastapi.Idempotency(sessions, scope=caller_of, policy=shop.policy).claim

    @app.post("/orders")
    def handler(request: Annotated[ClaimedRequest[Session], Depends(dependency)]) -> Response:
        shop.calls += 1
        request.session.add(Order(customer="ada", amount=2000))
        return JSONResponse({"call": shop.calls}, 201, {"Location": "/orders/1"})

    return app


# --- what surrounds it, inside of ours


async def hide(request: Request, error: Exception) -> Response:
    return REFUSED


class Catching:
    """Pure ASGI: every exception is answered with 500."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:
            await REFUSED(scope, receive, send)


class CatchingByBase(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Response:
        try:
            answer: Response = await call_next(request)
        except Exception:
            return REFUSED
        return REFUSED if answer.status_code >= 500 else answer


class Grouping:
    """Runs the app in a task group, out of which an exception comes in a group of its own."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._app, scope, receive, send)


def around(app: App) -> Starlette:
    return Starlette(routes=[Mount("/v1", app)], middleware=[Middleware(IdempotencyMiddleware)])


def mounted(*middleware: Any, **settings: Any) -> Callable[[Shop], App]:
    """A Starlette app with the route, mounted in another one."""

    def make(shop: Shop) -> App:
        return around(Starlette(routes=[place(shop)], middleware=[Middleware(*it) for it in middleware], **settings))

    return make


def bare(layer: Callable[[App], App]) -> Callable[[Shop], App]:
    """A mounted router, inside of no app that would answer exceptions, under one layer."""
    return lambda shop: around(layer(Router([place(shop)])))


def in_fastapi(**settings: Any) -> Callable[[Shop], App]:
    def make(shop: Shop) -> App:
        app = FastAPI(**settings)
        app.add_middleware(IdempotencyMiddleware)
        app.mount("/v1", fastapi_place(shop, **settings))
        return app

    return make


def in_itself(**handlers: Any) -> Callable[[Shop], App]:
    """One FastAPI app for all, with middleware of its own inside of ours."""

    def make(shop: Shop) -> App:
        app = FastAPI()
        app.mount("/v1", fastapi_place(shop, exception_handlers={Exception: hide, 500: hide, HTTPException: hide_http}))

        @app.middleware("http")
        async def catch(request: Request, call_next: Any) -> Response:
            try:
                answer: Response = await call_next(request)
            except Exception:
                return JSONResponse({"error": "caught"}, 500)
            return answer

        app.add_middleware(IdempotencyMiddleware)
        app.add_exception_handler(Exception, hide)
        return app

    return make


async def hide_http(request: Request, error: Any) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code)


async def known_or_400(request: Request, error: Any) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code if error.status_code in (401, 404, 409) else 400)


async def in_an_envelope(request: Request, error: Any) -> Response:
    return JSONResponse({"code": error.status_code, "error": error.detail}, 200)


def caught_by_the_handler(shop: Shop) -> App:
    idempotency = Idempotency(async_sessionmaker(shop.database.async_engine()), scope=caller_of, policy=shop.policy)

    async def handler(request: Request) -> Response:
        try:
            async with idempotency.claim(request):
                shop.calls += 1
                return JSONResponse({"call": shop.calls}, 201, {"Location": "/orders/1"})
        except Exception as error:
            raise HTTPException(503, "try later") from error

    return around(Starlette(routes=[Route("/orders", handler, methods=["POST"])]))


LAYERS: dict[str, Callable[[Shop], App]] = {
    "a Starlette app in another": mounted(),
    "a mounted app in debug": mounted(debug=True),
    "a FastAPI app in another": in_fastapi(),
    "a FastAPI app in another, in debug": in_fastapi(debug=True),
    "handlers of every exception": mounted(exception_handlers={Exception: hide}),
    "handlers of 500": mounted(exception_handlers={500: hide}),
    "handlers of HTTPExceptions": mounted(exception_handlers={HTTPException: hide_http}),
    "handlers that know a few statuses": mounted(exception_handlers={HTTPException: known_or_400}),
    "envelopes": mounted(exception_handlers={HTTPException: in_an_envelope}),
    "envelopes in FastAPI": in_fastapi(exception_handlers={HTTPException: in_an_envelope}),
    "pure ASGI that catches": mounted((Catching,)),
    "a BaseHTTPMiddleware that catches": mounted((CatchingByBase,)),
    "compression": mounted((GZipMiddleware, 1)),
    "a task group": mounted((Grouping,)),
    "FastAPI with all of it": in_itself(),
    "a router": bare(lambda app: app),
    "a router under one that catches": bare(Catching),
    "a router under debug": bare(lambda app: ServerErrorMiddleware(app, debug=True)),
    "a router under a BaseHTTPMiddleware": bare(CatchingByBase),
    "a router in a task group": bare(Grouping),
    "a handler that makes a 503 of everything": caught_by_the_handler,
}


def answers_of(app: App, shop: Shop) -> list[tuple[int, dict[str, str], bytes]]:
    """The first answer, its replay and the refusals. An exception that comes out of the app fails the test."""
    requests: list[tuple[dict[str, str], bytes]] = [
        (HEADERS, b"{}"),
        (HEADERS, b"{}"),
        (HEADERS, b'{"amount": 9}'),
        ({"Authorization": "ada-token"}, b"{}"),
        (HEADERS | {"Idempotency-Key": '"'}, b"{}"),
        (HEADERS | {"Idempotency-Key": "large"}, b"x" * (1024 * 1024 + 1)),
    ]

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            found = [await client.post("/v1/orders", headers=headers, content=body) for headers, body in requests]
            with (
                shop.database.begin() as session,
                shop.ob.idempotent(session, "held", scope="ada", content=b"") as claim,
            ):
                found.append(await client.post("/v1/orders", headers=HEADERS | {"Idempotency-Key": "held"}))
                claim.respond(204)
            return found

    return [(answer.status_code, dict(answer.headers), answer.content) for answer in asyncio.run(ask())]


def name_of(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    """The status and the name of the problem, which is all that the answer is."""
    status, headers, body = answer
    assert headers.keys() - {"retry-after", "vary"} == {"content-type", "content-length"}
    assert headers["content-type"] == "application/problem+json"
    problem = json.loads(body)
    assert (problem["status"], int(headers["content-length"])) == (status, len(body))
    return status, problem["type"].removeprefix("tag:sqlalchemy-outbox,2026:")


def post(app: App, *, headers: dict[str, str] = HEADERS, path: str = "/v1/orders") -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            return await client.post(path, headers=headers, content=b"{}")

    return asyncio.run(ask())


def plain(answer: httpx.Response) -> tuple[int, dict[str, str], bytes]:
    return answer.status_code, dict(answer.headers), answer.content
