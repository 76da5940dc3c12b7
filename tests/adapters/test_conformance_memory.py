"""The memory adapter, and functions of `Operations`, async and sync, in the conformance suite."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

import pytest

from dispatchers import (
    FOREVER,
    Adapter,
    Deferred,
    Delivered,
    Delivery,
    InProgress,
    KeyConflict,
    Operations,
    Outcome,
    Rejected,
    Unknown,
)
from dispatchers.adapters import MemoryAdapter
from dispatchers.testing import faulty_http
from dispatchers.testing.conformance import AdapterSuite, Scenario
from dispatchers.testing.conformance_http import HttpSuite
from dispatchers.testing.faulty_http import answer


class MemoryFarSide:
    """What a memory adapter, or a function, asks for its answer."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self._outcome: Outcome = Delivered()

    def behave(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def receive(self, delivery: Delivery) -> Outcome:
        self.requests.append(delivery.key.encode() + delivery.payload_json)
        return self._outcome


class SendingTo(MemoryAdapter):
    """A memory adapter is service and adapter in one: what it is sent has arrived, a repeat too."""

    def __init__(self, remote: MemoryFarSide, timeout: timedelta) -> None:
        super().__init__(lambda delivery: self._outcome, window=timedelta(days=1), timeout=timeout)
        self._remote = remote

    async def send(self, delivery: Delivery) -> Outcome:
        self._outcome = self._remote.receive(delivery)
        return await super().send(delivery)


EVERY_OUTCOME = tuple(
    Scenario(type(outcome).__name__, outcome, type(outcome))
    for outcome in (
        Delivered({"id": 7}),
        Rejected("no such contact"),
        KeyConflict("another body came under this key"),
        Deferred("busy", after=timedelta(seconds=7)),
        InProgress(),
        Unknown("no answer"),
    )
)


class FromMemory(AdapterSuite):
    """What these have in common: no client, and nothing to hide."""

    operation = "crm.contacts.upsert"
    payload = {"email": "ada@example.com"}  # noqa: RUF012
    private = ("ada@example.com",)
    secrets = ()
    client_exceptions = ()
    scenarios = EVERY_OUTCOME

    @contextmanager
    def remote(self) -> Iterator[MemoryFarSide]:
        yield MemoryFarSide()


class TestMemoryAdapter(FromMemory):
    def adapter(self, remote: MemoryFarSide, timeout: timedelta) -> Adapter:
        return SendingTo(remote, timeout)


class TestAsyncFunction(FromMemory):
    def adapter(self, remote: MemoryFarSide, timeout: timedelta) -> Adapter:
        async def upsert(delivery: Delivery) -> Outcome:
            return remote.receive(delivery)

        return function(upsert, window=FOREVER, timeout=timeout)


def function(send: Callable[[Delivery], Any], **settings: Any) -> Adapter:
    effects = Operations()
    effects.operation("crm.contacts", **settings)(send)
    return effects.adapters["crm.contacts"]


# --- one that blocks

TOKEN = "crm_token_5eb63bbb"


def upsert(url: str, delivery: Delivery) -> Outcome:
    """As a user with the standard library alone would write it."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=5)
    try:
        connection.connect()
    except OSError as error:
        return Deferred(f"not connected: {type(error).__name__}")
    try:
        headers = {"Idempotency-Key": delivery.key, "Authorization": f"Bearer {TOKEN}"}
        connection.request("PUT", "/contacts", delivery.payload_json, headers)
        return outcome_of(connection.getresponse().status)
    except (OSError, HTTPException) as error:
        return Unknown(f"no answer: {type(error).__name__}")
    finally:
        connection.close()


def outcome_of(status: int) -> Outcome:
    match status:
        case 200 | 201 | 204:
            return Delivered({"status": status})
        case 401 | 403 | 429:
            return Deferred(f"HTTP {status}")
        case 400 | 404 | 422:
            return Rejected(f"HTTP {status}")
        case _:
            return Unknown(f"HTTP {status}")


class TestBlockingFunction(HttpSuite):
    """A sync function over the standard library's client, on the thread that it is given."""

    operation = "crm.contacts.upsert"
    payload = {"email": "ada@example.com"}  # noqa: RUF012
    private = ("ada@example.com",)
    secrets = (TOKEN,)
    client_exceptions = (HTTPException, OSError)
    scenarios = (
        Scenario("created", answer(200, json={"id": 7}), Delivered),
        Scenario("invalid", answer(422), Rejected),
        Scenario("limited", answer(429), Deferred),
        Scenario("failed", answer(500), Unknown),
    )
    never: Mapping[type[Any], str] = {
        KeyConflict: "the CRM does not compare requests",
        InProgress: "the CRM lets the second request wait",
    }

    def adapter(self, remote: faulty_http.FaultyHttp, timeout: timedelta) -> Adapter:
        return function(lambda delivery: upsert(remote.url, delivery), window=timedelta(days=7), timeout=timeout)

    def raising(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Adapter:
        def fail(*args: object) -> None:
            raise error

        monkeypatch.setattr(HTTPConnection, "connect", lambda connection: None)
        monkeypatch.setattr(HTTPConnection, "request", fail)
        return function(lambda delivery: upsert("http://crm.test", delivery))
