"""The fake Stripe's objects, as the real SDK sees them: intents, refunds, customers, and any other."""

from datetime import timedelta
from typing import Any

import httpx
import pytest
import stripe
from stripe import StripeClient
from support.stripe_clients import CHARGE, Clock, post, under

from dispatchers.testing.stripe_service import RunningStripe

DECLINED: Any = CHARGE | {"payment_method": "pm_card_chargeDeclined"}


def test_payment_intents_are_listed_at_once_by_customer_and_time(
    client: StripeClient, service: RunningStripe, clock: Clock
) -> None:
    for customer in ("cus_1", "cus_2", "cus_1"):
        client.v1.payment_intents.create(CHARGE | {"customer": customer})
        clock.now += timedelta(seconds=10)
    began = int((clock.now - timedelta(seconds=30)).timestamp())

    def listed(**parameters: Any) -> list[int]:
        return [intent.created - began for intent in client.v1.payment_intents.list(parameters)]  # type: ignore[arg-type]

    assert listed() == [20, 10, 0]
    assert listed(customer="cus_1") == [20, 0]
    assert listed(customer="cus_1", created={"gte": began + 1}) == [20]
    assert listed(created={"gt": began, "lt": began + 20}) == [10]
    assert listed(created={"lte": began + 10}) == [10, 0]
    assert listed(created=began) == [0]


def test_a_long_list_comes_in_pages(client: StripeClient) -> None:
    made = [client.v1.payment_intents.create(CHARGE).id for _ in range(7)]

    first = client.v1.payment_intents.list({"limit": 3})

    assert first.has_more
    assert [intent.id for intent in first.auto_paging_iter()] == made[::-1]
    before = client.v1.payment_intents.list({"limit": 3, "ending_before": made[0]})
    assert [intent.id for intent in before] == made[3:0:-1]


def test_an_intent_is_found_by_its_id_and_an_unknown_one_is_not(client: StripeClient) -> None:
    intent = client.v1.payment_intents.create(CHARGE)

    assert client.v1.payment_intents.retrieve(intent.id).amount == 2000
    with pytest.raises(stripe.InvalidRequestError) as caught:
        client.v1.payment_intents.retrieve("pi_unknown")
    assert caught.value.http_status == 404


def test_a_declined_intent_is_listed_as_not_paid(client: StripeClient) -> None:
    with pytest.raises(stripe.CardError):
        client.v1.payment_intents.create(DECLINED, under("k1"))

    (intent,) = client.v1.payment_intents.list().data
    assert (intent.status, intent.amount_received) == ("requires_payment_method", 0)


def test_a_refund_gives_back_what_is_left_and_no_more(client: StripeClient, service: RunningStripe) -> None:
    intent = client.v1.payment_intents.create(CHARGE)

    part = client.v1.refunds.create({"payment_intent": intent.id, "amount": 500}, under("r1"))
    rest = client.v1.refunds.create({"charge": str(intent.latest_charge)}, under("r2"))
    for _ in range(2):
        with pytest.raises(stripe.InvalidRequestError) as caught:
            client.v1.refunds.create({"payment_intent": intent.id}, under("r3"))

    assert (part.amount, rest.amount) == (500, 1500)
    assert caught.value.code == "charge_already_refunded"
    assert (caught.value.headers or {})["Idempotent-Replayed"] == "true"  # refused while executing, so remembered
    assert [effect.amount for effect in service.ledger.effects if effect.object == "refund"] == [500, 1500]


def test_a_refund_of_nothing_known_is_refused_and_leaves_the_key_free(client: StripeClient) -> None:
    with pytest.raises(stripe.InvalidRequestError) as caught:
        client.v1.refunds.create({"payment_intent": "pi_unknown"}, under("r1"))
    intent = client.v1.payment_intents.create(CHARGE)

    assert caught.value.code == "resource_missing"
    assert client.v1.refunds.create({"payment_intent": intent.id}, under("r1")).amount == 2000


def test_a_customer_is_made_once_changed_and_deleted(client: StripeClient, service: RunningStripe) -> None:
    made = client.v1.customers.create({"email": "a@example.com"}, under("c1"))
    again = client.v1.customers.create({"email": "a@example.com"}, under("c1"))
    changed = client.v1.customers.update(made.id, {"name": "Ada"})
    client.v1.customers.delete(made.id)

    assert again.id == made.id
    assert (changed.email, changed.name) == ("a@example.com", "Ada")
    assert [effect.object for effect in service.ledger.effects] == ["customer"]
    with pytest.raises(stripe.InvalidRequestError):
        client.v1.customers.retrieve(made.id)


def test_any_other_operation_executes_once_under_its_key(client: StripeClient, service: RunningStripe) -> None:
    parameters: Any = {"amount": 900, "currency": "eur", "destination": "acct_9"}
    first = client.v1.transfers.create(parameters, under("t1"))
    again = client.v1.transfers.create(parameters, under("t1"))

    assert again.id == first.id
    assert [(effect.object, effect.amount) for effect in service.ledger.effects] == [("transfer", 900)]


def test_nested_parameters_and_lists_arrive_as_they_were_sent(client: StripeClient) -> None:
    sent: Any = {"address": {"city": "Köln & Bonn", "line1": "a=b"}, "preferred_locales": ["de", "fr"]}

    made = client.v1.customers.create(sent)

    assert made.to_dict()["address"] == sent["address"]
    assert made.to_dict()["preferred_locales"] == ["de", "fr"]


def test_a_path_outside_the_api_is_not_found(http: httpx.Client) -> None:
    assert post(http, path="/v2/core/events").status_code == 404
    assert http.get("/nowhere").status_code == 404
