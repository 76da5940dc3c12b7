"""StripeAdapter, against the real SDK: what leaves, and what each answer means."""

import asyncio
import gzip
import inspect
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl
from uuid import UUID

import httpx
import pytest
import respx
import stripe
import stripe.oauth_error

from dispatchers.adapters import StripeAdapter
from dispatchers.adapters.stripe.adapter import _param_names
from dispatchers.adapters.stripe.outcomes import ROWS, Exchange, outcome_of
from dispatchers.delivery import (
    Deferred,
    Delivered,
    Delivery,
    InProgress,
    KeyConflict,
    Outcome,
    Rejected,
    Unknown,
)
from outbox.errors import ConfigurationError

API_KEY = "sk_test_4eC39HqLyjWDarjtT1zdp7dc"
KEY = "ck1_AAECAwQFBgcICQoLDA0ODxAREhMUFRYX"
ENTRY = UUID("019a0000-0000-8000-8000-000000000001")
CHARGE = {"amount": 2000, "currency": "eur"}
INTENT = {"id": "pi_1", "object": "payment_intent", "status": "succeeded", "client_secret": "pi_1_secret_x"}


def delivery(operation: str = "stripe.payment_intents.create", payload: Any = CHARGE, **fields: Any) -> Delivery:
    given = {"key": KEY, "attempt": 1, "options": {}, "headers": {}, "deadline": 0.0}
    return Delivery(id=ENTRY, operation=operation, body=json.dumps(payload).encode(), **{**given, **fields})


def send(adapter: StripeAdapter, *deliveries: Delivery) -> Outcome:
    """The outcome of the last of `deliveries`."""

    async def each() -> list[Outcome]:
        try:
            return [await adapter.send(each) for each in deliveries or (delivery(),)]
        finally:
            await adapter.aclose()

    return asyncio.run(each())[-1]


def raised(cls: Any, *args: Any, **fields: Any) -> Exception:
    """An exception of the SDK, whose constructors are untyped."""
    made: Exception = cls(*args, **fields)
    return made


def error(status: int, type: str = "invalid_request_error", headers: Any = None, **details: Any) -> httpx.Response:
    return httpx.Response(status, headers=headers, json={"error": {"type": type, "message": "said", **details}})


def form(request: httpx.Request) -> dict[str, str]:
    return dict(parse_qsl(request.content.decode(), keep_blank_values=True))


@pytest.fixture
def adapter() -> StripeAdapter:
    return StripeAdapter(api_key=API_KEY, api_version="2026-10-28.endive")


@pytest.fixture
def api() -> Iterator[respx.MockRouter]:
    """Stripe's API; what a test does not expect is an error."""
    with respx.mock(base_url="https://api.stripe.com", assert_all_called=False) as router:
        yield router


@pytest.fixture
def charges(api: respx.MockRouter) -> respx.Route:
    route: respx.Route = api.post("/v1/payment_intents").respond(json=INTENT, headers={"Request-Id": "req_1"})
    return route


def answered(adapter: StripeAdapter, route: respx.Route, response: httpx.Response) -> Outcome:
    route.mock(return_value=response)
    return send(adapter)


# --- what leaves


def test_the_child_key_is_the_idempotency_key(adapter: StripeAdapter, charges: respx.Route) -> None:
    send(adapter)

    assert charges.calls.last.request.headers["Idempotency-Key"] == KEY


def test_every_attempt_sends_the_same_key_and_bytes(charges: respx.Route) -> None:
    payload = {**CHARGE, "metadata": {"order": "7"}, "payment_method_types": ["card", "ideal"]}

    for attempt in (1, 2):
        send(StripeAdapter(api_key=API_KEY), delivery(payload=payload, attempt=attempt))

    first, second = (call.request for call in charges.calls)
    assert first.content == second.content
    assert first.headers["Idempotency-Key"] == second.headers["Idempotency-Key"]


def test_version_and_account_are_pinned_on_each_request(charges: respx.Route) -> None:
    adapter = StripeAdapter(api_key=API_KEY, api_version="2025-01-01", account="acct_1")

    send(adapter)

    headers = charges.calls.last.request.headers
    assert (headers["Stripe-Version"], headers["Stripe-Account"]) == ("2025-01-01", "acct_1")
    assert adapter.pinned == "stripe version=2025-01-01 account=acct_1 mode=test"


def test_the_version_is_the_sdk_s_own_unless_named(charges: respx.Route) -> None:
    send(StripeAdapter(api_key=API_KEY))

    headers = charges.calls.last.request.headers
    assert headers["Stripe-Version"] == stripe.api_version
    assert "Stripe-Account" not in headers


