"""One shop for each framework, on a real server, for the tests of outbox.http: what holds for one holds for all.

The request's body says what the handler does: `{"do": "place"}` and the like, see `Shop.work`.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Annotated, Any

import django
import django.http
import flask
import httpx
import psycopg
from django.conf import settings
from django.core.handlers.wsgi import WSGIHandler
from django.db import connections, transaction
from django.urls import path
from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from werkzeug.serving import WSGIRequestHandler, make_server

import outbox
import outbox.http.django
import outbox.http.fastapi
import outbox.http.flask
import outbox.http.starlette
from support.asgi_server import serving_asgi
from support.database import Database
from support.http_shop import CALLERS, CHUNKS, HEADERS, Shop

# --- the same handler, as each framework would have it


def starlette_answer(shop: Shop, do: str, chosen: outbox.Response | None) -> Response:
    match do:
        case "abort" | "choose and abort" | "collide and abort" | "roll back and abort" | "close and abort":
            raise HTTPException(404, "no such thing")
        case "contradict":
            return JSONResponse({"order": "placed"}, 201)
        case "error":
            return JSONResponse({"error": "not kept"}, 400)
        case "large":
            return Response(b"x" * 300_000, 201)
        case "empty":
            return Response(status_code=204)
        case "empty, and yet null":
            return JSONResponse(None, 204)
        case "stream":
            return StreamingResponse(stream(), 201, media_type="text/csv")
        case "stream breaks":
            return StreamingResponse(breaking_stream(), 201)
    if chosen is not None:
        return outbox.http.starlette.as_response(chosen)
    return JSONResponse({"order": "placed", "call": shop.calls}, 201, HEADERS, background=BackgroundTask(shop.defer))


async def stream() -> Any:
    for chunk in CHUNKS:
        yield chunk


async def breaking_stream() -> Any:
    yield CHUNKS[0]
    raise RuntimeError("the stream broke")


def caller_of(request: Request) -> str:
    caller = CALLERS.get(request.headers.get("authorization", ""))
    if caller is None:
        raise HTTPException(401, "who are you?")
    return caller


def starlette_app(shop: Shop) -> Starlette:
    idempotency = outbox.http.starlette.Idempotency(shop.async_sessions(), scope=caller_of, policy=shop.policy)

    async def place(request: Request) -> Response:
        async with idempotency.claim(request) as claimed:
            do = (await request.json())["do"]
            chosen = await claimed.session.run_sync(shop.work, claimed.claim, do)
            await run_in_threadpool(shop.wait, do)
            return starlette_answer(shop, do, chosen)

    routes = [Route("/orders", place, methods=["POST"]), Route("/orders/{number}/refunds", place, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(outbox.http.starlette.IdempotencyMiddleware)])


def middleware_app(shop: Shop) -> Starlette:
    """The claim is made before the app, by the middleware of the routes."""
    idempotency = outbox.http.starlette.Idempotency(shop.sessions(), scope=caller_of, policy=shop.policy)
    middleware = [Middleware(outbox.http.starlette.IdempotencyMiddleware, claims=idempotency)]

    async def place(request: Request) -> Response:
        claimed = outbox.http.starlette.claimed_request(request)
        do = (await request.json())["do"]
        chosen = await run_in_threadpool(shop.work, claimed.session, claimed.claim, do)
        await run_in_threadpool(shop.wait, do)
        return starlette_answer(shop, do, chosen)

    paths = ("/orders", "/orders/{number}/refunds")
    return Starlette(routes=[Route(path, place, methods=["POST"], middleware=middleware) for path in paths])


def fastapi_app(shop: Shop) -> FastAPI:
    sessions = shop.async_sessions()
    app = FastAPI()
    app.add_middleware(outbox.http.fastapi.IdempotencyMiddleware)
    dependency = outbox.http.fastapi.Idempotency(sessions, scope=caller_of, policy=shop.policy).claim

    async def place(
        body: dict[str, Any],
        request: Annotated[outbox.http.ClaimedRequest[AsyncSession], Depends(dependency)],
    ) -> Response:
        chosen = await request.session.run_sync(shop.work, request.claim, body["do"])
        await run_in_threadpool(shop.wait, body["do"])
        return starlette_answer(shop, body["do"], chosen)

    app.post("/orders")(place)
    app.post("/orders/{number}/refunds")(place)
    return app


def fastapi_sync_app(shop: Shop) -> FastAPI:
    app = FastAPI()
    app.add_middleware(outbox.http.fastapi.IdempotencyMiddleware)
    dependency = outbox.http.fastapi.Idempotency(shop.sessions(), scope=caller_of, policy=shop.policy).claim

    def place(
        body: dict[str, Any],
        request: Annotated[outbox.http.ClaimedRequest[Session], Depends(dependency)],
    ) -> Response:
        chosen = shop.work(request.session, request.claim, body["do"])
        shop.wait(body["do"])
        return starlette_answer(shop, body["do"], chosen)

    app.post("/orders")(place)
    app.post("/orders/{number}/refunds")(place)
    return app


def flask_app(shop: Shop) -> flask.Flask:
    app = flask.Flask("shop")

    def caller() -> str:
        found = CALLERS.get(flask.request.headers.get("authorization", ""))
        return found if found is not None else flask.abort(401)

    idempotency = outbox.http.flask.Idempotency(shop.sessions(), scope=caller, policy=shop.policy)

    @app.post("/orders")
    @app.post("/orders/<number>/refunds")
    @idempotency.claim
    def place(request: outbox.http.ClaimedRequest[Any], number: str = "") -> flask.typing.ResponseReturnValue:
        do = flask.request.get_json()["do"]
        chosen = shop.work(request.session, request.claim, do)
        shop.wait(do)
        return flask_answer(shop, do, chosen)

    return app


def flask_answer(shop: Shop, do: str, chosen: outbox.Response | None) -> flask.typing.ResponseReturnValue:
    match do:
        case "abort" | "choose and abort" | "collide and abort" | "roll back and abort" | "close and abort":
            flask.abort(404)
        case "contradict":
            return {"order": "placed"}, 201
        case "error":
            return {"error": "not kept"}, 400
        case "large":
            return b"x" * 300_000, 201
        case "empty":
            return "", 204
        case "empty, and yet null":
            return flask.Response("null", 204, mimetype="application/json")
        case "stream":
            return flask.Response(iter(CHUNKS), 201, mimetype="text/csv")
        case "stream breaks":
            return flask.Response(breaking_iterator(), 201)
    if chosen is not None:
        return outbox.http.flask.as_response(chosen)
    response = flask.make_response({"order": "placed", "call": shop.calls}, 201, HEADERS)
    response.call_on_close(shop.defer)
    return response


def breaking_iterator() -> Iterator[bytes]:
    yield CHUNKS[0]
    raise RuntimeError("the stream broke")


def django_app(shop: Shop) -> WSGIHandler:
    idempotency = outbox.http.django.Idempotency(
        scope=lambda request: CALLERS[request.headers["authorization"]], policy=shop.policy
    )

    @idempotency.claim
    def place(
        request: django.http.HttpRequest, claimed: outbox.http.ClaimedRequest[Any], number: str = ""
    ) -> django.http.HttpResponse:
        do = json.loads(request.body)["do"]
        chosen = shop.work(claimed.session, claimed.claim, do)
        shop.wait(do)
        return django_answer(shop, do, chosen)

    def authenticate(request: django.http.HttpRequest, **path: str) -> django.http.HttpResponse:
        if request.headers.get("authorization", "") not in CALLERS:
            return django.http.HttpResponse(status=401)
        return place(request, **path)

    level = shop.engine_settings.get("isolation_level", "READ COMMITTED").replace(" ", "_")
    use_django(shop.database, level, [path("orders", authenticate), path("orders/<number>/refunds", authenticate)])
    return WSGIHandler()


def use_django(database: Database, level: str, routes: Sequence[Any]) -> None:
    """Set Django, of which a process has one, up for this database."""
    url = database.url
    server = {"USER": url.username, "PASSWORD": url.password, "HOST": url.host or url.query.get("host", "")}
    port = url.port or url.query.get("port", "")
    wanted = {"ENGINE": "django.db.backends.postgresql", "NAME": url.database, "PORT": port}
    wanted["OPTIONS"] = {"isolation_level": psycopg.IsolationLevel[level]}
    if not settings.configured:
        databases = {"default": wanted | server}
        settings.configure(DATABASES=databases, USE_TZ=True, ALLOWED_HOSTS=["*"], LOGGING_CONFIG=None)
        django.setup()
        logging.getLogger("django.request").addHandler(logging.NullHandler())
    connections["default"].close()
    connections.settings["default"].update(wanted | server)
    settings.ROOT_URLCONF = tuple(routes)


def django_answer(shop: Shop, do: str, chosen: outbox.Response | None) -> django.http.HttpResponseBase:
    match do:
        case "abort" | "choose and abort" | "collide and abort" | "roll back and abort" | "close and abort":
            raise django.http.Http404
        case "contradict":
            return django.http.JsonResponse({"order": "placed"}, status=201)
        case "error":
            return django.http.JsonResponse({"error": "not kept"}, status=400)
        case "large":
            return django.http.HttpResponse(b"x" * 300_000, status=201)
        case "empty":
            return django.http.HttpResponse(status=204)
        case "empty, and yet null":
            return django.http.JsonResponse(None, status=204, safe=False)
        case "stream":
            return django.http.StreamingHttpResponse(iter(CHUNKS), status=201, content_type="text/csv")
        case "stream breaks":
            return django.http.StreamingHttpResponse(breaking_iterator(), status=201)
    if chosen is not None:
        return outbox.http.django.as_response(chosen)
    transaction.on_commit(shop.defer)
    response = django.http.JsonResponse({"order": "placed", "call": shop.calls}, status=201)
    for name, value in HEADERS.items():
        response[name] = value
    return response


# --- served


ASGI_APPS: Mapping[str, Callable[[Shop], Any]] = {
    "starlette": starlette_app,
    "middleware": middleware_app,
    "fastapi": fastapi_app,
    "fastapi_sync": fastapi_sync_app,
}
WSGI_APPS: Mapping[str, Callable[[Shop], Any]] = {"flask": flask_app, "django": django_app}
FRAMEWORKS = (*ASGI_APPS, *WSGI_APPS)


@contextmanager
def served(framework: str, shop: Shop) -> Iterator[str]:
    """The shop's base URL, while it runs on a server of its own."""
    if framework in WSGI_APPS:
        with serving_wsgi(WSGI_APPS[framework](shop)) as url:
            yield url
    else:
        with serving_asgi(ASGI_APPS[framework](shop)) as url:
            yield url


