"""Refusals as problem documents, what is kept of an answer, and how an app configures it."""

import json
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from support.database import Database

import outbox
import outbox.errors
from outbox.http import KEPT_HEADERS, REPLAYED, Policy, problem_of, replay, request_content
from outbox.http.answers import Verdict, first_answer, judge, kept_headers
from outbox.http.problems import KINDS, MEDIA_TYPE
from outbox.keys import pae

REFUSALS = [outbox.errors.RequestError, *outbox.errors.RequestError.__subclasses__()]
CHOSEN = outbox.Response(402, b"{}", {"Content-Type": "application/json"})


def test_importing_the_package_loads_no_framework() -> None:
    program = "import sys, outbox.http; print(*sys.modules)"

    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()

    assert "outbox.http" in loaded
    assert not {"starlette", "fastapi", "flask", "django", "werkzeug", "anyio", "httpx"} & set(loaded)


# --- problems


def test_a_problem_has_its_type_its_title_its_status_and_what_to_do() -> None:
    answer = problem_of(outbox.KeyMissing("send one"))

    assert (answer.status, answer.headers) == (400, {"Content-Type": MEDIA_TYPE})
    assert json.loads(answer.body) == {
        "type": "tag:sqlalchemy-outbox,2026:key-missing",
        "title": "The request has no idempotency key",
        "status": 400,
        "detail": "send one",
    }


@pytest.mark.parametrize("refusal", REFUSALS)
def test_every_refusal_has_a_type_of_its_own(refusal: type[outbox.RequestError]) -> None:
    assert refusal in KINDS
    assert len({kind.name for kind in KINDS.values()}) == len(KINDS)


def test_an_apps_own_refusal_has_the_type_of_what_it_derives_from() -> None:
    class KeyStale(outbox.KeyExpired):
        pass

    assert json.loads(problem_of(KeyStale("stale")).body)["type"].endswith(":key-expired")


@pytest.mark.parametrize(
    ("wait", "seconds"), [(timedelta(seconds=7), "7"), (timedelta(milliseconds=1200), "2"), (timedelta(0), "1")]
)
def test_a_request_in_flight_gets_a_retry_after_in_whole_seconds(wait: timedelta, seconds: str) -> None:
    answer = problem_of(outbox.KeyInFlight("busy", wait))

    assert dict(answer.headers)["Retry-After"] == seconds


def test_an_app_has_type_uris_of_its_own() -> None:
    policy = Policy(problem_types="https://api.example.com/problems#")

    answer = policy.problem(outbox.RequestMismatch("another request"))

    assert json.loads(answer.body)["type"] == "https://api.example.com/problems#request-mismatch"


def test_a_problems_type_that_is_no_text_is_an_error() -> None:
    types: Any = {"key-missing": "https://docs.example.com/key"}

    with pytest.raises(outbox.InvalidValue, match="must be a str, the beginning of a URI"):
        Policy(problem_types=types)


# --- answers


@pytest.mark.parametrize(
    ("chosen", "status", "verdict"),
    [
        (None, 200, Verdict.KEEP_SENT),
        (None, 303, Verdict.KEEP_SENT),
        (None, 400, Verdict.UNDO),
        (None, 500, Verdict.UNDO),
        (CHOSEN, 402, Verdict.KEEP_CHOSEN),
        (CHOSEN, 404, Verdict.UNDO),
        (CHOSEN, 500, Verdict.UNDO),
    ],
)
def test_an_error_is_kept_only_if_it_was_chosen(chosen: outbox.Response | None, status: int, verdict: Verdict) -> None:
    assert judge(chosen, status) is verdict


def test_an_answer_other_than_the_chosen_one_is_an_error() -> None:
    with pytest.raises(outbox.ClaimError) as refused:
        judge(CHOSEN, 201)

    assert str(refused.value) == (
        "the handler stored an answer with status 402, but returned one with status 201: return what claim.respond() or"
        " claim.reject() returned, converted to a response of the framework"
    )


def test_the_allowed_headers_are_kept_those_of_one_name_joined() -> None:
    headers = (("link", "</a>"), ("LINK", "</b>"), ("Location", "/orders/1"), ("Set-Cookie", "a=b"), ("X-Trace", "t1"))

    kept = kept_headers(outbox.Response(201, b"", headers), KEPT_HEADERS)

    assert kept == {"Link": "</a>, </b>", "Location": "/orders/1"}


