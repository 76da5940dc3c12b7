"""StripeAdapter in the conformance suite: at a faulty server, and at the fake Stripe with its memory of keys."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
import stripe

from dispatchers import Adapter, Deferred, Delivered, InProgress, KeyConflict, Rejected, Unknown
from dispatchers.adapters import StripeAdapter
from dispatchers.testing.conformance import ENTRY, TAGS, AdapterSuite, Scenario
from dispatchers.testing.conformance_http import HttpSuite
from dispatchers.testing.faulty_http import Behaviour, answer
from dispatchers.testing.service_faults import ServiceFault
from dispatchers.testing.stripe_core import API_KEY, Answer, Execution, FakeStripe, Request
from dispatchers.testing.stripe_service import running_stripe
from outbox.keys import encode_native

SECRET = "sk_test_4eC39HqLyjWDarjtT1zdp7dc"
INTENT = {"id": "pi_1", "object": "payment_intent", "status": "succeeded", "client_secret": "pi_1_secret_x"}


def error(status: int, type: str = "invalid_request_error", **details: Any) -> Behaviour:
    return answer(status, json={"error": {"type": type, "message": "said", **details}})


class TestStripe(HttpSuite):
    operation = "stripe.payment_intents.create"
    payload = {"amount": 2000, "currency": "eur", "description": "for jane@example.com"}  # noqa: RUF012
    secrets = (SECRET, "pi_1_secret_x")
    private = ("jane@example.com",)
    client_exceptions = (stripe.StripeError, httpx.HTTPError, httpx.InvalidURL, httpx.StreamError)
    scenarios = (
        Scenario("created", answer(json=INTENT), Delivered),
        Scenario("repeated", answer(json=INTENT, headers={"Idempotent-Replayed": "true"}), Delivered),
        Scenario("declined", error(402, "card_error", code="card_declined"), Rejected),
        Scenario("invalid", error(400, code="parameter_missing"), Rejected),
        Scenario("no object", answer(json=INTENT), Rejected, payload=["text"], requests=0),
        Scenario("key of another request", error(400, "idempotency_error"), KeyConflict),
        Scenario("limited", error(429, "rate_limit_error"), Deferred),
        Scenario("key in use", error(409, code="idempotency_key_in_use"), InProgress),
        Scenario("failed", error(500, "api_error"), Unknown),
        Scenario("something in between", answer(502, body=b"<html>"), Unknown),
    )

    def adapter(self, remote: Any, timeout: timedelta) -> Adapter:
        return StripeAdapter(api_key=SECRET, base_url=remote.url, timeout=timeout)

    def raising(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Adapter:
        def fail(request: httpx.Request) -> httpx.Response:
            raise error

        return StripeAdapter(api_key=SECRET, transport=httpx.MockTransport(fail))


# --- at the fake that remembers keys

KEY = encode_native(TAGS[0])
FORM = {"content-type": "application/x-www-form-urlencoded", "authorization": f"Bearer {API_KEY}"}
CHARGE = {"amount": "2000", "currency": "eur", "metadata[outbox_id]": str(ENTRY)}


class RememberingStripe(FakeStripe):
    """Keeps what it received."""

    def __init__(self) -> None:
        super().__init__()
        self.url = ""
        self.requests: list[bytes] = []

    def receive(self, request: Request) -> Answer | Execution:
        self.requests.append(repr(request).encode())
        return super().receive(request)

    def behave(self, arrange: Callable[[FakeStripe], object]) -> None:
        arrange(self)


def meeting(fault: ServiceFault | None) -> Callable[[FakeStripe], object]:
    return lambda fake: fake.force(fault)


def beginning(**charge: str) -> Callable[[FakeStripe], object]:
    """Another request with the suite's key has begun to execute there, and does not end."""
    request = Request(
        method="POST",
        path="/v1/payment_intents",
        headers={**FORM, "idempotency-key": KEY},
        body=urlencode(CHARGE | charge).encode(),
    )
    return lambda fake: fake.receive(request)


class TestStripeThatRemembers(AdapterSuite):
    operation = "stripe.payment_intents.create"
    payload = {"amount": 2000, "currency": "eur"}  # noqa: RUF012
    secrets = (API_KEY,)
    client_exceptions = ()
    scenarios = (
        Scenario("charged", meeting(None), Delivered),
        Scenario("declined", meeting(None), Rejected, payload={**payload, "payment_method": "pm_card_chargeDeclined"}),
        Scenario("without an amount", meeting(None), Rejected, payload={"currency": "eur"}),
        Scenario("limited", meeting(ServiceFault.RATE_LIMIT), Deferred),
        Scenario("executing", beginning(), InProgress),
        Scenario("another charge under the key", beginning(amount="2001"), KeyConflict),
        Scenario("failed before", meeting(ServiceFault.FAIL_BEFORE), Unknown),
        Scenario("failed after", meeting(ServiceFault.FAIL_AFTER), Unknown),
        Scenario("unavailable", meeting(ServiceFault.UNAVAILABLE), Unknown),
        Scenario("request lost", meeting(ServiceFault.LOSE_REQUEST), Unknown),
        Scenario("answer lost", meeting(ServiceFault.LOSE_RESPONSE), Unknown),
    )

    @contextmanager
    def remote(self) -> Iterator[RememberingStripe]:
        fake = RememberingStripe()
        with running_stripe(fake) as running:
            fake.url = running.url
            yield fake

    def adapter(self, remote: RememberingStripe, timeout: timedelta) -> Adapter:
        return StripeAdapter(api_key=API_KEY, base_url=remote.url, timeout=timeout)