def test_an_entry_s_options_go_before_the_adapter_s(charges: respx.Route) -> None:
    adapter = StripeAdapter(api_key=API_KEY, api_version="2025-01-01", account="acct_1")

    send(
        adapter,
        delivery(options={"account": "acct_2", "api_version": "2025-02-02"}),
        delivery(options={"account": None}),
    )

    first, second = (call.request.headers for call in charges.calls)
    assert (first["Stripe-Version"], first["Stripe-Account"]) == ("2025-02-02", "acct_2")
    assert "Stripe-Account" not in second


@pytest.mark.parametrize(
    "options", [{"acount": "acct_1"}, {"account": 7}, {"api_version": None}, {"account": "acct_1\r\nX: y"}]
)
def test_a_wrong_option_is_rejected_by_name_before_anything_is_sent(
    adapter: StripeAdapter, charges: respx.Route, options: dict[str, Any]
) -> None:
    outcome = send(adapter, delivery(options=options))

    assert isinstance(outcome, Rejected)
    assert next(iter(options)) in outcome.reason
    assert not charges.called


def test_a_nested_operation_is_reached_by_its_dotted_name(adapter: StripeAdapter, api: respx.MockRouter) -> None:
    route = api.post("/v1/checkout/sessions").respond(json={"id": "cs_1", "object": "checkout.session"})

    outcome = send(adapter, delivery("stripe.checkout.sessions.create", {"mode": "payment"}))

    assert outcome == Delivered({"id": "cs_1", "object": "checkout.session"})
    assert form(route.calls.last.request) == {"mode": "payment", "metadata[outbox_id]": str(ENTRY)}


def test_an_id_of_the_url_is_taken_out_of_the_payload(adapter: StripeAdapter, api: respx.MockRouter) -> None:
    route = api.post("/v1/payment_intents/pi_1/capture").respond(json=INTENT)

    send(adapter, delivery("stripe.payment_intents.capture", {"intent": "pi_1", "amount_to_capture": 500}))

    assert form(route.calls.last.request) == {"amount_to_capture": "500"}


def test_two_ids_of_the_url_go_to_their_places(adapter: StripeAdapter, api: respx.MockRouter) -> None:
    route = api.post("/v1/customers/cus_1/sources/card_1").respond(json={"id": "card_1", "object": "card"})

    send(
        adapter, delivery("stripe.customers.payment_sources.update", {"id": "card_1", "customer": "cus_1", "name": "A"})
    )

    assert form(route.calls.last.request) == {"name": "A"}


def test_an_id_cannot_leave_its_place_in_the_url(adapter: StripeAdapter, api: respx.MockRouter) -> None:
    route = api.post(url__regex=r".*/v1/customers/[^/]+$").respond(json={"id": "cus_1", "object": "customer"})

    send(adapter, delivery("stripe.customers.update", {"customer": "../refunds?charge=ch_1", "name": "A"}))

    assert route.calls.last.request.url.raw_path == b"/v1/customers/..%2Frefunds%3Fcharge%3Dch_1"


@pytest.mark.parametrize("value", [None, "", " ", ".", "..", 7])
def test_a_missing_or_empty_id_is_rejected_before_anything_is_sent(
    adapter: StripeAdapter, api: respx.MockRouter, value: Any
) -> None:
    """POST /v1/customers/ with an empty id would create a customer."""
    outcome = send(adapter, delivery("stripe.customers.update", {"customer": value, "name": "A"}))

    assert outcome == Rejected(
        "stripe.customers.update needs 'customer' in its payload: the id that belongs in the URL, as text"
    )
    assert not api.calls


@pytest.mark.parametrize("payload", [[], "text", 7, None, True])
def test_a_payload_that_is_no_object_is_rejected_before_anything_is_sent(
    adapter: StripeAdapter, charges: respx.Route, payload: Any
) -> None:
    assert isinstance(send(adapter, delivery(payload=payload)), Rejected)
    assert not charges.called


def test_a_payload_that_no_request_can_carry_is_rejected(adapter: StripeAdapter, charges: respx.Route) -> None:
    outcome = send(adapter, delivery(payload={"description": "\ud800"}))

    assert outcome == Rejected("the SDK cannot make a request from this payload: UnicodeEncodeError")
    assert not charges.called