def test_the_first_client_gets_its_cookies_with_the_chosen_answer() -> None:
    sent = outbox.Response(402, b"[]", (("content-type", "text/plain"), ("content-length", "2"), ("set-cookie", "a=b")))

    answer = first_answer(CHOSEN, sent)

    assert answer == outbox.Response(402, b"{}", (("Content-Type", "application/json"), ("set-cookie", "a=b")))


@pytest.mark.parametrize("name", ["Connection", "Content-Length", "Transfer-Encoding", "Date", "WWW-Authenticate"])
def test_a_replay_has_no_header_of_one_connection_or_caller(name: str) -> None:
    answer = replay(outbox.Response(201, b"", {name: "kept by hand", "X-Order": "1"}))

    assert answer.headers == {"X-Order": "1", REPLAYED: "true"}


@pytest.mark.parametrize("name", ["Set-Cookie", "set-cookie", "Connection", "content-length"])
def test_a_header_that_is_never_replayed_cannot_be_allowed(name: str) -> None:
    with pytest.raises(outbox.InvalidValue) as refused:
        Policy(kept_headers=[*KEPT_HEADERS, name])

    assert str(refused.value) == f"kept_headers {name!r}: belongs to one connection or caller and is never replayed"


def test_one_name_is_no_collection_of_headers() -> None:
    with pytest.raises(outbox.InvalidValue, match=r"^kept_headers 'ETag': must be a collection of names, not one str$"):
        Policy(kept_headers="ETag")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"wait": 5},
            "wait 5: must be a timedelta of 0 s or more, and 36525 days at most, or None to refuse immediately",
        ),
        ({"retention": 24}, "retention 24: must be a timedelta of more than 0 s, and 36525 days at most"),
    ],
)
def test_a_policy_that_cannot_work_is_refused_before_the_first_request(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(outbox.InvalidValue) as refused:
        Policy(**settings)

    assert str(refused.value) == text


def test_an_app_allows_headers_of_its_own() -> None:
    policy = Policy(kept_headers=["X-Order"])

    kept = kept_headers(outbox.Response(201, b"", (("x-order", "1"), ("location", "/"))), policy.kept_headers)

    assert kept == {"X-Order": "1"}


# --- what must be equal


def test_what_must_be_equal_is_written_so_that_no_two_requests_look_alike() -> None:
    content = request_content("POST", "/orders", b"dry=1", "application/json", b"{}")

    assert content == pae(b"obx/http-request/v1", b"POST", b"/orders", b"dry=1", b"application/json", b"{}")


# --- the caller


@pytest.mark.parametrize("scope", [None, "ada"])
def test_a_scope_that_is_no_function_is_an_error_in_every_framework(scope: object) -> None:
    from outbox.http import fastapi, flask, starlette

    for make in (fastapi.Idempotency, flask.Idempotency, starlette.Idempotency):
        with pytest.raises(outbox.ConfigurationError) as refused:
            make(lambda: None, scope=scope)  # type: ignore[operator, arg-type]

        assert str(refused.value).startswith(
            f"scope must be the app's own function that returns who is calling, not {scope!r}: without it one caller's"
            " answer could be replayed to another. For example scope="
        )


def test_an_engine_in_the_place_of_sessions_is_an_error_in_every_framework(sqlite: Database) -> None:
    from outbox.http import fastapi, flask, starlette

    for make in (fastapi.Idempotency, flask.Idempotency, starlette.Idempotency):
        with pytest.raises(outbox.ConfigurationError) as refused:
            make(sqlite.engine, scope=lambda *_: "ada")  # type: ignore[operator, call-arg]

        assert str(refused.value) == (
            "sessions must make a Session for each request, as a sessionmaker does; Engine makes no Session"
        )


def test_a_scope_left_out_is_an_error_in_every_framework() -> None:
    from outbox.http import fastapi, flask, starlette

    for make in (fastapi.Idempotency, flask.Idempotency, starlette.Idempotency):
        with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'scope'"):
            make(lambda: None)  # type: ignore[operator, call-arg]
