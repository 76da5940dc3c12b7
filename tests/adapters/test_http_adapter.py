"""HttpAdapter: what each answer means. Requests, settings and sockets: test_http_requests, test_http_settings, test_http_wire."""

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, get_args
from uuid import UUID

import httpx
import pytest

from dispatchers.adapters import HttpAdapter
from dispatchers.adapters.http.meanings import MEANINGS, Meaning
from dispatchers.adapters.http.outcomes import EXCEPTIONS, STATUSES, outcome_of_error
from dispatchers.adapters.http_client.transport import NEVER_SENT, Answer
from dispatchers.delivery import Deferred, Delivered, Delivery, InProgress, KeyConflict, Outcome, Rejected, Unknown
from outbox.errors import ConfigurationError

KEY = "ck1_AAECAwQFBgcICQoLDA0ODxAREhMUFRYX"
ENTRY = UUID("019a0000-0000-8000-8000-000000000001")
CONTACT = {"url": "/contacts", "json": {"email": "ada@example.com"}}

Far = Callable[[httpx.Request], httpx.Response]


def delivery(payload: Any = CONTACT, **fields: Any) -> Delivery:
    given = {
        "operation": "crm.contacts.create",
        "key": KEY,
        "attempt": 1,
        "options": {},
        "headers": {},
        "deadline": 0.0,
    }
    return Delivery(id=ENTRY, payload_json=json.dumps(payload).encode(), **{**given, **fields})


def adapter(far: Far, **settings: Any) -> HttpAdapter:
    return HttpAdapter(**{"base_url": "https://crm.test", "transport": httpx.MockTransport(far), **settings})


def answered(response: httpx.Response, **settings: Any) -> Outcome:
    return asyncio.run(adapter(lambda request: response, **settings).send(delivery()))


# --- statuses


@pytest.mark.parametrize("status", [200, 201, 202, 204, 206, 299])
def test_2xx_is_delivered(status: int) -> None:
    assert answered(httpx.Response(status)) == Delivered({"status": status})


@pytest.mark.parametrize("status", [400, 402, 404, 405, 410, 411, 412, 413, 414, 415, 422, 428, 431])
def test_a_refusal_is_rejected_but_proves_nothing_of_earlier_attempts(status: int) -> None:
    assert answered(httpx.Response(status)) == Rejected(f"HTTP {status}", conclusive=False, result={"status": status})


@pytest.mark.parametrize("status", [401, 403, 407, 429])
def test_a_throttled_request_comes_again_after_its_retry_after(status: int) -> None:
    response = httpx.Response(status, headers={"Retry-After": "7"})

    assert answered(response) == Deferred(f"HTTP {status}", after=timedelta(seconds=7), cooldown=True)


@pytest.mark.parametrize("status", [300, 304, 406, 408, 409, 418, 424, 425, 451, 499, 500, 501, 502, 503, 504, 599])
def test_any_other_status_proves_nothing(status: int) -> None:
    assert isinstance(answered(httpx.Response(status, headers={"Retry-After": "7"})), Unknown)


@pytest.mark.parametrize(
    ("status", "asked", "cooldown"), [(503, True, True), (503, False, False), (500, True, False), (502, False, False)]
)
def test_an_unknown_outcome_keeps_retry_after_and_503_asks_it_of_all(status: int, asked: bool, cooldown: bool) -> None:
    answer = httpx.Response(status, headers={"Retry-After": "7"} if asked else {})

    assert answered(answer) == Unknown(
        f"HTTP {status}", after=timedelta(seconds=7) if asked else None, cooldown=cooldown
    )


def test_the_table_names_only_statuses_that_are_not_2xx() -> None:
    """Else a success could be sent again."""
    assert not [status for status in STATUSES if 200 <= status < 300]


