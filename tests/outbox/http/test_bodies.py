"""Bodies that something has read before the claim, that are parsed, or that are too large: never equal by accident."""

import asyncio
import io
import threading
from collections.abc import Callable
from typing import Any

import flask
import pytest
from django.test import Client
from sqlalchemy.orm import sessionmaker
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from support.bodies import CONTENT, HEADERS, LIMIT, django_shop_maker, statuses
from support.database import NOTHING, Database
from support.http_requests import caller_of
from support.http_shop import Shop

import outbox
import outbox.http.flask
from outbox import Fingerprint
from outbox.http.starlette import Idempotency, IdempotencyMiddleware


@pytest.fixture
def shop(postgresql: Database, ob: outbox.Outbox) -> Shop:
    return Shop(postgresql, ob)


# --- Flask


def flask_shop(shop: Shop, before: Callable[[], Any] = lambda: None, **more: Any) -> Any:
    """The client of an app that does `before()` ahead of every claim. Errors come out of it instead of a 500."""
    app = flask.Flask("shop")
    app.testing = True
    app.before_request(lambda: (before(), None)[1])
    idempotency = outbox.http.flask.Idempotency(
        sessionmaker(shop.database.engine), scope=lambda: "ada", policy=shop.policy, max_body_bytes=LIMIT, **more
    )

    @app.post("/orders")
    @idempotency.claim
    def place(request: outbox.http.ClaimedRequest[Any]) -> tuple[bytes, int]:
        return flask.request.get_data() or b"placed", 201

    return app.test_client()


CHUNKED = {"headers": HEADERS | {"Transfer-Encoding": "chunked"}}


def as_sent(how: str, stream: Any = None) -> dict[str, Any]:
    """A request with a Content-Length, or one that comes in chunks, as a WSGI server has it."""
    if how == "length":
        return {"headers": HEADERS}
    environ = {"CONTENT_LENGTH": "", "wsgi.input_terminated": True} | ({} if stream is None else {"wsgi.input": stream})
    return {**CHUNKED, "environ_overrides": environ}


READING: dict[str, Callable[[], Any]] = {
    "stream": lambda: flask.request.stream.read(),
    "a part of the stream": lambda: flask.request.stream.read(5),
    "data, not kept": lambda: flask.request.get_data(cache=False),
    "JSON, not kept": lambda: flask.request.get_json(cache=False, silent=True),
    "data": lambda: flask.request.get_data(),
    "JSON": lambda: flask.request.get_json(silent=True),
    "form": lambda: flask.request.form,
    "data, parsed as a form": lambda: flask.request.data,
    "nothing": lambda: None,
}
KEPT = {"data", "JSON", "nothing"}


@pytest.mark.parametrize("how", ["length", "chunks"])
@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("reading", READING)
def test_in_flask_what_read_the_body_before_makes_no_two_requests_one(
    shop: Shop, reading: str, kind: str, how: str
) -> None:
    client = flask_shop(shop, READING[reading])
    answers: list[Any] = []
    for body in (b'[1, "eur", "a"]', b'[9, "eur", "a"]'):
        try:
            answers.append(client.post("/orders", data=body, content_type=kind, **as_sent(how)).status_code)
        except outbox.ClaimError as error:
            answers.append(str(error).partition(",")[0])

    read = "the request's body was read before the claim"
    allowed = [[201, 422]] if reading in KEPT else [[201, 422], [read, read], [400, 400]]
    assert answers in allowed


LOOKING: dict[str, Callable[[], Any]] = {
    "form": lambda: flask.request.form,
    "values": lambda: flask.request.values.get("csrf_token"),
    "files": lambda: flask.request.files,
}


