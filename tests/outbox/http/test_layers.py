"""The layers between a claim and the client: mounted apps, middleware that catches everything, handlers of errors.

Whatever it is, the client gets the replay or the refusal as an app without it gives it.
"""

import asyncio
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route, Router
from support.database import NOTHING, Database, Order
from support.http_layers import (
    HEADERS,
    LAYERS,
    App,
    Catching,
    CatchingByBase,
    answers_of,
    around,
    hide,
    hide_http,
    mounted,
    name_of,
    place,
    plain,
    post,
)
from support.http_requests import Caller, caller_of, serving_asgi
from support.http_shop import Shop

import outbox
from outbox.http.starlette import Idempotency, IdempotencyMiddleware


@pytest.fixture
def shop(postgresql: Database, ob: outbox.Outbox) -> Shop:
    return Shop(postgresql, ob)


@pytest.mark.parametrize("layers", LAYERS)
def test_a_replay_and_every_refusal_reach_the_client(shop: Shop, layers: str) -> None:
    first, replay, *refusals = answers_of(LAYERS[layers](shop), shop)

    assert (first[0], replay[0], shop.calls) == (201, 201, 1)
    assert replay[2] == first[2]
    assert replay[1]["idempotent-replayed"] == "true"
    assert (replay[1]["location"], replay[1]["content-type"]) == ("/orders/1", "application/json")
    assert "x-page" not in replay[1]
    names = ("request-mismatch", "key-missing", "key-malformed", "request-too-large", "key-in-flight")
    assert [name_of(refusal) for refusal in refusals] == list(zip((422, 400, 400, 413, 409), names, strict=True))
    assert refusals[-1][1]["retry-after"] == "1"


def test_over_a_real_server_a_mounted_app_replays_and_refuses(shop: Shop) -> None:
    with serving_asgi(LAYERS["FastAPI with all of it"](shop)) as url:
        caller = Caller(url)
        answers = [caller.post(path="/v1/orders"), caller.post(path="/v1/orders"), caller.post("x", path="/v1/orders")]
        answers.append(caller.post(path="/v1/orders", key=None))
        caller.close()

    assert [answer.status_code for answer in answers] == [201, 201, 422, 400]
    assert answers[0].content == answers[1].content


# --- what an app does on purpose


def test_an_answer_of_the_apps_own_to_a_refusal_is_sent_unless_it_is_a_5xx(shop: Shop) -> None:
    statuses = []
    for status, kind in ((202, outbox.KeyMissing), (418, outbox.RequestError), (500, outbox.KeyMissing)):

        async def own(request: Request, error: Exception, status: int = status) -> Response:
            return JSONResponse({}, status)

        app = mounted(exception_handlers={kind: own, HTTPException: hide_http, 400: hide_http, 489: hide_http})(shop)
        statuses.append(post(app, headers={"Authorization": "ada-token"}).status_code)

    assert statuses == [202, 418, 400]


def test_a_handler_may_answer_a_refusal_that_it_catches(shop: Shop) -> None:
    idempotency = Idempotency(async_sessionmaker(shop.database.async_engine()), scope=caller_of, policy=shop.policy)

    async def handler(request: Request) -> Response:
        try:
            async with idempotency.claim(request):
                raise AssertionError
        except outbox.KeyMissing:
            return JSONResponse({}, 202)

    app = around(Starlette(routes=[Route("/orders", handler, methods=["POST"])]))

    assert post(app, headers={"Authorization": "ada-token"}).status_code == 202


def test_a_handler_that_fails_at_a_refusal_hides_neither_error(shop: Shop) -> None:
    """The client gets the refusal; the server logs the exception."""
    idempotency = Idempotency(async_sessionmaker(shop.database.async_engine()), scope=caller_of, policy=shop.policy)

    async def handler(request: Request) -> Response:
        try:
            async with idempotency.claim(request):
                raise AssertionError
        except outbox.KeyMissing:
            raise LookupError("a mistake of the handler's") from None

    app = IdempotencyMiddleware(Router([Route("/orders", handler, methods=["POST"])]))
    sent: list[Any] = []

    async def exchange() -> None:
        scope = {"type": "http", "method": "POST", "path": "/orders", "query_string": b"", "root_path": ""}

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await app({**scope, "headers": [(b"authorization", b"ada-token")]}, receive, send)

    with pytest.raises(LookupError):
        asyncio.run(exchange())
    assert [message.get("status") for message in sent] == [400, None]


def test_an_error_of_the_app_that_is_no_refusal_stays_what_it_is(shop: Shop) -> None:
    async def fail(request: Request) -> Response:
        raise LookupError

    app = around(Starlette(routes=[Route("/orders", fail, methods=["POST"])], exception_handlers={LookupError: hide}))

    answer = post(app)

    assert (answer.status_code, answer.headers["x-page"]) == (500, "error")