@pytest.mark.parametrize(
    "operation",
    [
        "stripe",
        "stripe.payment_intents",
        "stripe.payment_intents.teleport",
        "stripe.wormholes.create",
        "stripe.payment_intents.create.create",
        "stripe._requestor.request",
        "stripe.payment_intents._request",
    ],
)
def test_an_operation_that_the_sdk_lacks_waits_for_a_newer_one(
    adapter: StripeAdapter, api: respx.MockRouter, operation: str
) -> None:
    outcome = send(adapter, delivery(operation))

    assert isinstance(outcome, Deferred)
    assert "not in this version of the SDK" in outcome.reason
    assert not api.calls


@pytest.mark.parametrize(
    ("operation", "payload"),
    [("payment_intents.list", {}), ("payment_intents.retrieve", {"intent": "pi_1"}), ("quotes.pdf", {"quote": "qt_1"})],
)
def test_a_read_is_refused_before_anything_is_sent(
    adapter: StripeAdapter, api: respx.MockRouter, operation: str, payload: Any
) -> None:
    assert isinstance(send(adapter, delivery(f"stripe.{operation}", payload)), Rejected)
    assert not api.calls


def test_every_write_of_the_sdk_is_served(adapter: StripeAdapter) -> None:
    served = [adapter._operation(f"stripe.{name}") for name in writes(adapter._client.v1)]

    assert len(served) > 300
    assert sum(operation.takes_metadata for operation in served) > 40


def test_no_write_has_a_parameter_named_like_an_id_of_its_url(adapter: StripeAdapter) -> None:
    """Else the payload could not distinguish them."""
    operations = [adapter._operation(f"stripe.{name}") for name in writes(adapter._client.v1)]

    clashes = [operation for operation in operations if _param_names(operation.method) & set(operation.ids)]

    assert clashes == []


