"""Which requests the ASGI middleware claims, in whose name, and the errors of an app that claims wrongly."""

from typing import Any

import pytest
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from support.asgi_wire import answer_of, app_of, idempotency_of
from support.database import ALL, NOTHING, Database
from support.http_requests import Caller, caller_of, serving_asgi, starlette_app
from support.http_shop import Shop, shop_with_a_hot_row

import outbox
from outbox.http import Policy
from outbox.http.starlette import Idempotency, IdempotencyMiddleware, claimed_request

pytestmark = pytest.mark.as_app


@pytest.fixture
def shop(postgresql: Database, ob: outbox.Outbox) -> Shop:
    return Shop(postgresql, ob)


@pytest.mark.parametrize(("do", "status"), [("meets another", 418), ("meets another at its commit", 503)])
def test_an_apps_own_handler_of_refusals_answers_until_the_answer_begins(
    postgresql: Database, ob: outbox.Outbox, do: str, status: int
) -> None:
    """Starlette refuses to handle what the commit raises, which comes after the answer's first message."""
    shop = shop_with_a_hot_row(postgresql, ob)
    app = starlette_app(shop)
    app.add_exception_handler(outbox.RequestError, lambda request, error: JSONResponse({}, 418))

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

    sent = answer_of(app_of(handler, max_body_bytes=0))

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
