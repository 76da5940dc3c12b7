"""What only ASGI has: a client that hangs up, a task that is cancelled, a file sent by its path, a missing middleware."""

import asyncio
import selectors
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openapi_spec_validator
import pytest
import sqlalchemy as sa
from fastapi import APIRouter, Depends, FastAPI, Form
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from support.database import ALL, NOTHING, Database, Order
from support.http_requests import Caller, Shop, caller_of, fastapi_app, serving_asgi, shop_with_a_hot_row, starlette_app
from test_requests import until_a_session_waits

import outbox
from outbox.http import Policy
from outbox.http.fastapi import ClaimedRequest, claimed, document_refusals
from outbox.http.starlette import Idempotency, IdempotencyMiddleware, claimed_request

HEADERS = {"Authorization": "ada-token", "Idempotency-Key": "retry-001"}
Handler = Callable[[Request], Any]


@pytest.fixture
def shop(postgresql: Database, ob: outbox.Outbox) -> Shop:
    return Shop(postgresql, ob)


def idempotency_of(shop: Shop) -> Idempotency[Any]:
    return Idempotency(async_sessionmaker(shop.database.async_engine()), scope=caller_of, policy=shop.policy)


def app_of(handler: Handler, **middleware: Any) -> Starlette:
    routes = [Route("/orders", handler, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(IdempotencyMiddleware, **middleware)])


def claiming(shop: Shop, answer: Callable[[], Any]) -> Starlette:
    """An app that claims, places an order, and answers with what `answer()` makes."""
    idempotency = idempotency_of(shop)

    async def handler(request: Request) -> Response:
        async with idempotency.claim(request) as claimed:
            claimed.session.add(Order(customer="ada", amount=2000))
            await claimed.session.flush()
            made = answer()
            return await made if asyncio.iscoroutine(made) else made

    return app_of(handler)


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


# --- before the first byte


def test_no_byte_leaves_before_the_commit(shop: Shop) -> None:
    """The commit waits for a lock; until its release, the client has nothing to read."""
    shop.database.execute(sa.text("CREATE TABLE slow (id int)"))
    shop.database.execute(
        sa.text(
            "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END $$"
        )
    )
    shop.database.execute(
        sa.text(
            "CREATE CONSTRAINT TRIGGER held AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION hold()"
        )
    )
    body = b'{"do": "commit hangs"}'
    head = ["POST /orders HTTP/1.1", "Host: shop", f"Content-Length: {len(body)}", "Content-Type: application/json"]
    request = "\r\n".join([*head, *(f"{name}: {value}" for name, value in HEADERS.items()), "", ""]).encode() + body

    with shop.database.engine.connect() as holder, serving_asgi(starlette_app(shop)) as url:
        holder.execute(sa.text("SELECT pg_advisory_lock(42)"))
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(request)
            until_a_session_waits(shop.database)

            assert not is_readable(client)
            holder.execute(sa.text("SELECT pg_advisory_unlock(42)"))
            assert client.recv(65536).startswith(b"HTTP/1.1 201")
    assert shop.database.counts() == ALL


def is_readable(connection: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(timeout=0))


def test_nothing_is_passed_to_the_server_before_the_commit(shop: Shop) -> None:
    counts_at_send = []

    async def exchange() -> None:
        wire = Wire()

        async def send(message: Any) -> None:
            counts_at_send.append(shop.database.counts()["records"])

        async def chunks() -> Any:
            for chunk in (b"a", b"b", b"c"):
                yield chunk

        await claiming(shop, lambda: StreamingResponse(chunks(), 201))(scope_of(), wire.receive, send)

    asyncio.run(exchange())

    assert counts_at_send == [1, 1]