@pytest.mark.parametrize("own_limit", [None, 100], ids=["no limit of the app's own", "a limit of the app's own"])
@pytest.mark.parametrize("looking", LOOKING)
def test_in_flask_reading_form_fields_takes_nothing_of_another_body(
    shop: Shop, looking: str, own_limit: int | None
) -> None:
    """As what checks a CSRF token does, before the claim of a request whose JSON comes in chunks."""
    client = flask_shop(shop, LOOKING[looking])
    client.application.config["MAX_CONTENT_LENGTH"] = own_limit
    endless = Counted()

    bodies = [io.BytesIO(body) for body in (b"[1]", b"[1]", b"[2]", b"x" * (LIMIT + 1))]
    answers = [
        client.post("/orders", content_type="application/json", **as_sent("chunks", body))
        for body in (*bodies, Untold(b"[1]"), endless)
    ]

    assert [answer.status_code for answer in answers] == [201, 201, 422, 413, 201, 413]
    assert answers[0].data == b"[1]"
    assert endless.taken <= LIMIT + 1


class Untold:
    """A body as some servers have it, whose stream has no position."""

    def __init__(self, body: bytes) -> None:
        self.read = io.BytesIO(body).read


def test_in_flask_what_is_read_after_the_form_fields_is_missed(shop: Shop) -> None:
    def look_and_read() -> None:
        assert not flask.request.form
        flask.request.stream.read(2)

    client = flask_shop(shop, look_and_read)

    with pytest.raises(outbox.ClaimError, match="was read before the claim"):
        client.post("/orders", content_type="application/json", **as_sent("chunks", io.BytesIO(b"[1]")))


def test_in_flask_an_empty_body_is_a_body(shop: Shop) -> None:
    client = flask_shop(shop)

    assert [client.post("/orders", **as_sent("length")).status_code for _ in range(2)] == [201, 201]


@pytest.fixture
def django_shop(postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Client]:
    return django_shop_maker(postgresql, ob, monkeypatch)


# --- ASGI


class Consuming(BaseHTTPMiddleware):
    """Reads the body as a stream, which Starlette passes on to no later reader."""

    async def dispatch(self, request: Request, call_next: Any) -> Response:
        async for _ in request.stream():
            pass
        answer: Response = await call_next(request)
        return answer


