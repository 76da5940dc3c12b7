"""HttpAdapter in the conformance suite."""

from datetime import timedelta
from typing import Any

import httpx
import pytest

from dispatchers import Adapter, Deferred, Delivered, InProgress, KeyConflict, Rejected, Unknown
from dispatchers.adapters import HttpAdapter
from dispatchers.testing.conformance import Scene
from dispatchers.testing.conformance_http import HttpSuite
from dispatchers.testing.hostile_http import HostileHttp, answer

TOKEN = "crm_token_5eb63bbb"


class TestHttp(HttpSuite):
    operation = "crm.contacts.create"
    payload = {"url": "/contacts", "json": {"email": "ada@example.com"}}  # noqa: RUF012
    secrets = (TOKEN,)
    private = ("ada@example.com",)
    client_exceptions = (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError)
    scenes = (
        Scene("created", answer(201, json={"id": 7}), Delivered),
        Scene("deleted", answer(204), Delivered, {"url": "/contacts/7", "method": "DELETE"}),
        Scene("repeated", answer(201, headers={"Idempotent-Replayed": "true"}), Delivered),
        Scene("invalid", answer(400, json={"error": "no such field"}), Rejected),
        Scene("a read", answer(200), Rejected, {"url": "/contacts", "method": "GET"}, requests=0),
        Scene("key of another request", answer(422), KeyConflict),
        Scene("limited", answer(429, headers={"Retry-After": "7"}), Deferred),
        Scene("limited for a nonsensical time", answer(429, headers={"Retry-After": "-7"}), Deferred),
        Scene("key in use", answer(409), InProgress),
        Scene("failed", answer(500), Unknown),
        Scene("overloaded", answer(503, headers={"Retry-After": "7"}), Unknown),
    )

    def adapter(self, far_side: HostileHttp, timeout: timedelta) -> Adapter:
        return self.made(base_url=far_side.url, timeout=timeout)

    def raising(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Adapter:
        async def fail(*args: object) -> None:
            raise error

        monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", fail)
        return self.made(base_url="http://crm.test")

    def made(self, **settings: Any) -> Adapter:
        return HttpAdapter(
            headers={"Authorization": f"Bearer {TOKEN}"},
            window=timedelta(days=7),
            statuses={409: "in_progress", 422: "key_conflict"},
            **settings,
        )