def test_a_background_task_does_not_run_when_the_commit_fails(shop: Shop) -> None:
    ran = []
    shop.database.execute(sa.text("CREATE TABLE fussy (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    idempotency = idempotency_of(shop)

    async def handler(request: Request) -> Response:
        async with idempotency.claim(request) as claimed:
            await claimed.session.execute(sa.text("INSERT INTO fussy VALUES (1), (1)"))
            return JSONResponse({}, 201, background=BackgroundTask(ran.append, "the task"))

    wire = Wire()

    async def exchange() -> None:
        await app_of(handler)(scope_of(), wire.receive, wire.send)

    with pytest.raises(sa.exc.IntegrityError):
        asyncio.run(exchange())

    assert wire.sent[0]["status"] == 500
    assert ran == []
    assert shop.database.counts() == NOTHING


class AnsweringErrors:
    """An app's own middleware, inside of ours: it answers every error by itself."""

    def __init__(self, app: Any, status: int) -> None:
        self._app = app
        self._status = status

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:
            await Response(b"later", self._status)(scope, receive, send)


@pytest.mark.parametrize("status", [201, 503])
def test_what_is_answered_in_place_of_a_failed_commit_is_not_mixed_with_it(shop: Shop, status: int) -> None:
    shop.database.execute(sa.text("CREATE TABLE fussy (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    idempotency = idempotency_of(shop)

    async def handler(request: Request) -> Response:
        async with idempotency.claim(request) as claimed:
            await claimed.session.execute(sa.text("INSERT INTO fussy VALUES (1), (1)"))
            return JSONResponse({"order": "placed"}, 201)

    app = IdempotencyMiddleware(
        AnsweringErrors(Starlette(routes=[Route("/orders", handler, methods=["POST"])]), status)
    )
    sent = answer_of(app)

    assert [message.get("status", message.get("body")) for message in sent] == [status, b"later"]
    assert shop.database.counts() == NOTHING


# --- clients that hang up


def test_a_cancelled_request_keeps_nothing_and_frees_the_key(shop: Shop) -> None:
    async def exchange() -> None:
        reached, wire = asyncio.Event(), Wire()

        async def hang() -> Response:
            reached.set()
            await asyncio.Event().wait()
            raise AssertionError

        task = asyncio.create_task(claiming(shop, hang)(scope_of(), wire.receive, wire.send))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert wire.sent == []
        assert await open_transactions(shop.database) == 0

    asyncio.run(exchange())
    assert shop.database.counts() == NOTHING
    assert answer_of(claiming(shop, lambda: JSONResponse({}, 201)))[0]["status"] == 201


def test_a_client_that_hangs_up_during_a_stream_leaves_nothing(shop: Shop) -> None:
    async def exchange() -> None:
        wire = Wire()

        async def endless() -> Any:
            yield b"first"
            wire.hung_up.set()
            await asyncio.Event().wait()

        await claiming(shop, lambda: StreamingResponse(endless(), 201))(scope_of(), wire.receive, wire.send)
        assert wire.sent == []
        assert await open_transactions(shop.database) == 0

    asyncio.run(exchange())
    assert shop.database.counts() == NOTHING


def test_a_client_that_hangs_up_within_its_body_claims_nothing(shop: Shop) -> None:
    async def exchange() -> None:
        wire = Wire()
        wire._body.clear()
        wire.hung_up.set()
        await claiming(shop, lambda: JSONResponse({}))(scope_of(), wire.receive, wire.send)

    with pytest.raises(Exception, match=r"^$") as gone:
        asyncio.run(exchange())

    assert type(gone.value).__name__ == "ClientDisconnect"
    assert shop.database.counts() == NOTHING


async def open_transactions(database: Database) -> int:
    statement = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND state LIKE 'idle in transaction%'"
    )
    async with database.async_engine().connect() as connection:
        return int(await connection.scalar(statement) or 0)


def answer_of(app: Any, **scope: Any) -> list[Any]:
    wire: list[Any] = []

    async def exchange() -> None:
        made = Wire()
        await app(scope_of(**scope), made.receive, made.send)
        wire.extend(made.sent)

    asyncio.run(exchange())
    return wire


# --- the app's own use of it


@pytest.mark.parametrize(("do", "status"), [("meets another", 418), ("meets another at its commit", 503)])
def test_an_apps_own_handler_of_refusals_answers_until_the_answer_begins(
    postgresql: Database, ob: outbox.Outbox, do: str, status: int
) -> None:
    """Starlette refuses to handle what the commit raises, which comes after the answer's first message."""
    shop = shop_with_a_hot_row(postgresql, ob)
    app = starlette_app(shop)
    app.add_exception_handler(outbox.RequestRefused, lambda request, error: JSONResponse({}, 418))

    with serving_asgi(app) as url:
        caller = Caller(url)
        statuses = [caller.post(do).status_code for _ in range(2)]
        caller.close()

    assert statuses == [status, 201]
    assert postgresql.counts() == ALL


def test_without_the_middleware_the_claim_says_what_to_add(shop: Shop) -> None:
    idempotency = idempotency_of(shop)

    async def handler(request: Request) -> Response:
        async with idempotency.claim(request):
            return JSONResponse({})

    with pytest.raises(outbox.ConfigurationError) as refused:
        answer_of(Starlette(routes=[Route("/orders", handler, methods=["POST"])]))

    assert str(refused.value) == (
        "the app has no IdempotencyMiddleware around this route, so its answers would be sent before the commit: call"
        " app.add_middleware(IdempotencyMiddleware)"
    )


def test_a_second_claim_of_one_request_is_an_error(shop: Shop) -> None:
    idempotency = idempotency_of(shop)

    async def handler(request: Request) -> Response:
        async with idempotency.claim(request), idempotency.claim(request):
            return JSONResponse({})

    with pytest.raises(outbox.ClaimError, match=r"^the request is already claimed: claim a request only once$"):
        answer_of(app_of(handler))
    assert shop.database.counts() == NOTHING


def test_a_claim_after_the_answer_has_begun_is_an_error(shop: Shop) -> None:
    idempotency = idempotency_of(shop)

    async def handler(request: Request) -> Response:
        async def late() -> Any:
            yield b"first"
            async with idempotency.claim(request):
                yield b"second"

        return StreamingResponse(late())

    with pytest.raises(
        outbox.ClaimError,
        match=r"^a part of the answer was sent before the claim: claim the request before the app sends anything$",
    ):
        answer_of(app_of(handler))


def test_a_refusal_after_the_answer_has_begun_is_no_second_answer() -> None:
    async def chunks() -> Any:
        yield b"first"
        raise outbox.KeyMissing("too late")

    async def handler(request: Request) -> Response:
        return StreamingResponse(chunks())

    with pytest.raises(outbox.KeyMissing, match="too late"):
        answer_of(app_of(handler))


def test_a_request_that_was_not_claimed_gets_an_error() -> None:
    async def handler(request: Request) -> Response:
        claimed_request(request)
        return JSONResponse({})

    with pytest.raises(outbox.ClaimError) as refused:
        answer_of(app_of(handler))

    assert (
        str(refused.value) == "the request '/orders' has not been claimed: use `async with idempotency.claim(request)`"
    )


def test_a_caller_without_a_name_is_an_error_and_not_a_scope_of_its_own(shop: Shop) -> None:
    idempotency = Idempotency(
        async_sessionmaker(shop.database.async_engine()), scope=lambda request: "", policy=shop.policy
    )

    async def handler(request: Request) -> Response:
        async with idempotency.claim(request):
            return JSONResponse({})

    with pytest.raises(outbox.InvalidValue, match="scope '': may be empty only for source 'app'"):
        answer_of(app_of(handler))


def test_an_app_says_itself_what_must_be_equal_in_a_retry(shop: Shop) -> None:
    async def order_of(request: Request) -> Any:
        return (await request.json())["order"]

    idempotency = Idempotency(
        sessionmaker(shop.database.engine), scope=caller_of, content=order_of, policy=Policy(outbox=shop.ob)
    )

    async def handler(request: Request) -> Response:
        async with idempotency.claim(request):
            return JSONResponse(await request.json(), 201)

    with serving_asgi(app_of(handler)) as url:
        caller = Caller(url)
        answers = [caller.post(order=order, sent_at=at) for order, at in [(1, 1), (1, 2), (2, 3)]]
        caller.close()

    assert [answer.status_code for answer in answers] == [201, 201, 422]


def test_what_is_not_claimed_passes_through_untouched(shop: Shop) -> None:
    async def chunks() -> Any:
        yield b"a"
        yield b"b"

    async def handler(request: Request) -> Response:
        return StreamingResponse(chunks())

    sent = answer_of(app_of(handler, body_bytes_max=0))

    assert [message.get("body") for message in sent] == [None, b"a", b"b", b""]


@pytest.mark.parametrize("methods", [["PUT"], ["put"]])
def test_the_middleware_claims_the_methods_that_are_set_and_no_others(shop: Shop, methods: list[str]) -> None:
    async def handler(request: Request) -> Response:
        return JSONResponse({"claimed": True})

    routes = [Route("/orders", handler, methods=["GET", "POST", "PUT"])]
    claims = idempotency_of(shop)
    app = Starlette(routes=routes, middleware=[Middleware(IdempotencyMiddleware, claims=claims, methods=methods)])

    statuses = [answer_of(app, method=method, headers=[])[0]["status"] for method in ("GET", "POST")]
    with pytest.raises(Exception, match="401"):
        answer_of(app, method="PUT", headers=[])

    assert statuses == [200, 200]


def test_one_method_is_no_collection_of_methods(shop: Shop) -> None:
    with pytest.raises(outbox.ConfigurationError) as refused:
        IdempotencyMiddleware(JSONResponse({}), idempotency_of(shop), methods="POST")

    assert str(refused.value) == "methods must be a collection of names, such as ('POST', 'PATCH'), not 'POST'"


def test_a_file_is_kept_even_where_the_server_could_send_it_by_its_path(shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "receipt.txt"
    file.write_text("receipt")

    app = claiming(shop, lambda: FileResponse(file))
    answers = [answer_of(app, extensions={"http.response.pathsend": {}}) for _ in range(2)]

    assert [b"".join(message.get("body", b"") for message in sent) for sent in answers] == [b"receipt"] * 2


class LoginNeeded(Exception):
    pass


async def to_login(request: Request, error: Exception) -> Response:
    return RedirectResponse("/login", 303)


def test_an_exception_is_undone_even_if_its_handler_answers_well(shop: Shop) -> None:
    def refuse() -> Response:
        raise LoginNeeded

    app = claiming(shop, refuse)
    app.add_exception_handler(LoginNeeded, to_login)

    assert answer_of(app)[0]["status"] == 303
    assert shop.database.counts() == NOTHING


# --- FastAPI


def test_an_exception_is_undone_even_if_its_handler_answers_in_fastapi(shop: Shop) -> None:
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware)
    app.add_exception_handler(LoginNeeded, to_login)
    dependency = claimed(sessionmaker(shop.database.engine), scope=caller_of, policy=shop.policy)

    @app.post("/orders")
    def place(request: ClaimedRequest[Any] = Depends(dependency)) -> None:  # noqa: B008
        request.session.add(Order(customer="ada", amount=2000))
        raise LoginNeeded

    assert answer_of(app)[0]["status"] == 303
    assert shop.database.counts() == NOTHING


def test_the_header_is_in_the_openapi_document(shop: Shop) -> None:
    operation = fastapi_app(shop).openapi()["paths"]["/orders"]["post"]

    (parameter,) = operation["parameters"]
    assert (parameter["name"], parameter["in"], parameter["required"]) == ("Idempotency-Key", "header", True)
    assert parameter["schema"]["type"] == "string"


def test_the_openapi_document_names_every_refusal_of_a_claimed_route(shop: Shop) -> None:
    app, policy = fastapi_app(shop), Policy(outbox=shop.ob, problem_types="https://api.example.com/")
    router = APIRouter()
    dependency = claimed(sessionmaker(shop.database.engine), scope=caller_of, policy=policy)

    @router.patch("/carts", dependencies=[Depends(dependency)], responses={409: {"description": "our own"}})
    def change(body: dict[str, int]) -> None: ...

    @router.post("/unclaimed")
    def leave(body: dict[str, int]) -> None: ...

    app.include_router(router, prefix="/v1")
    document_refusals(app, policy)
    document = app.openapi()
    del document["paths"]["/orders/{number}/refunds"]  # its handler leaves the number out, as no API would

    openapi_spec_validator.validate(document)
    assert document["paths"]["/v1/unclaimed"]["post"]["responses"].keys() == {"200", "422"}
    for operation in (document["paths"]["/orders"]["post"], document["paths"]["/v1/carts"]["patch"]):
        answers = operation["responses"]
        assert answers.keys() == {"200", "400", "409", "413", "422", "503"}
        for status in ("400", "409", "413", "422", "503"):
            problem = answers[status]["content"]["application/problem+json"]
            assert problem["schema"]["allOf"][0] == {"$ref": "#/components/schemas/IdempotencyProblem"}
            assert all(name in problem["examples"] for name in NAMES_BY_STATUS[status])
        assert "Retry-After" in answers["409"]["headers"]
        own = answers["422"]["content"]["application/json"]["schema"]
        assert own == {"$ref": "#/components/schemas/HTTPValidationError"}
    assert document["paths"]["/v1/carts"]["patch"]["responses"]["409"]["description"] == "our own"
    examples = document["paths"]["/orders"]["post"]["responses"]["413"]["content"]["application/problem+json"][
        "examples"
    ]
    assert examples["request-too-large"]["value"]["type"] == "https://api.example.com/request-too-large"


NAMES_BY_STATUS = {
    "400": ("key-missing", "key-malformed", "request-refused"),
    "409": ("key-in-flight",),
    "413": ("request-too-large",),
    "422": ("request-mismatch", "key-expired"),
    "503": ("request-undone",),
}


def test_a_missing_header_is_a_problem_of_the_policy_and_no_422_of_fastapi(shop: Shop) -> None:
    """Whatever else is wrong with the request, and after the caller is known."""
    shop.settings = {"problem_types": "https://api.example.com/"}

    async def post(authorization: str, body: Any) -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(fastapi_app(shop)), base_url="http://shop"
        ) as client:
            return await client.post("/orders", headers={"Authorization": authorization}, json=body)

    for body in ({"do": "place"}, "no object"):
        answer = asyncio.run(post("ada-token", body))
        assert (answer.status_code, answer.json()["type"]) == (400, "https://api.example.com/key-missing")
    assert asyncio.run(post("nobody", {"do": "place"})).status_code == 401
    assert shop.calls == 0


def test_a_form_is_fingerprinted_as_it_came(shop: Shop) -> None:
    """FastAPI has read the form, and the body with it, before any dependency runs."""
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware)
    dependency = claimed(sessionmaker(shop.database.engine), scope=caller_of, policy=shop.policy)

    @app.post("/orders", status_code=201)
    def place(amount: int = Form(), request: ClaimedRequest[Any] = Depends(dependency)) -> dict[str, int]:  # noqa: B008
        return {"amount": amount}

    with serving_asgi(app) as url:
        answers = [
            httpx.post(f"{url}/orders", headers=HEADERS, data={"amount": amount}, timeout=60) for amount in (1, 1, 2)
        ]

    assert [answer.status_code for answer in answers] == [201, 201, 422]
    assert [answer.json().get("amount") for answer in answers] == [1, 1, None]
    assert answers[1].headers["idempotent-replayed"] == "true"


def test_a_body_that_fastapi_refuses_claims_nothing_permanently(shop: Shop) -> None:
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware)
    dependency = claimed(sessionmaker(shop.database.engine), scope=caller_of, policy=shop.policy)

    @app.post("/orders", status_code=201)
    def place(body: dict[str, int], request: ClaimedRequest[Any] = Depends(dependency)) -> dict[str, int]:  # noqa: B008
        return body

    with serving_asgi(app) as url:
        caller = Caller(url)
        refused = caller.post("not an int")
        caller.close()

    assert refused.status_code == 422
    assert refused.headers["content-type"] == "application/json"
    assert shop.database.counts() == NOTHING
