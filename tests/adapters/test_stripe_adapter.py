"""StripeAdapter, against the real SDK: what leaves, and which settings are refused."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import respx
import stripe
import stripe.oauth_error
from support.stripe_sends import API_KEY, ENTRY, INTENT, KEY, delivery, form, send

from dispatchers.adapters import StripeAdapter
from dispatchers.adapters.stripe.adapter import _param_names
from dispatchers.delivery import Deferred, Delivered, Rejected
from outbox.errors import ConfigurationError


@pytest.fixture
def adapter() -> StripeAdapter:
    return StripeAdapter(api_key=API_KEY, api_version="2026-10-28.endive")


# --- what leaves


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

    assert len(served) > 290  # 294 in stripe 15.0
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


# --- secrets


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
