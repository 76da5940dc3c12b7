"""What only ASGI has: a client that hangs up, a task that is cancelled, a file sent by its path, an answer before the commit."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from support.asgi_wire import LoginNeeded, Wire, answer_of, app_of, idempotency_of, scope_of, to_login
from support.database import NOTHING, Database, Order
from support.http_shop import Shop

import outbox
from outbox.http.starlette import _EXCHANGE, IdempotencyMiddleware

pytestmark = pytest.mark.as_app


@pytest.fixture
def shop(postgresql: Database, ob: outbox.Outbox) -> Shop:
    return Shop(postgresql, ob)


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


# --- before the first byte


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


def test_a_file_is_kept_even_where_the_server_could_send_it_by_its_path(shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "receipt.txt"
    file.write_text("receipt")

    app = claiming(shop, lambda: FileResponse(file))
    answers = [answer_of(app, extensions={"http.response.pathsend": {}}) for _ in range(2)]

    assert [b"".join(message.get("body", b"") for message in sent) for sent in answers] == [b"receipt"] * 2


def test_an_exception_is_undone_even_if_its_handler_answers_well(shop: Shop) -> None:
    def refuse() -> Response:
        raise LoginNeeded

    app = claiming(shop, refuse)
    app.add_exception_handler(LoginNeeded, to_login)

    assert answer_of(app)[0]["status"] == 303
    assert shop.database.counts() == NOTHING


# --- after the answer


class KeepingWire(Wire):
    """As servers do, it has the scope, which has what the app and its middleware keep there."""

    def __init__(self, scope: dict[str, Any]) -> None:
        super().__init__()
        self.scope = scope


is_old_starlette = (
    int(version("starlette").partition(".")[0]) < 1
)  # its handler of exceptions keeps the request by itself


@pytest.mark.parametrize(
    "kind",
    ["first", "replayed", pytest.param("refused", marks=pytest.mark.skipif(is_old_starlette, reason="Starlette 0"))],
)
def test_a_request_leaves_nothing_for_the_garbage_collector(shop: Shop, kind: str) -> None:
    idempotency = idempotency_of(shop)

    async def handler(request: Request) -> Response:
        async with idempotency.claim(request):
            shop.calls += 1
            return JSONResponse({}, 201)

    async def exchange(number: int) -> list[Any]:
        key = [] if kind == "refused" else [(b"idempotency-key", b"retry-%d" % number)]
        scope = scope_of(headers=[(b"authorization", b"ada-token"), *key])
        wire = KeepingWire(scope)
        await app(scope, wire.receive, wire.send)
        return [weakref.ref(wire), weakref.ref(scope[_EXCHANGE])]

    async def exchange_all() -> list[Any]:
        await exchange(1)
        return await exchange(2 if kind == "first" else 1)

    app = app_of(handler)
    gc.disable()
    try:
        left = asyncio.run(exchange_all())
        assert [each() for each in left] == [None, None]
    finally:
        gc.enable()
    assert shop.calls == {"first": 2, "replayed": 1, "refused": 0}[kind]