def writes(service: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of all operations of the SDK that POST or DELETE."""
    for name in vars(inspect.getmodule(type(service))).get("_subservices", {}):
        yield from writes(getattr(service, name), f"{prefix}{name}.")
    for name, method in inspect.getmembers(type(service), inspect.iscoroutinefunction):
        if name.endswith("_async") and not name.startswith("_") and {"post", "delete"} & set(method.__code__.co_consts):
            yield prefix + name.removesuffix("_async")


def test_a_delete_carries_the_key_too(adapter: StripeAdapter, api: respx.MockRouter) -> None:
    route = api.delete("/v1/customers/cus_1").respond(json={"id": "cus_1", "object": "customer", "deleted": True})

    outcome = send(adapter, delivery("stripe.customers.delete", {"customer": "cus_1"}))

    assert isinstance(outcome, Delivered)
    assert route.calls.last.request.headers["Idempotency-Key"] == KEY


@pytest.mark.parametrize(
    ("metadata", "sent"),
    [
        (None, {"metadata[outbox_id]": str(ENTRY)}),
        ({"order": "7"}, {"metadata[order]": "7", "metadata[outbox_id]": str(ENTRY)}),
        ({"outbox_id": "mine"}, {"metadata[outbox_id]": "mine"}),
        ("", {"metadata": ""}),
    ],
)
def test_what_is_created_bears_the_entry_s_id_unless_the_payload_has_one(
    adapter: StripeAdapter, charges: respx.Route, metadata: Any, sent: dict[str, str]
) -> None:
    send(adapter, delivery(payload={"amount": 1, "metadata": metadata}))

    assert form(charges.calls.last.request) == {"amount": "1", **sent}


def test_a_full_metadata_is_left_alone(adapter: StripeAdapter, charges: respx.Route) -> None:
    """The added key would be the 51st, and turn a good request into a 400."""
    send(adapter, delivery(payload={"metadata": {f"k{n}": "v" for n in range(50)}}))

    assert "metadata[outbox_id]" not in form(charges.calls.last.request)


def test_neither_an_update_nor_what_has_no_metadata_gets_the_key(adapter: StripeAdapter, api: respx.MockRouter) -> None:
    update = api.post("/v1/customers/cus_1").respond(json={"id": "cus_1", "object": "customer"})
    portal = api.post("/v1/billing_portal/sessions").respond(json={"id": "bps_1", "object": "billing_portal.session"})

    send(
        adapter,
        delivery("stripe.customers.update", {"customer": "cus_1", "name": "A"}),
        delivery("stripe.billing_portal.sessions.create", {"customer": "cus_1"}),
    )

    assert form(update.calls.last.request) == {"name": "A"}
    assert form(portal.calls.last.request) == {"customer": "cus_1"}


def test_compression_and_telemetry_stay_off(adapter: StripeAdapter, charges: respx.Route) -> None:
    send(adapter, delivery(), delivery())

    headers = charges.calls.last.request.headers
    assert headers["Accept-Encoding"] == "identity"
    assert "X-Stripe-Client-Telemetry" not in headers


# --- what an answer means


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


def test_a_success_too_large_to_hold_is_delivered(adapter: StripeAdapter, charges: respx.Route) -> None:
    outcome = answered(adapter, charges, httpx.Response(200, content=b'{"id": "' + b"x" * 5_000_000 + b'"}'))

    assert outcome == Delivered({"unparsed": True, "http_status": 200})


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


def test_a_redirect_is_not_followed(adapter: StripeAdapter, charges: respx.Route, api: respx.MockRouter) -> None:
    elsewhere = api.post("/elsewhere").respond(json=INTENT)

    outcome = answered(adapter, charges, httpx.Response(307, headers={"Location": "/elsewhere"}))

    assert isinstance(outcome, Unknown)
    assert not elsewhere.called


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("120", 120),
        (" 86400 ", 86400),
        ("Wed, 21 Oct 2026 07:30:00 GMT", 120),
        ("Wed, 21 Oct 2026 09:30:00 +0200", 120),
        ("Wed, 21 Oct 2026 07:30:00 -0000", 120),
        ("Wed, 21 Oct 2026 07:00:00 GMT", None),
        ("-1", None),
        ("1.5", None),
        ("1e9", None),
        ("9" * 5000, None),
        ("²", None),
        ("soon", None),
        ("Wed, 99 Foo 2026 07:30:00 GMT", None),
        ("", None),
    ],
)
def test_retry_after_is_honoured_in_full_and_nonsense_ignored(
    adapter: StripeAdapter, charges: respx.Route, text: str, seconds: int | None
) -> None:
    headers = [(b"Date", b"Wed, 21 Oct 2026 07:28:00 GMT"), (b"Retry-After", text.encode())]

    outcome = answered(adapter, charges, error(429, "rate_limit_error", headers))

    assert isinstance(outcome, Deferred)
    assert outcome.after == (None if seconds is None else timedelta(seconds=seconds))


# --- every exception of the SDK has an answer


def descendants(cls: type[BaseException]) -> Iterator[type[BaseException]]:
    for child in cls.__subclasses__():
        yield child
        yield from descendants(child)


def test_every_exception_of_the_sdk_has_a_row_of_its_own() -> None:
    without = {cls for cls in (stripe.StripeError, *descendants(stripe.StripeError)) if cls not in ROWS}

    assert without == set()


def test_an_exception_without_a_row_is_answered_as_its_parent() -> None:
    class NewError(stripe.RateLimitError):
        """Of a later SDK."""

    assert isinstance(outcome_of(NewError("m", http_status=429), Exchange(started=True)), Deferred)


@pytest.mark.parametrize(
    ("exception", "expected"),
    [
        (
            raised(stripe.CardError, "m", "p", "c", http_status=402),
            Rejected("CardError: HTTP 402", True, {"http_status": 402}),
        ),
        (stripe.AuthenticationError("no API key"), Deferred("AuthenticationError", cooldown=True)),
        (raised(stripe.APIConnectionError, "m"), Unknown("APIConnectionError")),
        (raised(stripe.SignatureVerificationError, "m", "sig"), Unknown("SignatureVerificationError")),
        (
            raised(stripe.oauth_error.InvalidGrantError, "c", "d", http_status=400),
            Unknown("InvalidGrantError: HTTP 400"),
        ),
        (stripe.QuotaExceededError("m", http_status=400), Deferred("QuotaExceededError: HTTP 400", cooldown=True)),
        (stripe.StripeError("m", http_status=200), Delivered({"unparsed": True, "http_status": 200})),
        (RuntimeError("unforeseen"), Unknown("RuntimeError")),
    ],
)
def test_an_exception_raised_after_the_send_began_means(exception: Exception, expected: Outcome) -> None:
    assert outcome_of(exception, Exchange(started=True)) == expected


# --- the connection, over real sockets

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[str]:
    """A server on a loopback port, at this base URL; each of its connections is handed to `answer`, then closed."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def whole_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return head + await reader.readexactly(int(length.split(b":")[1]))


def send_to(answer: Answer, scheme: str = "http", timeout: timedelta = timedelta(seconds=5)) -> Outcome:
    async def scenario() -> Outcome:
        async with listening(answer) as url:
            adapter = StripeAdapter(api_key=API_KEY, base_url=url.replace("http", scheme, 1), timeout=timeout)
            try:
                return await adapter.send(delivery())
            finally:
                await adapter.aclose()

    return asyncio.run(scenario())


async def closing_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"not TLS")


def test_a_refused_connection_was_surely_not_sent() -> None:
    async def closed_port() -> str:
        async with listening(closing_at_once) as url:
            return url

    adapter = StripeAdapter(api_key=API_KEY, base_url=asyncio.run(closed_port()))

    assert send(adapter) == Deferred("ConnectError")


