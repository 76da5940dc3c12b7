"""StripeAdapter, against the real SDK: what each of Stripe's answers means."""

import gzip
from datetime import timedelta
from typing import Any

import httpx
import pytest
import respx
from support.stripe_sends import API_KEY, INTENT, answered, error, send

from dispatchers.adapters import StripeAdapter
from dispatchers.delivery import Deferred, Delivered, InProgress, KeyConflict, Rejected, Unknown


@pytest.fixture
def adapter() -> StripeAdapter:
    return StripeAdapter(api_key=API_KEY, api_version="2026-10-28.endive")


def test_a_success_remembers_little_and_no_secret(adapter: StripeAdapter, charges: respx.Route) -> None:
    outcome = send(adapter)

    assert outcome == Delivered(
        {"id": "pi_1", "object": "payment_intent", "status": "succeeded", "request_id": "req_1"}
    )


def test_a_repeated_answer_is_flagged_and_counted(adapter: StripeAdapter, charges: respx.Route) -> None:
    outcome = answered(adapter, charges, httpx.Response(200, json=INTENT, headers={"Idempotent-Replayed": "true"}))

    assert isinstance(outcome, Delivered)
    assert outcome.replayed
    assert adapter.replays == 1


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(200, text="<html>"),
        httpx.Response(200, content=b""),
        httpx.Response(200, content=b"\xff\xfe"),
        httpx.Response(200, content=b'{"id": "pi_'),
        httpx.Response(200, content=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"}),
        httpx.Response(200, json=[]),
        httpx.Response(200, json="text"),
        httpx.Response(200, json=None),
        httpx.Response(200, json=INTENT, headers={"Stripe-Notice": "a warning, which pytest makes an error"}),
    ],
)
def test_a_success_that_cannot_be_read_is_delivered(
    adapter: StripeAdapter, charges: respx.Route, response: httpx.Response
) -> None:
    outcome = answered(adapter, charges, response)

    assert isinstance(outcome, Delivered)
    assert outcome.result["unparsed"] is True


def test_a_decline_is_conclusive_and_keeps_its_codes(adapter: StripeAdapter, charges: respx.Route) -> None:
    details = {
        "code": "card_declined",
        "decline_code": "insufficient_funds",
        "payment_intent": INTENT,
        "param": "source",
    }

    outcome = answered(adapter, charges, error(402, "card_error", {"Request-Id": "req_2"}, **details))

    assert outcome == Rejected(
        "card_error: card_declined/insufficient_funds, param source, HTTP 402, req_2",
        conclusive=True,
        result={
            "type": "card_error",
            "code": "card_declined",
            "decline_code": "insufficient_funds",
            "param": "source",
            "http_status": 402,
            "request_id": "req_2",
            "payment_intent": "pi_1",
        },
    )


@pytest.mark.parametrize("status", [400, 404, 405])
@pytest.mark.parametrize("stored", [False, True])
def test_an_invalid_request_is_conclusive_only_when_the_answer_was_stored(
    adapter: StripeAdapter, charges: respx.Route, status: int, stored: bool
) -> None:
    headers = {"Idempotent-Replayed": "true"} if stored else {}

    outcome = answered(adapter, charges, error(status, code="parameter_missing", param="amount", headers=headers))

    assert isinstance(outcome, Rejected)
    assert outcome.conclusive is stored
    assert outcome.reason == f"invalid_request_error: parameter_missing, param amount, HTTP {status}"


@pytest.mark.parametrize("status", [400, 409, 422])
def test_a_key_used_for_another_request_is_a_conflict_whatever_the_status(
    adapter: StripeAdapter, charges: respx.Route, status: int
) -> None:
    assert isinstance(answered(adapter, charges, error(status, "idempotency_error")), KeyConflict)


@pytest.mark.parametrize("type", ["invalid_request_error", "idempotency_error"])
@pytest.mark.parametrize("status", [400, 409])
def test_a_key_in_use_is_in_progress(adapter: StripeAdapter, charges: respx.Route, status: int, type: str) -> None:
    response = error(status, type, {"Retry-After": "2"}, code="idempotency_key_in_use")

    assert answered(adapter, charges, response) == InProgress(timedelta(seconds=2))


@pytest.mark.parametrize("status", [409, 429])
def test_a_locked_object_defers(adapter: StripeAdapter, charges: respx.Route, status: int) -> None:
    outcome = answered(adapter, charges, error(status, code="lock_timeout"))

    assert isinstance(outcome, Deferred)
    assert not outcome.cooldown  # it is about this object alone


def test_any_other_conflict_is_unknown(adapter: StripeAdapter, charges: respx.Route) -> None:
    assert isinstance(answered(adapter, charges, error(409)), Unknown)


@pytest.mark.parametrize("status", [401, 403, 429])
def test_who_is_not_let_in_comes_again(adapter: StripeAdapter, charges: respx.Route, status: int) -> None:
    response = error(status, headers={"Retry-After": "7"})

    outcome = answered(adapter, charges, response)

    assert isinstance(outcome, Deferred)
    assert outcome.after == timedelta(seconds=7)
    assert outcome.cooldown


@pytest.mark.parametrize("status", [401, 403])
def test_a_stored_refusal_of_the_api_key_ends_the_entry(
    adapter: StripeAdapter, charges: respx.Route, status: int
) -> None:
    outcome = answered(adapter, charges, error(status, headers={"Idempotent-Replayed": "true"}))

    assert isinstance(outcome, Rejected)
    assert outcome.conclusive


def test_a_server_error_is_unknown_and_is_asked_for_once(adapter: StripeAdapter, charges: respx.Route) -> None:
    """The SDK would by itself ask three times."""
    outcome = answered(adapter, charges, error(500, "api_error", {"Stripe-Should-Retry": "true"}))

    assert outcome == Unknown("api_error: HTTP 500")
    assert charges.call_count == 1


@pytest.mark.parametrize("headers", [{"Stripe-Should-Retry": "false"}, {"Idempotent-Replayed": "true"}])
def test_a_stored_server_error_is_final(adapter: StripeAdapter, charges: respx.Route, headers: Any) -> None:
    outcome = answered(adapter, charges, error(500, "api_error", headers))

    assert isinstance(outcome, Unknown)
    assert outcome.final


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(502, text="<html>Bad Gateway"),
        httpx.Response(503, json=[]),
        httpx.Response(500, json={"error": "text"}),
        httpx.Response(500, json={"error": ["list"]}),
        httpx.Response(500, json={"error": "invalid_client"}),
        httpx.Response(400, text="<html>"),
        httpx.Response(402, json={}),
        httpx.Response(418, json={"error": None}),
        error(424, "api_error"),
    ],
)
def test_an_answer_that_may_not_be_stripe_s_proves_nothing(
    adapter: StripeAdapter, charges: respx.Route, response: httpx.Response
) -> None:
    assert isinstance(answered(adapter, charges, response), Unknown)


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_fault_of_stripes_own_is_in_doubt_whatever_its_status(
    adapter: StripeAdapter, charges: respx.Route, status: int
) -> None:
    assert answered(adapter, charges, error(status, "api_error")) == Unknown(f"api_error: HTTP {status}")