@contextmanager
def serving_wsgi(app: Any) -> Iterator[str]:
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    server.daemon_threads = False  # type: ignore[attr-defined]  # so that closing it waits for what it still does
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Nothing: what a request led to is in its answer."""


class Caller:
    """Sends requests to a served shop. Each takes `do`, and what differs from a good request."""

    def __init__(self, url: str) -> None:
        # A connection for each request: a server closes one on which the app failed, and may do so when the next is sent.
        limits = httpx.Limits(max_keepalive_connections=0)
        # verify: to load the authorities of TLS takes longer than most tests.
        self._client = httpx.Client(base_url=url, timeout=60, limits=limits, verify=False)

    def post(
        self,
        do: str = "place",
        *,
        path: str = "/orders",
        key: str | None = "retry-001",
        token: str = "ada-token",
        lines: list[tuple[str, str]] | None = None,
        **more: Any,
    ) -> httpx.Response:
        headers = [("Authorization", token), *([("Idempotency-Key", key)] if key is not None else []), *(lines or [])]
        return self._client.post(path, headers=headers, json={"do": do, **more})

    def post_empty_chunks(self) -> httpx.Response:
        """A body in chunks, of which there are none."""
        headers = {"Authorization": "ada-token", "Idempotency-Key": "chunks"}
        return self._client.post("/orders", headers=headers, content=iter(()))

    def close(self) -> None:
        self._client.close()
