"""The status resource over HTTP: what it shows, to whom, and how it is asked again."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Mount, Route
from support.accepted import Checkout
from support.asgi_server import serving_asgi
from support.database import CHARGE, TABLES, Database

import outbox
from dispatchers import Completed, Delivered, Rejected
from dispatchers.adapters import MemoryAdapter
from outbox.http import status_route
from outbox.http.status_route import StatusRoute

pytestmark = pytest.mark.as_app


async def caller_of(scope: Mapping[str, Any]) -> str | None:
    """As an app would: by a header that its authentication has set."""
    name = dict(scope["headers"]).get(b"x-caller")
    if name == b"nobody":
        return None
    if name is None:
        raise HTTPException(401, headers={"WWW-Authenticate": "Bearer"})
    found: str = name.decode()
    return found


@pytest.fixture(params=["sync", "async"])
def checkout(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Checkout:
    """The app; its status resource uses a Session, or an AsyncSession."""
    return Checkout(database, ob, is_async=request.param == "async")


def route(checkout: Checkout, **settings: Any) -> StatusRoute:
    database = checkout.database

    def sessions() -> Session | AsyncSession:
        return database.async_session() if checkout.is_async else database.session()

    return StatusRoute(sessions, **{"caller": caller_of, "outbox": checkout.ob, **settings})


def ask(
    checkout: Checkout, path: str = "", method: str = "GET", caller: Any = "acct_1", **settings: Any
) -> httpx.Response:
    """Ask an app in which the resource is mounted under /requests. caller: of the request, or the app's own function."""
    if callable(caller):
        settings["caller"], caller = caller, None
    app = Starlette(routes=[Mount("/requests", route(checkout, **settings))])
    headers = {} if caller is None else {"X-Caller": caller}

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            return await client.request(method, path or f"/requests/{checkout.record.id}", headers=headers)

    return asyncio.run(main())


def test_an_open_request_shows_its_state_its_effects_and_when_to_ask_again(checkout: Checkout) -> None:
    checkout.accept(CHARGE)

    answer = ask(checkout)

    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert (answer.headers["Retry-After"], answer.headers["Cache-Control"]) == ("1", "no-store")
    shown = answer.json()
    assert shown.pop("created_at") == checkout.record.created_at.isoformat()
    assert shown == {
        "id": str(checkout.record.id),
        "state": "accepted",
        "answered_at": None,
        "effects": [
            {"operation": CHARGE, "discriminator": "", "state": "pending", "result": None, "settled_at": None},
        ],
        "response": None,
    }


def test_a_completed_request_shows_results_and_the_response_of_a_retry(checkout: Checkout) -> None:
    checkout.on_completed()
    checkout.accept(CHARGE)
    checkout.run_once(MemoryAdapter(answer=lambda delivery: Delivered({"charge": "ch_1"})))

    answer = ask(checkout)

    assert (answer.status_code, answer.headers.get("Retry-After")) == (200, None)
    shown = answer.json()
    assert (shown["state"], shown["answered_at"]) == ("succeeded", checkout.record.answered_at.isoformat())
    (effect,) = shown["effects"]
    assert (effect["state"], effect["result"]) == ("delivered", {"charge": "ch_1"})
    assert shown["response"] == {
        "status": 201,
        "headers": {"Content-Type": "application/json"},
        "body": {CHARGE: "delivered"},
    }


def test_a_request_that_failed_is_found_all_the_same(checkout: Checkout) -> None:
    checkout.on_completed()
    checkout.accept(CHARGE)
    checkout.run_once(MemoryAdapter(answer=lambda delivery: Rejected("declined: 4242")))

    answer = ask(checkout)

    assert answer.status_code == 200
    assert (answer.json()["state"], answer.json()["response"]["status"]) == ("failed", 402)


def test_neither_payload_nor_key_nor_reason_is_shown(checkout: Checkout) -> None:
    checkout.on_completed()
    checkout.accept(CHARGE)
    checkout.run_once(MemoryAdapter(answer=lambda delivery: Rejected("declined: no funds")))

    text = ask(checkout).text

    assert not [word for word in ("amount", "no funds", "ck1_", "retry-001") if word in text]


