"""The inbox of a webhook endpoint on loopback, with events that the stripe package signs and verifies: docs/inbox-recipes.md."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
import stripe
from support.consumer import Billing, Poison
from support.database import Database

import outbox
from outbox import inboxes

pytestmark = pytest.mark.as_app

SECRET = "whsec_test"
PAID = {
    "id": "evt_1",
    "object": "event",
    "type": "invoice.paid",
    "livemode": True,
    "api_version": stripe.api_version,
    "data": {"object": {"id": "in_1", "object": "invoice"}},
}


class Endpoint(ThreadingHTTPServer):
    """The recipe: verify the signature, handle, commit, answer 2xx. Stripe sends again whatever was answered otherwise."""

    def __init__(self, billing: Billing) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.billing = billing
        self.dies_before_it_answers = False

    def receive(self, payload: bytes, signature: str | None) -> tuple[int, dict[str, str]]:
        try:
            event = stripe.Webhook.construct_event(payload, signature, SECRET)
        except (ValueError, stripe.SignatureVerificationError):
            return 400, {}
        try:
            self.billing.handle(inboxes.from_stripe(event))
        except outbox.KeyInFlight as error:
            return error.status, {"Retry-After": str(error.retry_after.seconds)}
        except Poison:
            return 500, {}
        return 204, {}


class Request(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        payload = self.rfile.read(int(self.headers["Content-Length"]))
        status, headers = self.server.receive(payload, self.headers["Stripe-Signature"])
        if self.server.dies_before_it_answers:
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None: ...


class Stripe:
    """Delivers events to an endpoint, each delivery signed again."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.url = f"http://127.0.0.1:{endpoint.server_port}/webhooks"

    def deliver(self, event: dict[str, Any] = PAID, *, secret: str = SECRET, age_seconds: int = 0) -> httpx.Response:
        payload = json.dumps(event)
        now = int(time.time()) - age_seconds
        header = stripe.WebhookSignature.generate_signature_header(payload, secret, now)  # type: ignore[no-untyped-call]
        return httpx.post(self.url, content=payload, headers={"Stripe-Signature": header}, trust_env=False)


@pytest.fixture
def billing(postgresql: Database, ob: outbox.Outbox) -> Billing:
    return Billing(postgresql, ob)


@pytest.fixture
def endpoint(billing: Billing) -> Iterator[Endpoint]:
    with Endpoint(billing) as endpoint:
        thread = threading.Thread(target=endpoint.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield endpoint
        endpoint.shutdown()
        thread.join()


@pytest.fixture
def service(endpoint: Endpoint) -> Stripe:
    return Stripe(endpoint)


def test_an_event_is_handled_and_every_further_delivery_is_a_duplicate(service: Stripe, billing: Billing) -> None:
    answers = [service.deliver(age_seconds=age).status_code for age in (60, 30, 0)]

    assert answers == [204, 204, 204]
    assert billing.orders == ["evt_1"]
    assert billing.duplicates == ["evt_1", "evt_1"]


def test_an_event_whose_answer_was_lost_comes_again_and_is_a_duplicate(
    service: Stripe, endpoint: Endpoint, billing: Billing
) -> None:
    endpoint.dies_before_it_answers = True
    with pytest.raises(httpx.RemoteProtocolError):
        service.deliver()
    endpoint.dies_before_it_answers = False

    assert service.deliver().status_code == 204
    assert billing.orders == billing.duplicates == ["evt_1"]


def test_an_event_in_flight_elsewhere_is_refused_so_that_it_comes_again(service: Stripe, billing: Billing) -> None:
    with billing.elsewhere({"scope": "stripe:live::", "message_id": "evt_1"}):
        refused = service.deliver()

    assert (refused.status_code, refused.headers["Retry-After"]) == (409, "1")
    assert service.deliver().status_code == 204
    assert billing.orders == billing.duplicates == ["evt_1"]


def test_a_poison_event_is_handled_once_when_it_is_sent_again_by_hand(service: Stripe, billing: Billing) -> None:
    """Stripe has no dead-letter queue: it gives up after days, and "Resend" delivers the same event id."""
    billing.poison = {"evt_1"}
    assert [service.deliver().status_code for _ in range(3)] == [500] * 3
    assert billing.nothing_is_stored

    billing.poison.clear()
    assert [service.deliver().status_code for _ in range(2)] == [204] * 2

    assert billing.orders == billing.duplicates == ["evt_1"]


def test_an_event_read_from_the_api_after_its_webhook_is_a_duplicate(service: Stripe, billing: Billing) -> None:
    service.deliver()
    listed = stripe.Event.construct_from(PAID, key="sk_test")

    billing.handle(inboxes.from_stripe(listed))

    assert billing.orders == billing.duplicates == ["evt_1"]


@pytest.mark.parametrize("forged", [{"secret": "whsec_other"}, {"age_seconds": 3600}])
def test_a_forged_event_cannot_use_up_the_id_of_a_real_one(
    service: Stripe, billing: Billing, forged: dict[str, Any]
) -> None:
    assert service.deliver(**forged).status_code == 400
    assert billing.nothing_is_stored

    assert service.deliver().status_code == 204
    assert billing.orders == ["evt_1"]


@pytest.mark.parametrize("unverified", [PAID, json.dumps(PAID), json.dumps(PAID).encode(), None])
def test_a_body_that_was_merely_parsed_is_refused_and_not_shown(unverified: object) -> None:
    with pytest.raises(outbox.InvalidValue) as caught:
        inboxes.from_stripe(unverified)

    assert str(caught.value) == (
        f"event {type(unverified).__name__!r}: is not an event: pass the result of stripe.Webhook.construct_event, which verifies"
        " the signature"
    )


def event(**changed: Any) -> stripe.Event:
    return stripe.Event.construct_from(PAID | changed, key="sk_test")


def test_accounts_and_modes_are_distinguished() -> None:
    identities = [
        inboxes.from_stripe(event()),
        inboxes.from_stripe(event(livemode=False)),
        inboxes.from_stripe(event(account="acct_A")),
        inboxes.from_stripe(event(account="acct_B")),
        inboxes.from_stripe(event(), account="ours in Europe"),
        inboxes.from_stripe(event(account="acct_A"), account="ours in Europe"),
        inboxes.from_stripe(event(object="v2.core.event", context="acct_C")),
    ]

    assert len({identity["scope"] for identity in identities}) == len(identities)
    assert {identity["message_id"] for identity in identities} == {"evt_1"}


def test_a_notification_of_api_v2_has_its_event_id() -> None:
    body = PAID | {"object": "v2.core.event", "created": "2026-01-01T00:00:00Z", "context": "acct_C"}
    client = stripe.StripeClient("sk_test")
    payload = json.dumps(body)
    header = stripe.WebhookSignature.generate_signature_header(payload, SECRET, int(time.time()))  # type: ignore[no-untyped-call]

    notification = client.parse_event_notification(payload, header, SECRET)

    assert inboxes.from_stripe(notification) == {"scope": "stripe:live::acct_C", "message_id": "evt_1"}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (event().data.object, "is not an event but the object of one: pass the event itself"),
        (event(livemode=None), "does not say whether it is of live or test mode: 'livemode' is missing"),
    ],
)
def test_what_an_event_is_about_and_one_of_no_mode_are_refused(wrong: Any, text: str) -> None:
    with pytest.raises(outbox.InvalidValue) as caught:
        inboxes.from_stripe(wrong)

    assert str(caught.value) == f"event {type(wrong).__name__!r}: {text}"
