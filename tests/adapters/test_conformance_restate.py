"""RestateAdapter in the conformance suites: for a service, and for a workflow. `test_restate_adapter.py` has the real server."""

from datetime import timedelta
from typing import Any

import httpx
import pytest

from dispatchers import (
    Absent,
    Adapter,
    CannotTell,
    Deferred,
    Delivered,
    Found,
    InProgress,
    KeyConflict,
    Rejected,
    Unknown,
)
from dispatchers.adapters import RestateAdapter
from dispatchers.testing.conformance import Scenario
from dispatchers.testing.conformance_http import HttpLookupSuite, HttpSuite
from dispatchers.testing.faulty_http import Behaviour, FaultyHttp, answer

TOKEN = "key_5eb63bbbe01eeed093cb22bb8f5acdc3"
ID = "inv_16z3GZI83txY49yJ3kdxmuS5bovfmTeChO"


def accepted(status: str) -> Behaviour:
    return answer(202, json={"invocationId": ID, "status": status})


def refused(status: int, message: str, source: str = "ingress", **headers: str) -> Behaviour:
    body = {"code": status, "message": message, "source": source}
    return answer(status, json=body, headers={"x-restate-error-source": source, **headers})


class OfRestate:
    operation = "orders.fulfil"
    payload: Any = {"email": "ada@example.com"}  # noqa: RUF012
    secrets = (TOKEN,)
    private = ("ada@example.com",)
    target = "{operation}"

    def adapter(self, remote: FaultyHttp, timeout: timedelta) -> Adapter:
        return self.made(remote.url, timeout=timeout)

    def made(self, ingress: str, **settings: Any) -> Adapter:
        return RestateAdapter(url=ingress, target=self.target, headers={"Authorization": f"Bearer {TOKEN}"}, **settings)


class TestRestate(OfRestate, HttpSuite):
    success = 202
    client_exceptions = (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError)
    scenarios = (
        Scenario("accepted", accepted("Accepted"), Delivered),
        Scenario("accepted before", accepted("PreviouslyAccepted"), Delivered),
        Scenario("no such service", refused(404, "service 'orders' not found"), Deferred),
        Scenario("another content type", refused(400, "input validation error"), Rejected),
        Scenario("too large", answer(413), Rejected),
        Scenario("wrong token", answer(401), Deferred),
        Scenario("limited", answer(429, headers={"Retry-After": "7"}), Deferred),
        Scenario("failed", refused(500, "internal"), Unknown),
        Scenario("unavailable", answer(503, headers={"Retry-After": "7"}), Unknown),
    )
    never = {  # noqa: RUF012
        KeyConflict: "Restate does not compare inputs",
        InProgress: "Restate accepts a key again while its invocation runs",
    }

    def raising(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Adapter:
        def fail(request: httpx.Request) -> httpx.Response:
            raise error

        return self.made("http://restate.test", transport=httpx.MockTransport(fail))


class TestRestateWorkflow(TestRestate):
    target = "Fulfilment/{key}/run"


class TestRestateLookups(OfRestate, HttpLookupSuite):
    scenarios = (
        Scenario("ended", answer(200, json={"done": True}, headers={"x-restate-id": ID}), Found),
        Scenario("runs", refused(470, "the invocation exists but has not completed yet"), Found),
        Scenario("failed", refused(500, "no stock", "invocation", **{"x-restate-id": ID}), Found),
        Scenario("failed with 404", refused(404, "invocation not found", "invocation", **{"x-restate-id": ID}), Found),
        Scenario("not started", refused(404, "invocation not found"), Absent),
        Scenario("no such service", refused(404, "service 'orders' not found"), CannotTell),
        Scenario("a proxy that knows no path", answer(404), CannotTell),
        Scenario("an output of something else", answer(200, json={}), CannotTell),
        Scenario("wrong token", answer(401), CannotTell),
    )
    never: Any = {}  # noqa: RUF012


class TestRestateWorkflowLookups(TestRestateLookups):
    target = "Fulfilment/{key}/run"