def test_a_result_that_cannot_be_decrypted_is_left_out(checkout: Checkout, caplog: pytest.LogCaptureFixture) -> None:
    checkout.on_completed()
    checkout.accept(CHARGE)
    checkout.run_once(MemoryAdapter(answer=lambda delivery: Delivered({"charge": "ch_1"})))
    request = checkout.status()
    assert request is not None
    (entry,) = request.entries
    unreadable = replace(entry, _result=outbox.CannotDecrypt("this process has no data key d1", "d1"))

    (effect,) = status_route.shown(replace(request, entries=[unreadable]))["effects"]

    assert (effect["state"], "result" in effect) == ("delivered", False)
    assert "no data key d1" in caplog.text


def test_without_a_function_that_names_the_client_there_is_no_resource(checkout: Checkout) -> None:
    with pytest.raises(outbox.ConfigurationError) as refused:
        route(checkout, caller=None)

    assert str(refused.value) == (
        "caller must be the app's own function that returns whose requests may be read, not None: without it one caller could"
        " see another's. For example caller=lambda scope: scope['user'].username"
    )


def test_a_client_that_can_have_claimed_nothing_has_no_scope(
    checkout: Checkout, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty name is what frameworks have for who is not logged in, and is the scope of jobs."""
    checkout.accept()
    ids = [checkout.record.id, recorded(checkout, source="app", scope="")]
    for caller in (None, "", "a" * 300, "a\0b", "\ud800", 42, b"acct_1", object()):
        for id in ids:
            answer = ask(checkout, f"/requests/{id}", caller=lambda scope, found=caller: found, sources=("http", "app"))
            assert (answer.status_code, answer.json()["detail"]) == (404, "no request of yours has this id")

    said = "answered 404 to a request for a status: caller= returned {}, but must return a str or None"
    logged = [record.getMessage() for record in caplog.records if record.name == "outbox.http.status_route"]
    assert logged == [said.format(name) for name in ("int", "int", "bytes", "bytes", "object", "object")]


def test_a_record_of_another_source_is_not_there(checkout: Checkout) -> None:
    """A customer may be named as an inbox's scope is, and know a message's id."""
    ids = {source: recorded(checkout, source=source) for source in ("http", "app", "inbox:shop", "jobs")}
    for sources in (None, ["http"], ["app"], ["inbox:shop", "jobs"], []):
        settings = {} if sources is None else {"sources": sources}
        found = [
            source for source, id in ids.items() if ask(checkout, f"/requests/{id}", **settings).status_code == 200
        ]
        assert found == (["http"] if sources is None else sources)


def recorded(checkout: Checkout, *, source: str, scope: str = "acct_1") -> UUID:
    """The id of a request of this source that was answered."""
    with (
        checkout.database.begin() as session,
        checkout.ob.idempotent(session, "evt_1", scope=scope, source=source, content={}) as claim,
    ):
        claim.respond(201, {"secret": 1})
    return claim.id


def test_a_request_that_has_its_body_for_a_key_is_one_of_its_source(checkout: Checkout) -> None:
    checkout.accept(key=outbox.BodyKey(timedelta(minutes=1)))

    assert ask(checkout).json()["state"] == "accepted"


def test_one_source_is_no_collection_of_sources(checkout: Checkout) -> None:
    for sources in ("http", 1):
        with pytest.raises(
            outbox.InvalidValue, match=r"^sources .*: must be a collection of names, such as \('http',\)$"
        ):
            route(checkout, sources=sources)
    with pytest.raises(outbox.InvalidValue, match="must be a str, not int"):
        route(checkout, sources=[1])


@pytest.mark.parametrize("caller", ["acct_2", "nobody"])
def test_anothers_request_is_answered_as_one_that_is_not_there(checkout: Checkout, caller: str) -> None:
    checkout.accept()

    others, absent = ask(checkout, caller=caller), ask(checkout, f"/requests/{uuid4()}")

    assert (others.status_code, others.content) == (404, absent.content)
    assert dict(others.headers) == dict(absent.headers)
    assert others.headers["Content-Type"] == "application/problem+json"
    assert others.json() == {"status": 404, "title": "Not Found", "detail": "no request of yours has this id"}


def test_an_unauthenticated_client_gets_what_the_apps_function_raises(checkout: Checkout) -> None:
    checkout.accept()

    for path in ("", "/requests/nonsense"):
        answer = ask(checkout, path, caller=None)
        assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("form", ["nonsense", "", "{id}/more", "{hex}", "{upper}", "urn:uuid:{id}"])
def test_only_the_id_itself_is_found(checkout: Checkout, form: str) -> None:
    checkout.accept()
    id = checkout.record.id

    path = "/requests/" + form.format(id=id, hex=id.hex, upper=str(id).upper())

    assert ask(checkout, path).status_code == 404


def test_head_returns_the_headers_without_the_body(checkout: Checkout) -> None:
    checkout.accept()

    head, get = ask(checkout, method="HEAD"), ask(checkout)

    assert head.content == b""
    assert dict(head.headers) == dict(get.headers)
    assert ask(checkout, f"/requests/{uuid4()}", method="HEAD").content == b""


@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT"])
def test_it_can_only_be_read(checkout: Checkout, method: str) -> None:
    checkout.accept()

    answer = ask(checkout, method=method)

    assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, HEAD")
    assert answer.json()["detail"] == "a request's status can only be read"


@pytest.mark.parametrize(
    ("body", "headers", "shown"),
    [
        (None, {}, {"body": None}),
        ("wörter", {}, {"body": "wörter"}),
        (b"\xff\x00", {}, {"body_base64": "/wA="}),
        (b"\xff", {"Content-Type": "text/plain"}, {"body_base64": "/w=="}),
        (b'{"a": 1}', {"content-type": "application/problem+json; charset=utf-8"}, {"body": {"a": 1}}),
        (b"{", {"Content-Type": "application/json"}, {"body_base64": "ew=="}),
        (b"NaN", {"Content-Type": "application/json"}, {"body_base64": "TmFO"}),
    ],
)
def test_a_response_of_any_kind_is_shown(
    checkout: Checkout, body: Any, headers: dict[str, str], shown: dict[str, Any]
) -> None:
    def complete(session: Session, completed: Completed) -> None:
        completed.respond(200, body, headers)

    checkout.on_completed(complete)
    checkout.accept()
    checkout.run_once()

    response = ask(checkout).json()["response"]

    assert {name: value for name, value in response.items() if name.startswith("body")} == shown


def test_it_is_an_asgi_app_of_its_own_too(checkout: Checkout) -> None:
    checkout.accept()
    app = Starlette(routes=[Route("/v1/checkouts/{id}", route(checkout, caller=lambda scope: "acct_1"))])

    async def main() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            return (await client.get(f"/v1/checkouts/{checkout.record.id}")).status_code

    assert asyncio.run(main()) == 200, "with a sync function, on a route"


def test_a_websocket_is_refused(checkout: Checkout) -> None:
    async def nothing(*arguments: Any) -> Any: ...

    with pytest.raises(RuntimeError, match="the status of a request is read over HTTP, not 'websocket'"):
        asyncio.run(route(checkout)({"type": "websocket"}, nothing, nothing))


def test_over_http_a_client_polls_until_the_response_is_there(checkout: Checkout) -> None:
    checkout.on_completed()
    checkout.accept()
    app = Starlette(routes=[Mount("/requests", route(checkout))])
    seen = []

    with serving_asgi(app) as url, httpx.Client(base_url=url, headers={"X-Caller": "acct_1"}) as client:
        seen.append(client.get(f"/requests/{checkout.record.id}"))
        checkout.run_once()
        seen.append(client.get(f"/requests/{checkout.record.id}"))

    assert [answer.json()["state"] for answer in seen] == ["accepted", "succeeded"]
    assert ["Retry-After" in answer.headers for answer in seen] == [True, False]


def test_the_older_the_request_the_later_it_is_asked_for(checkout: Checkout) -> None:
    checkout.accept()
    record = TABLES.record
    earlier = checkout.record.created_at.replace(year=2020)
    checkout.database.execute(sa.update(record).values(created_at=earlier))

    assert ask(checkout).headers["Retry-After"] == "60"
