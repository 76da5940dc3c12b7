"""What only FastAPI has: the OpenAPI document, forms, its own refusals of a body, and its handlers of exceptions."""

import asyncio
from typing import Any

import httpx
import openapi_spec_validator
import pytest
from fastapi import APIRouter, Depends, FastAPI, Form
from sqlalchemy.orm import sessionmaker
from support.asgi_wire import HEADERS, LoginNeeded, answer_of, to_login
from support.database import NOTHING, Database, Order
from support.http_requests import Caller, caller_of, fastapi_app, serving_asgi
from support.http_shop import Shop

import outbox
from outbox.http import ClaimedRequest, Policy
from outbox.http.fastapi import Idempotency, document_refusals
from outbox.http.starlette import IdempotencyMiddleware

pytestmark = pytest.mark.as_app


@pytest.fixture
def shop(postgresql: Database, ob: outbox.Outbox) -> Shop:
    return Shop(postgresql, ob)


def test_an_exception_is_undone_even_if_its_handler_answers_in_fastapi(shop: Shop) -> None:
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware)
    app.add_exception_handler(LoginNeeded, to_login)
    dependency = Idempotency(sessionmaker(shop.database.engine), scope=caller_of, policy=shop.policy).claim

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
    dependency = Idempotency(sessionmaker(shop.database.engine), scope=caller_of, policy=policy).claim

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
    dependency = Idempotency(sessionmaker(shop.database.engine), scope=caller_of, policy=shop.policy).claim

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
    dependency = Idempotency(sessionmaker(shop.database.engine), scope=caller_of, policy=shop.policy).claim

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
