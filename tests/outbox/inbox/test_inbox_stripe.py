"""The inbox of a webhook endpoint, with events that the stripe package signs and verifies: docs/inbox-recipes.md."""

import json
import time
from typing import Any

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


class Endpoint:
    """The recipe: verify the signature, handle, commit, answer 2xx. Stripe sends again whatever was answered otherwise."""

    def __init__(self, billing: Billing) -> None:
        self.billing = billing

    def receive(self, event: dict[str, Any] = PAID, *, secret: str = SECRET, age_seconds: int = 0) -> int:
        """The status of the answer to a delivery, each of which Stripe signs again."""
        payload = json.dumps(event)
        try:
            verified = stripe.Webhook.construct_event(payload, signature(payload, secret, age_seconds), SECRET)
        except stripe.SignatureVerificationError:
            return 400
        try:
            self.billing.handle(inboxes.from_stripe(verified))
        except outbox.KeyInFlight as error:
            return error.status
        except Poison:
            return 500
        return 204


def signature(payload: str, secret: str = SECRET, age_seconds: int = 0) -> Any:
    signed_at = int(time.time()) - age_seconds
    return stripe.WebhookSignature.generate_signature_header(payload, secret, signed_at)  # type: ignore[no-untyped-call]


@pytest.fixture
def billing(postgresql: Database, ob: outbox.Outbox) -> Billing:
    return Billing(postgresql, ob)


@pytest.fixture
def endpoint(billing: Billing) -> Endpoint:
    return Endpoint(billing)


def test_an_event_is_handled_and_every_further_delivery_is_a_duplicate(endpoint: Endpoint, billing: Billing) -> None:
    answers = [endpoint.receive(age_seconds=age) for age in (60, 30, 0)]

    assert answers == [204, 204, 204]
    assert billing.orders == ["evt_1"]
    assert billing.duplicates == ["evt_1", "evt_1"]


def test_an_event_in_flight_elsewhere_is_refused_so_that_it_comes_again(endpoint: Endpoint, billing: Billing) -> None:
    with billing.elsewhere({"scope": "stripe:live::", "message_id": "evt_1"}):
        assert endpoint.receive() == 409

    assert endpoint.receive() == 204
    assert billing.orders == billing.duplicates == ["evt_1"]


def test_a_poison_event_is_handled_once_when_it_is_sent_again_by_hand(endpoint: Endpoint, billing: Billing) -> None:
    """Stripe has no dead-letter queue: it gives up after days, and "Resend" delivers the same event id."""
    billing.poison = {"evt_1"}
    assert endpoint.receive() == 500
    assert billing.nothing_is_stored

    billing.poison.clear()
    assert [endpoint.receive() for _ in range(2)] == [204] * 2

    assert billing.orders == billing.duplicates == ["evt_1"]


def test_an_event_read_from_the_api_after_its_webhook_is_a_duplicate(endpoint: Endpoint, billing: Billing) -> None:
    endpoint.receive()
    listed = stripe.Event.construct_from(PAID, key="sk_test")

    billing.handle(inboxes.from_stripe(listed))

    assert billing.orders == billing.duplicates == ["evt_1"]


@pytest.mark.parametrize("forged", [{"secret": "whsec_other"}, {"age_seconds": 3600}])
def test_a_forged_event_cannot_use_up_the_id_of_a_real_one(
    endpoint: Endpoint, billing: Billing, forged: dict[str, Any]
) -> None:
    assert endpoint.receive(**forged) == 400
    assert billing.nothing_is_stored

    assert endpoint.receive() == 204
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

    notification = client.parse_event_notification(payload, signature(payload), SECRET)

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
