"""HttpAdapter in the conformance suite."""

from datetime import timedelta
from typing import Any

import httpx
import pytest

from dispatchers import Adapter, Deferred, Delivered, InProgress, KeyConflict, Rejected, Unknown
from dispatchers.adapters import HttpAdapter
from dispatchers.testing.conformance import Scenario
from dispatchers.testing.conformance_http import HttpSuite
from dispatchers.testing.faulty_http import FaultyHttp, answer

TOKEN = "crm_token_5eb63bbb"


class TestHttp(HttpSuite):
    operation = "crm.contacts.create"
    payload = {"url": "/contacts", "json": {"email": "ada@example.com"}}  # noqa: RUF012
    secrets = (TOKEN,)
    private = ("ada@example.com",)
    client_exceptions = (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError)
    scenarios = (
        Scenario("created", answer(201, json={"id": 7}), Delivered),
        Scenario("deleted", answer(204), Delivered, payload={"url": "/contacts/7", "method": "DELETE"}),
        Scenario("repeated", answer(201, headers={"Idempotent-Replayed": "true"}), Delivered),
        Scenario("invalid", answer(400, json={"error": "no such field"}), Rejected),
        Scenario("a read", answer(200), Rejected, payload={"url": "/contacts", "method": "GET"}, requests=0),
        Scenario("key of another request", answer(422), KeyConflict),
        Scenario("limited", answer(429, headers={"Retry-After": "7"}), Deferred),
        Scenario("limited for a nonsensical time", answer(429, headers={"Retry-After": "-7"}), Deferred),
        Scenario("key in use", answer(409), InProgress),
        Scenario("failed", answer(500), Unknown),
        Scenario("overloaded", answer(503, headers={"Retry-After": "7"}), Unknown),
    )

    def adapter(self, remote: FaultyHttp, timeout: timedelta) -> Adapter:
        return self.made(base_url=remote.url, timeout=timeout)

    def raising(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Adapter:
        def fail(request: httpx.Request) -> httpx.Response:
            raise error

        return self.made(base_url="http://crm.test", transport=httpx.MockTransport(fail))

    def made(self, **settings: Any) -> Adapter:
        return HttpAdapter(
            headers={"Authorization": f"Bearer {TOKEN}"},
            window=timedelta(days=7),
            statuses={409: "in_progress", 422: "key_conflict"},
            **settings,
        )