def test_an_unresolvable_host_was_surely_not_sent() -> None:
    adapter = StripeAdapter(api_key=API_KEY, base_url="http://stripe.invalid")

    assert isinstance(send(adapter), Deferred)


def test_a_failed_tls_handshake_was_surely_not_sent() -> None:
    assert isinstance(send_to(closing_at_once, scheme="https"), Deferred)


def test_a_refusal_that_another_send_met_is_no_proof_for_this_one() -> None:
    """Python chains an error to whatever was being handled; only the cause belongs to this send."""
    try:
        raise httpx.ConnectError("of another send")
    except httpx.ConnectError:
        try:
            raise raised(stripe.APIConnectionError, "ReadError") from httpx.ReadError("of this one")
        except stripe.APIConnectionError as error:
            outcome = outcome_of(error, Exchange(started=True))

    assert isinstance(outcome, Unknown)


def test_an_answer_lost_after_the_request_was_read_is_unknown() -> None:
    read = []

    async def lose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read.append(await whole_request(reader))

    outcome = send_to(lose)

    assert isinstance(outcome, Unknown)
    assert len(read) == 1
    assert KEY.encode() in read[0]


def test_a_success_whose_body_breaks_off_is_delivered() -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\nRequest-Id: req_3\r\n\r\n{"id": "pi_')

    assert send_to(break_off) == Delivered({"unparsed": True, "http_status": 200, "request_id": "req_3"})


def test_no_answer_in_time_is_unknown() -> None:
    async def dawdle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        await reader.read()

    assert send_to(dawdle, timeout=timedelta(seconds=1)) == Unknown("ReadTimeout")


async def succeed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    body = json.dumps(INTENT).encode()
    while True:
        try:
            await whole_request(reader)
        except asyncio.IncompleteReadError:
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")

    assert isinstance(send_to(succeed), Delivered)


def test_a_connection_is_reused_and_a_cancelled_send_harms_no_other() -> None:
    connections, hangs = [], asyncio.Event()

    async def first_hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        if len(connections) == 1:
            await whole_request(reader)
            hangs.set()
            await reader.read()
        else:
            await succeed(reader, writer)

    async def scenario() -> list[Outcome]:
        async with listening(first_hangs) as url:
            adapter = StripeAdapter(api_key=API_KEY, base_url=url)
            sending = asyncio.ensure_future(adapter.send(delivery()))
            await hangs.wait()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            outcomes = [await adapter.send(delivery()) for _ in range(3)]
            await adapter.aclose()
            return outcomes

    outcomes = asyncio.run(scenario())

    assert [type(outcome) for outcome in outcomes] == [Delivered] * 3
    assert len(connections) == 2


def test_an_adapter_outlives_its_event_loop(adapter: StripeAdapter, charges: respx.Route) -> None:
    for _ in range(2):
        assert isinstance(asyncio.run(adapter.send(delivery())), Delivered)


# --- secrets


def test_neither_the_api_key_nor_the_payload_is_ever_shown(
    charges: respx.Route, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    adapter = StripeAdapter(api_key=API_KEY)
    payload = {"description": "for jane@example.com", "amount": 98765}
    shown = [repr(adapter), str(adapter), adapter.pinned]

    for status in (400, 401, 402, 403, 409, 429, 500):
        quoted = f"{API_KEY} and jane@example.com and 98765"
        charges.mock(return_value=error(status, code=quoted, param=quoted, message=quoted, decline_code=quoted))
        shown.append(repr(send(adapter, delivery(payload=payload))))

    assert not [text for text in shown if API_KEY in text or "jane" in text or "98765" in text]


@pytest.mark.parametrize("api_key", ["", "sk_test_1\n", "sk test", None, b"sk_test_1"])
def test_a_malformed_api_key_is_refused_without_being_shown(api_key: Any) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        StripeAdapter(api_key=api_key)

    assert "sk_test_1" not in str(refusal.value)


@pytest.mark.parametrize("wrong", [{"base_url": "localhost:12111"}, {"account": "acct\n1"}, {"api_version": "2025 "}])
def test_a_setting_that_cannot_work_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        StripeAdapter(api_key=API_KEY, **wrong)


def test_a_fake_s_address_replaces_every_host_of_the_sdk() -> None:
    adapter = StripeAdapter(api_key=API_KEY, base_url="http://127.0.0.1:12111/")

    assert set(adapter._client._requestor.base_addresses.values()) == {"http://127.0.0.1:12111"}