class Keeping(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Response:
        await request.body()
        answer: Response = await call_next(request)
        return answer


def starlette_shop(shop: Shop, *layers: Any, limit: int = LIMIT, **more: Any) -> Starlette:
    idempotency = Idempotency(sessionmaker(shop.database.engine), scope=caller_of, policy=shop.policy, **more)

    async def handler(request: Request) -> Response:
        async with idempotency.claim(request):
            return JSONResponse({}, 201)

    middleware = [Middleware(layer, max_body_bytes=limit) if layer is OURS else Middleware(layer) for layer in layers]
    return Starlette(routes=[Route("/orders", handler, methods=["POST"])], middleware=middleware)


OURS = IdempotencyMiddleware


@pytest.mark.parametrize("how", ["length", "chunks"])
@pytest.mark.parametrize("layers", [[OURS, Consuming], [OURS, Keeping], [Keeping, OURS], [Keeping, OURS, Consuming]])
def test_in_starlette_a_body_that_can_still_be_read_is_recognised(shop: Shop, layers: list[Any], how: str) -> None:
    assert statuses(starlette_shop(shop, *layers), [b"1", b"1", b"2"], how) == [201, 201, 422]


def test_in_starlette_a_body_that_is_gone_is_refused(shop: Shop) -> None:
    app = starlette_shop(shop, Consuming, OURS)

    with pytest.raises(outbox.ClaimError) as refused:
        statuses(app, [b"1"], "length")
    assert str(refused.value) == (
        "the request's body was read before the claim, and 0 of its 1 bytes are left, so a retry could not be"
        " distinguished from another request: put IdempotencyMiddleware around the middleware that reads the body, or let that"
        " middleware call request.body(), or set Idempotency(content=...)"
    )
    assert statuses(app, [b"1", b"2"], "chunks") == [400, 400]
    assert shop.database.counts() == NOTHING


# --- JSON that is none


MALFORMED = [b"{", b'{"a": 1, "a": 2}', b"[NaN]", b"[" * 20_000, b'"\\ud800"', b"\xff"]


def test_a_body_that_is_no_json_is_a_400_in_every_framework(shop: Shop, django_shop: Callable[..., Client]) -> None:
    async def content(request: Request) -> Any:
        return await run_in_threadpool(Fingerprint.json, await request.body())

    in_flask = flask_shop(shop, content=lambda: Fingerprint.json(flask.request.get_data()))
    in_django = django_shop(content=lambda request: Fingerprint.json(request.body))
    for body in MALFORMED:
        answers = [
            in_flask.post("/orders", data=body, headers=HEADERS).status_code,
            in_django.post("/orders", body, "application/json", headers=HEADERS).status_code,
            *statuses(starlette_shop(shop, OURS, content=content), [body], "length"),
        ]
        assert answers == [400, 400, 400]
    refused = in_flask.post("/orders", data=MALFORMED[1], headers=HEADERS)
    assert refused.content_type == "application/problem+json"
    assert refused.json["type"] == "tag:sqlalchemy-outbox,2026:request-refused"


@pytest.mark.parametrize("is_async", [False, True])
def test_what_content_returns_is_fingerprinted_off_the_event_loop(shop: Shop, is_async: bool) -> None:
    threads: list[int] = []

    class Items(list[Any]):
        def __iter__(self) -> Any:
            threads.append(threading.get_ident())
            return super().__iter__()

    sessions: Any = shop.async_sessions() if is_async else shop.sessions()
    idempotency = Idempotency(sessions, scope=caller_of, policy=shop.policy, content=lambda request: Items([1]))

    async def handler(request: Request) -> Response:
        async with idempotency.claim(request):
            return JSONResponse({}, 201)

    app = Starlette(routes=[Route("/orders", handler, methods=["POST"])], middleware=[Middleware(OURS)])

    assert statuses(app, [b"1", b"2"], "length") == [201, 201]
    assert threads
    assert threading.get_ident() not in threads


# --- too large


class Counted:
    """A body without end. taken: how much of it was read."""

    def __init__(self) -> None:
        self.taken = 0

    def read(self, size: int = 10**9) -> bytes:
        self.taken += size
        return b"x" * size


@pytest.mark.parametrize("content", CONTENT)
def test_in_flask_no_more_is_read_than_is_allowed(shop: Shop, content: str) -> None:
    client, body = flask_shop(shop, **CONTENT[content]), Counted()

    sizes = [LIMIT, LIMIT + 1]
    received = [client.post("/orders", data=b"x" * size, **as_sent("length")).status_code for size in sizes]
    keys = iter(["second", "third"])
    for size in sizes:
        sent = as_sent("chunks", io.BytesIO(b"x" * size))
        sent["headers"] = sent["headers"] | {"Idempotency-Key": next(keys)}
        received.append(client.post("/orders", **sent).status_code)
    endless = client.post("/orders", **as_sent("chunks", body))

    assert received == [201, 413, 201, 413]
    assert (endless.status_code, endless.content_type) == (413, "application/problem+json")
    assert body.taken <= LIMIT + 1


def test_in_flask_a_limit_of_the_apps_own_cuts_off_no_body_unseen(shop: Shop) -> None:
    client = flask_shop(shop)
    client.application.config["MAX_CONTENT_LENGTH"] = 10

    answers = [client.post("/orders", **as_sent("chunks", io.BytesIO(b"x" * 10 + end))) for end in (b"1", b"2")]

    assert [answer.status_code for answer in answers] == [413, 413]
    assert "has more than 10 bytes" in answers[0].json["detail"]


@pytest.mark.parametrize("content", CONTENT)
@pytest.mark.parametrize("how", ["length", "chunks"])
def test_in_asgi_no_more_is_read_than_is_allowed(shop: Shop, content: str, how: str) -> None:
    app, taken = starlette_shop(shop, OURS, **CONTENT[content]), []
    headers = [(b"authorization", b"ada-token"), (b"idempotency-key", b"retry-001")]
    headers += [(b"content-length", b"200000000")] if how == "length" else []
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/orders",
        "query_string": b"",
        "root_path": "",
        "headers": headers,
    }
    sent: list[Any] = []

    async def receive() -> Any:
        taken.append(65536)
        return {"type": "http.request", "body": b"x" * 65536, "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))

    assert sent[0]["status"] == 413
    assert (b"content-type", b"application/problem+json") in sent[0]["headers"]
    assert sum(taken) <= LIMIT + 65536