OUTCOMES: dict[Meaning, Outcome] = {
    "delivered": Delivered({"status": 409}),
    "rejected": Rejected("HTTP 409", result={"status": 409}),
    "conclusive": Rejected("HTTP 409", conclusive=True, result={"status": 409}),
    "key_conflict": KeyConflict("HTTP 409"),
    "deferred": Deferred("HTTP 409", after=timedelta(seconds=7)),
    "in_progress": InProgress(timedelta(seconds=7)),
    "unknown": Unknown("HTTP 409", after=timedelta(seconds=7)),
    "final": Unknown("HTTP 409", after=timedelta(seconds=7), final=True),
}


@pytest.mark.parametrize("meaning", get_args(Meaning))
def test_a_status_means_what_the_service_documents(meaning: Meaning) -> None:
    response = httpx.Response(409, headers={"Retry-After": "7"})

    assert answered(response, statuses={409: meaning}) == OUTCOMES[meaning]


def test_a_status_that_is_not_named_keeps_its_meaning() -> None:
    assert answered(httpx.Response(404), statuses={409: "delivered"}) == Rejected("HTTP 404", result={"status": 404})


def test_a_function_reads_what_only_the_body_contains() -> None:
    def slack(answer: Answer) -> Outcome:
        return Delivered() if json.loads(answer.body)["ok"] else Rejected("refused", result=answer.status)

    statuses = {200: slack}

    assert answered(httpx.Response(200, json={"ok": True}), statuses=statuses) == Delivered()
    assert answered(httpx.Response(200, json={"ok": False}), statuses=statuses) == Rejected("refused", result=200)


def test_a_function_that_breaks_is_the_dispatcher_s_to_answer() -> None:
    with pytest.raises(KeyError):
        answered(httpx.Response(200, json={}), statuses={200: lambda answer: json.loads(answer.body)["ok"]})


async def reading_later(answer: Answer) -> Outcome:
    return Delivered()


NAMES = ", ".join(sorted(MEANINGS))


@pytest.mark.parametrize(
    ("statuses", "text"),
    [
        ({99: "unknown"}, "statuses: 99 is not an HTTP status from 200 to 599"),
        ({"409": "unknown"}, "statuses: '409' is not an HTTP status from 200 to 599"),
        ({409: "retry"}, f"statuses: 409 must be one of {NAMES}, or a plain function of the answer, not 'retry'"),
        ({409: None}, f"statuses: 409 must be one of {NAMES}, or a plain function of the answer, not None"),
        (
            {409: reading_later},
            f"statuses: 409 must be one of {NAMES}, or a plain function of the answer, not <function",
        ),
    ],
)
def test_a_reading_that_cannot_work_is_refused_at_once(statuses: Any, text: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        HttpAdapter(base_url="https://crm.test", statuses=statuses)

    assert str(refusal.value).startswith(text)


def test_a_find_that_is_no_function_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        HttpAdapter(base_url="https://crm.test", find=5)  # type: ignore[arg-type]

    assert str(refusal.value) == "find=5 must be a function of the delivery and of `get`, or None"


# --- repeated answers


@pytest.mark.parametrize("text", ["true", "True", " true "])
def test_a_repeated_answer_is_flagged_and_counted(text: str) -> None:
    crm = adapter(lambda request: httpx.Response(200, headers={"Idempotent-Replayed": text}))

    outcome = asyncio.run(crm.send(delivery()))

    assert outcome == Delivered({"status": 200}, replayed=True)
    assert crm.replays == 1


@pytest.mark.parametrize("text", ["false", "", "truer"])
def test_an_answer_that_is_not_said_to_be_repeated_is_fresh(text: str) -> None:
    assert answered(httpx.Response(200, headers={"Idempotent-Replayed": text})) == Delivered({"status": 200})


@pytest.mark.parametrize(("stored", "repeated"), [("all", True), ("all", False), ("2xx", True), ("none", True)])
def test_an_error_is_conclusive_only_where_the_service_says_it_repeats_one(stored: Any, repeated: bool) -> None:
    headers = {"Idempotent-Replayed": "true"} if repeated else {}

    refused = answered(httpx.Response(422, headers=headers), replays_errors=stored)
    broken = answered(httpx.Response(500, headers=headers), replays_errors=stored)

    proven = stored == "all" and repeated
    assert refused == Rejected("HTTP 422", conclusive=proven, result={"status": 422})
    assert broken == Unknown("HTTP 500", final=proven)


# --- what is remembered


def test_of_a_success_the_status_and_a_small_json_body_are_remembered() -> None:
    assert answered(httpx.Response(201, json={"id": 7})) == Delivered({"status": 201, "body": {"id": 7}})


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"\xff\xfe", b'{"id": ', b"NaN", b"[" * 5000, b'"' + b"x" * 9000 + b'"', b"1" * 5000, b"\x1f\x8b\x08"],
)
def test_a_success_that_cannot_be_parsed_or_stored_is_delivered_flagged(body: bytes) -> None:
    assert answered(httpx.Response(200, content=body)) == Delivered({"status": 200, "unparsed": True})


