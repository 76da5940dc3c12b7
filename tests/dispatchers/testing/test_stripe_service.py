"""The fake Stripe, spoken to by the real SDK and by a bare HTTP client: each rule of keys, its faults and its objects."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import httpx
import pytest
import stripe
from stripe import StripeClient
from support.stripe_clients import CHARGE, Clock, headers, post, sdk, under

from dispatchers.testing.service_faults import Faults, ServiceFault
from dispatchers.testing.stripe_core import API_KEY, Answer, Execution, FakeStripe, Request
from dispatchers.testing.stripe_service import RunningStripe, running_stripe

# --- executing once


def test_a_payment_intent_charges_and_the_ledger_says_what(client: StripeClient, service: RunningStripe) -> None:
    intent = client.v1.payment_intents.create(CHARGE, under("k1"))

    (charge,) = service.ledger.charges
    assert intent.status == "succeeded"
    assert (charge.parent, charge.id) == (intent.id, intent.latest_charge)
    assert (charge.key, charge.amount, charge.currency) == ("k1", 2000, "eur")
    assert charge.metadata == {"order_id": "o 1"}
    assert charge.created == datetime(2026, 11, 1, 12, tzinfo=UTC)


def test_a_repeat_under_one_key_gets_the_first_answer_and_charges_nothing(
    client: StripeClient, service: RunningStripe
) -> None:
    first = client.v1.payment_intents.create(CHARGE, under("k1"))
    again = client.v1.payment_intents.create(CHARGE, under("k1"))

    assert again.to_dict() == first.to_dict()
    assert len(service.ledger.charges) == 1
    assert headers(again)["idempotent-replayed"] == "true"
    assert headers(again)["original-request"] == headers(first)["request-id"] != headers(again)["request-id"]
    assert "idempotent-replayed" not in headers(first)


def test_without_a_key_every_request_charges(http: httpx.Client, service: RunningStripe) -> None:
    post(http)
    post(http)

    assert len(service.ledger.charges) == 2


def test_requests_with_the_same_parameters_in_another_order_are_the_same(
    http: httpx.Client, service: RunningStripe
) -> None:
    post(http, "k1", amount="2000", currency="eur")
    again = post(http, "k1", currency="eur", amount="2000")

    assert again.headers["idempotent-replayed"] == "true"
    assert len(service.ledger.charges) == 1


def test_racing_requests_under_one_key_charge_once(service: RunningStripe) -> None:
    service.fake.faults = Faults(latency=timedelta(milliseconds=2), slow=0.5, slow_for=timedelta(milliseconds=50))
    barrier = threading.Barrier(10)

    def race(_: int) -> int:
        with httpx.Client(
            base_url=service.url, headers={"Authorization": f"Bearer {API_KEY}"}, trust_env=False
        ) as http:
            barrier.wait()
            return post(http, "k1").status_code

    with ThreadPoolExecutor(10) as pool:
        statuses = set(pool.map(race, range(10)))

    assert statuses <= {200, 409}
    assert 200 in statuses
    assert len(service.ledger.charges) == 1


# --- what belongs to a key


def test_other_parameters_under_a_used_key_are_an_idempotency_error(
    client: StripeClient, service: RunningStripe
) -> None:
    client.v1.payment_intents.create(CHARGE, under("k1"))

    with pytest.raises(stripe.IdempotencyError) as caught:
        client.v1.payment_intents.create(CHARGE | {"amount": 1}, under("k1"))

    assert caught.value.http_status == 400
    assert caught.value.error is not None
    assert caught.value.error.type == "idempotency_error"
    assert len(service.ledger.charges) == 1


def test_another_endpoint_under_a_used_key_is_an_idempotency_error(client: StripeClient) -> None:
    client.v1.payment_intents.create(CHARGE, under("k1"))

    with pytest.raises(stripe.IdempotencyError, match="same endpoint"):
        client.v1.customers.create({}, under("k1"))


def test_keys_of_two_accounts_do_not_meet(service: RunningStripe) -> None:
    service.fake.accounts["sk_test_other"] = "acct_other"

    sdk(service.url).v1.payment_intents.create(CHARGE, under("k1"))
    sdk(service.url, "sk_test_other").v1.payment_intents.create(CHARGE, under("k1"))
    sdk(service.url).v1.payment_intents.create(CHARGE, under("k1", stripe_account="acct_connected"))

    assert [charge.account for charge in service.ledger.charges] == ["acct_fake", "acct_other", "acct_connected"]


def test_a_key_is_remembered_until_its_window_ends_and_then_executes_again(
    client: StripeClient, service: RunningStripe, clock: Clock
) -> None:
    first = client.v1.payment_intents.create(CHARGE, under("k1"))

    clock.now += timedelta(hours=24, microseconds=-1)
    assert client.v1.payment_intents.create(CHARGE, under("k1")).id == first.id

    clock.now += timedelta(microseconds=1)
    assert client.v1.payment_intents.create(CHARGE, under("k1")).id != first.id
    assert len(service.ledger.charges) == 2


def test_a_key_of_more_than_255_characters_is_refused(http: httpx.Client, service: RunningStripe) -> None:
    assert post(http, "k" * 255).status_code == 200
    assert post(http, "k" * 256).status_code == 400
    assert len(service.ledger.charges) == 1


def test_a_key_is_in_use_while_its_first_request_executes() -> None:
    fake = FakeStripe()
    request = Request(
        method="POST",
        path="/v1/payment_intents",
        headers={"authorization": f"Bearer {API_KEY}", "idempotency-key": "k1"},
        body=b"amount=1&currency=eur",
    )

    first = fake.receive(request)
    second = fake.receive(request)
    assert isinstance(first, Execution)
    assert isinstance(second, Answer)
    assert second.status == 409
    assert b"idempotency_key_in_use" in second.body

    executed = fake.execute(first)
    third = fake.receive(request)
    assert isinstance(third, Answer)
    assert third.body == executed.body
    assert len(fake.ledger.charges) == 1


def test_the_sdk_sees_a_key_in_use_as_an_api_error_409(client: StripeClient, service: RunningStripe) -> None:
    service.fake.faults = Faults(slow_for=timedelta(seconds=1))
    service.force(ServiceFault.SLOW)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.v1.payment_intents.create, CHARGE, under("k1"))
        while not service.fake.executing("k1"):  # until the first has arrived, ours would be the one that executes
            assert not first.done()
        with pytest.raises(stripe.APIError) as caught:
            client.v1.payment_intents.create(CHARGE, under("k1"))

    assert caught.value.http_status == 409
    assert caught.value.error is not None
    assert caught.value.error.code == "idempotency_key_in_use"  # the SDK leaves .code itself empty on an APIError
    assert first.result().status == "succeeded"
    assert len(service.ledger.charges) == 1


# --- what is remembered, and what is not


def test_a_validation_failure_leaves_the_key_free(client: StripeClient, service: RunningStripe) -> None:
    with pytest.raises(stripe.InvalidRequestError) as caught:
        client.v1.payment_intents.create({"currency": "eur"}, under("k1"))  # type: ignore[typeddict-item]
    intent = client.v1.payment_intents.create(CHARGE, under("k1"))

    assert (caught.value.code, caught.value.param) == ("parameter_missing", "amount")
    assert "idempotent-replayed" not in headers(intent)
    assert len(service.ledger.charges) == 1


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"amount": "20.00"}, "amount"),
        ({"amount": "0"}, "amount"),
        ({"amount": "100000000"}, "amount"),
        ({"currency": "euro"}, "currency"),
        ({"colour": "red"}, "colour"),
        ({"metadata": "order"}, "metadata"),
        ({"metadata[" + "k" * 41 + "]": "v"}, "metadata[" + "k" * 41 + "]"),
        ({"metadata[k]": "v" * 501}, "metadata[k]"),
        ({f"metadata[{number}]": "v" for number in range(51)}, "metadata"),
        ({"metadata[a]": "b", "metadata[a][b]": "c"}, "metadata[a][b]"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(
    http: httpx.Client, service: RunningStripe, wrong: dict[str, str], param: str
) -> None:
    refused = post(http, "k1", **({"amount": "2000", "currency": "eur"} | wrong))

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert service.ledger.charges == []


def test_parameters_as_json_are_refused(http: httpx.Client, service: RunningStripe) -> None:
    refused = http.post("/v1/payment_intents", json={"amount": 2000, "currency": "eur"})

    assert refused.status_code == 400
    assert service.ledger.charges == []


@pytest.mark.parametrize(
    ("card", "code"),
    [
        ("pm_card_chargeDeclined", "generic_decline"),
        ("pm_card_chargeDeclinedInsufficientFunds", "insufficient_funds"),
    ],
)
def test_a_declined_card_is_remembered_as_declined(
    client: StripeClient, service: RunningStripe, card: str, code: str
) -> None:
    for _ in range(2):
        with pytest.raises(stripe.CardError) as caught:
            client.v1.payment_intents.create(CHARGE | {"payment_method": card}, under("k1"))

    assert caught.value.http_status == 402
    assert caught.value.json_body["error"]["decline_code"] == code  # type: ignore[index]
    assert caught.value.headers is not None
    assert caught.value.headers["Idempotent-Replayed"] == "true"
    assert service.ledger.charges == []


def test_a_wrong_api_key_is_refused_and_leaves_the_key_free(service: RunningStripe, client: StripeClient) -> None:
    with pytest.raises(stripe.AuthenticationError) as caught:
        sdk(service.url, "sk_test_wrong").v1.payment_intents.create(CHARGE, under("k1"))
    client.v1.payment_intents.create(CHARGE, under("k1"))

    assert caught.value.http_status == 401
    assert len(service.ledger.charges) == 1


def test_a_request_without_credentials_is_refused(service: RunningStripe) -> None:
    answer = httpx.get(service.url + "/v1/payment_intents", trust_env=False)

    assert answer.status_code == 401
    assert answer.headers["request-id"].startswith("req_")


# --- The fake Stripe's faults, as the real SDK and a bare HTTP client see them.


@pytest.mark.parametrize(("fault", "charged"), [(ServiceFault.FAIL_AFTER, 1), (ServiceFault.FAIL_BEFORE, 0)])
def test_a_500_while_executing_is_kept_and_its_replay_forbids_a_retry(
    client: StripeClient, service: RunningStripe, fault: ServiceFault, charged: int
) -> None:
    service.force(fault)
    errors = []
    for _ in range(3):
        with pytest.raises(stripe.APIError) as caught:
            client.v1.payment_intents.create(CHARGE, under("k1"))
        errors.append(caught.value)

    assert [error.http_status for error in errors] == [500, 500, 500]
    assert [(error.headers or {}).get("Stripe-Should-Retry") for error in errors] == [None, "false", "false"]
    assert [(error.headers or {}).get("Idempotent-Replayed") for error in errors] == [None, "true", "true"]
    assert len(service.ledger.charges) == charged


def test_a_503_is_not_remembered(client: StripeClient, service: RunningStripe) -> None:
    service.force(ServiceFault.UNAVAILABLE)

    with pytest.raises(stripe.APIError) as caught:
        client.v1.payment_intents.create(CHARGE, under("k1"))
    client.v1.payment_intents.create(CHARGE, under("k1"))

    assert caught.value.http_status == 503
    assert len(service.ledger.charges) == 1


def test_a_rate_limited_request_executes_nothing_and_says_when_to_return(
    client: StripeClient, service: RunningStripe
) -> None:
    service.fake.faults = Faults(retry_after=timedelta(seconds=7))
    service.force(ServiceFault.RATE_LIMIT)

    with pytest.raises(stripe.RateLimitError) as caught:
        client.v1.payment_intents.create(CHARGE, under("k1"))
    assert service.ledger.charges == []
    client.v1.payment_intents.create(CHARGE, under("k1"))

    assert (caught.value.headers or {})["Retry-After"] == "7"
    assert len(service.ledger.charges) == 1


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_lost_response_is_a_broken_connection_after_the_charge(seed: int) -> None:
    with running_stripe(random=Random(seed)) as service:
        service.force(ServiceFault.LOSE_RESPONSE)
        client = sdk(service.url)

        with pytest.raises(stripe.APIConnectionError):
            client.v1.payment_intents.create(CHARGE, under("k1"))
        assert len(service.ledger.charges) == 1

        again = client.v1.payment_intents.create(CHARGE, under("k1"))
        assert again.latest_charge == service.ledger.charges[0].id
        assert headers(again)["idempotent-replayed"] == "true"
        assert [answer.lost for answer in service.ledger.answers] == [True, False]


def test_a_dropped_connection_is_now_reset_and_now_closed(http: httpx.Client, service: RunningStripe) -> None:
    seen = set()
    for number in range(20):
        service.force(ServiceFault.LOSE_RESPONSE)
        with pytest.raises(httpx.TransportError) as caught:
            post(http, f"k{number}")
        seen.add(type(caught.value))

    assert seen == {httpx.ReadError, httpx.RemoteProtocolError}
    assert len(service.ledger.charges) == 20


def test_a_lost_replay_changes_nothing(http: httpx.Client, service: RunningStripe) -> None:
    service.force(None, ServiceFault.LOSE_RESPONSE)

    post(http, "k1")
    with pytest.raises(httpx.TransportError):
        post(http, "k1")

    assert post(http, "k1").headers["idempotent-replayed"] == "true"
    assert len(service.ledger.charges) == 1


def test_a_lost_request_looks_the_same_and_charges_nothing(client: StripeClient, service: RunningStripe) -> None:
    service.force(ServiceFault.LOSE_REQUEST)

    with pytest.raises(stripe.APIConnectionError):
        client.v1.payment_intents.create(CHARGE, under("k1"))
    assert service.ledger.charges == []

    client.v1.payment_intents.create(CHARGE, under("k1"))
    assert len(service.ledger.charges) == 1


def test_a_request_is_executed_after_its_client_has_hung_up(http: httpx.Client, service: RunningStripe) -> None:
    service.fake.faults = Faults(slow_for=timedelta(seconds=1))
    service.force(ServiceFault.SLOW)

    with pytest.raises(httpx.ReadTimeout):
        http.post(
            "/v1/payment_intents",
            data={"amount": "2000", "currency": "eur"},
            headers={"Idempotency-Key": "k1"},
            timeout=httpx.Timeout(60, read=0.05),
        )
    while post(http, "k1").status_code == 409:
        time.sleep(0.02)

    assert [answer.status for answer in service.ledger.answers if answer.status != 409] == [200, 200]
    assert len(service.ledger.charges) == 1


# --- faults


def test_a_cut_off_answer_comes_after_the_charge(http: httpx.Client, service: RunningStripe) -> None:
    service.force(ServiceFault.CUT_OFF)

    with pytest.raises(httpx.RemoteProtocolError):
        post(http, key="k1")
    replay = post(http, key="k1")

    assert replay.headers["Idempotent-Replayed"] == "true"
    assert len(service.ledger.charges) == 1


def test_one_seed_draws_the_same_faults_and_in_the_given_fractions() -> None:
    faults = Faults(lose_response=0.1, rate_limit=0.3)

    drawn = [faults.draw(random) for random in [Random(5)] for _ in range(10_000)]
    again = [faults.draw(random) for random in [Random(5)] for _ in range(10_000)]

    assert drawn == again
    assert set(drawn) == {None, ServiceFault.LOSE_RESPONSE, ServiceFault.RATE_LIMIT}
    assert 900 < drawn.count(ServiceFault.LOSE_RESPONSE) < 1100
    assert 2800 < drawn.count(ServiceFault.RATE_LIMIT) < 3200


def test_fractions_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="together at most 1"):
        Faults(lose_response=0.6, slow=0.5)
    with pytest.raises(ValueError, match="at least 0"):
        Faults(slow=-0.1)


def test_under_a_storm_of_faults_each_key_still_charges_at_most_once(
    service: RunningStripe, http: httpx.Client
) -> None:
    fractions = {fault.value: 0.1 for fault in ServiceFault}
    service.fake.faults = Faults(**fractions, slow_for=timedelta(milliseconds=2))  # type: ignore[arg-type]
    answered = {}
    for number in range(40):
        for _ in range(15):
            try:
                answer = post(http, f"k{number}")
            except httpx.TransportError:
                continue
            if answer.status_code == 200:
                answered[f"k{number}"] = answer.json()["latest_charge"]
                break

    charged = {charge.key: charge.id for charge in service.ledger.charges}
    assert len(charged) == len(service.ledger.charges)
    assert answered.items() <= charged.items()
    assert len(answered) > 25


# --- The fake Stripe's objects, as the real SDK sees them: intents, refunds, customers, and any other.


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