def test_a_conflict_in_a_mounted_app_gets_a_retry_after(shop: Shop) -> None:
    idempotency = Idempotency(async_sessionmaker(shop.database.async_engine()), scope=caller_of, policy=shop.policy)

    async def handler(request: Request) -> Response:
        async with idempotency.claim(request) as claimed:
            claimed.session.add(Order(customer="ada", amount=2000))
            await claimed.session.flush()
            await claimed.session.execute(
                sa.text("DO $$ BEGIN RAISE EXCEPTION 'met another' USING ERRCODE = '40001'; END $$")
            )
            return JSONResponse({}, 201)

    app = around(
        Starlette(routes=[Route("/orders", handler, methods=["POST"])], middleware=[Middleware(CatchingByBase)])
    )

    assert name_of(plain(post(app))) == (503, "request-undone")
    assert shop.database.counts() == NOTHING


@pytest.mark.parametrize("caught", [None, Catching, CatchingByBase])
def test_a_conflict_at_the_commit_gets_through_a_catching_layer(shop: Shop, caught: Any) -> None:
    for statement in (
        "CREATE TABLE late (id int)",
        "CREATE FUNCTION meet() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'met another' USING ERRCODE = '40001'; END $$",
        "CREATE CONSTRAINT TRIGGER meet AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION meet()",
    ):
        shop.database.execute(sa.text(statement))
    idempotency = Idempotency(async_sessionmaker(shop.database.async_engine()), scope=caller_of, policy=shop.policy)

    async def handler(request: Request) -> Response:
        async with idempotency.claim(request) as claimed:
            await claimed.session.execute(sa.text("INSERT INTO late VALUES (1)"))
            return JSONResponse({}, 201)

    middleware = [Middleware(caught)] if caught else []
    app = around(Starlette(routes=[Route("/orders", handler, methods=["POST"])], middleware=middleware))

    assert name_of(plain(post(app))) == (503, "request-undone")


def test_what_watches_for_exceptions_sees_none_of_a_replay_or_refusal(shop: Shop) -> None:
    """As an error reporter would, inside of our middleware."""
    seen: list[str] = []

    class Watching:
        def __init__(self, app: App) -> None:
            self._app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def watch(message: Any) -> None:
                if message.get("status", 200) >= 500:
                    seen.append(str(message["status"]))
                await send(message)

            try:
                await self._app(scope, receive, watch)
            except Exception as error:
                seen.append(repr(error))
                raise

    answers_of(mounted((Watching,))(shop), shop)

    assert seen == []


# --- headers of this exchange


def test_a_replay_and_a_refusal_have_what_the_apps_middleware_adds(shop: Shop) -> None:
    """A browser gives its page no answer without the header of CORS, be the middleware for it inside or outside."""
    for make in (
        lambda cors: Starlette(
            routes=[Mount("/v1", Starlette(routes=[place(shop)], middleware=[cors]))],
            middleware=[Middleware(IdempotencyMiddleware)],
        ),
        lambda cors: Starlette(
            routes=[Mount("/v1", routes=[place(shop)])], middleware=[cors, Middleware(IdempotencyMiddleware)]
        ),
    ):
        app = make(Middleware(CORSMiddleware, allow_origins=["https://a.example", "https://b.example"]))
        for origin, key in (
            ("https://a.example", "retry-001"),
            ("https://b.example", "retry-001"),
            ("https://b.example", ""),
        ):
            answer = post(app, headers=HEADERS | {"Origin": origin, "Idempotency-Key": key})
            assert answer.headers["access-control-allow-origin"] == origin
            assert answer.headers["vary"] == "Origin"
    assert shop.calls == 1


def test_head_is_replayed_without_a_body(shop: Shop) -> None:
    idempotency = Idempotency(async_sessionmaker(shop.database.async_engine()), scope=caller_of, policy=shop.policy)

    async def handler(request: Request) -> Response:
        async with idempotency.claim(request):
            return PlainTextResponse("an order")

    with serving_asgi(around(Starlette(routes=[Route("/orders", handler)]))) as url:
        answers = [httpx.head(f"{url}/v1/orders", headers=HEADERS) for _ in range(2)]
        answers.append(httpx.head(f"{url}/v1/orders", headers={"Authorization": "ada-token"}))

    assert [(answer.status_code, answer.content) for answer in answers] == [(200, b""), (200, b""), (400, b"")]
    assert answers[0].headers["content-length"] == answers[1].headers["content-length"] == "8"