def test_a_success_too_large_to_read_is_delivered_flagged() -> None:
    outcome = answered(httpx.Response(200, content=b"{}"), max_answer_bytes=1)

    assert outcome == Delivered({"status": 200, "unparsed": True})


def test_what_is_remembered_is_the_user_s_choice() -> None:
    def location(answer: Answer) -> Any:
        return answer.headers["Location"]

    assert answered(httpx.Response(201, headers={"Location": "/7"}), remember=location) == Delivered("/7")


def test_a_success_is_delivered_whatever_remember_makes_of_it(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(answer: Answer) -> Any:
        raise ValueError(answer.body)

    outcome = answered(httpx.Response(200, content=b"for ada@example.com"), remember=breaks)

    assert outcome == Delivered({"status": 200, "unparsed": True})
    assert caplog.messages == [
        f"entry {ENTRY} was delivered, but `remember` raised ValueError; its result is not stored"
    ]
    assert "example.com" not in caplog.text  # "ada" is in the name of the file that logs


# --- every exception of httpx has an answer


def exceptions_of_httpx() -> Iterator[type[Exception]]:
    for _, cls in inspect.getmembers(httpx, inspect.isclass):
        if issubclass(cls, Exception):
            yield cls
            yield from cls.__subclasses__()


def test_every_exception_of_httpx_has_a_row_of_its_own() -> None:
    ours = {cls for cls in exceptions_of_httpx() if cls.__module__.startswith("httpx")}

    assert len(ours) > 25
    assert ours - set(EXCEPTIONS) == set()


@pytest.mark.parametrize("cls", EXCEPTIONS, ids=lambda cls: cls.__name__)
def test_an_exception_is_deferred_only_if_nothing_can_have_been_sent(cls: type[Exception]) -> None:
    def break_off(request: httpx.Request) -> httpx.Response:
        raise cls.__new__(cls)

    outcome = asyncio.run(adapter(break_off).send(delivery()))

    if cls in NEVER_SENT:
        assert isinstance(outcome, Deferred)
        assert outcome.reason.startswith("nothing was sent: ")
    else:
        assert outcome == Unknown(f"no answer: {cls.__name__}")


def test_what_surely_was_not_sent_is_this_and_nothing_else() -> None:
    assert {cls.__name__ for cls in NEVER_SENT} == {
        "ConnectError",
        "ConnectTimeout",
        "PoolTimeout",
        "ProxyError",
        "UnsupportedProtocol",
    }


def test_an_exception_without_a_row_is_answered_as_its_parent() -> None:
    class NewError(httpx.ConnectError):
        """Of a later httpx."""

    assert outcome_of_error(NewError("m")) == Deferred("nothing was sent: connect: failed")
    assert outcome_of_error(RuntimeError("m")) == Unknown("no answer: RuntimeError")
