"""The fake Stripe's faults, as the real SDK and a bare HTTP client see them."""

import time
from datetime import timedelta
from random import Random

import httpx
import pytest
import stripe
from stripe import StripeClient
from support.stripe_clients import CHARGE, headers, post, sdk, under

from dispatchers.testing.stripe_faults import Faults, StripeFault
from dispatchers.testing.stripe_service import RunningStripe, running_stripe


@pytest.mark.parametrize(("fault", "charged"), [(StripeFault.FAIL_AFTER, 1), (StripeFault.FAIL_BEFORE, 0)])
def test_a_500_while_executing_is_kept_and_its_replay_forbids_a_retry(
    client: StripeClient, service: RunningStripe, fault: StripeFault, charged: int
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
    service.force(StripeFault.UNAVAILABLE)

    with pytest.raises(stripe.APIError) as caught:
        client.v1.payment_intents.create(CHARGE, under("k1"))
    client.v1.payment_intents.create(CHARGE, under("k1"))

    assert caught.value.http_status == 503
    assert len(service.ledger.charges) == 1


def test_a_rate_limited_request_executes_nothing_and_says_when_to_return(
    client: StripeClient, service: RunningStripe
) -> None:
    service.fake.faults = Faults(retry_after=timedelta(seconds=7))
    service.force(StripeFault.RATE_LIMIT)

    with pytest.raises(stripe.RateLimitError) as caught:
        client.v1.payment_intents.create(CHARGE, under("k1"))
    assert service.ledger.charges == []
    client.v1.payment_intents.create(CHARGE, under("k1"))

    assert (caught.value.headers or {})["Retry-After"] == "7"
    assert len(service.ledger.charges) == 1


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_lost_response_is_a_broken_connection_after_the_charge(seed: int) -> None:
    with running_stripe(random=Random(seed)) as service:
        service.force(StripeFault.LOSE_RESPONSE)
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
        service.force(StripeFault.LOSE_RESPONSE)
        with pytest.raises(httpx.TransportError) as caught:
            post(http, f"k{number}")
        seen.add(type(caught.value))

    assert seen == {httpx.ReadError, httpx.RemoteProtocolError}
    assert len(service.ledger.charges) == 20


def test_a_lost_replay_changes_nothing(http: httpx.Client, service: RunningStripe) -> None:
    service.force(None, StripeFault.LOSE_RESPONSE)

    post(http, "k1")
    with pytest.raises(httpx.TransportError):
        post(http, "k1")

    assert post(http, "k1").headers["idempotent-replayed"] == "true"
    assert len(service.ledger.charges) == 1


def test_a_lost_request_looks_the_same_and_charges_nothing(client: StripeClient, service: RunningStripe) -> None:
    service.force(StripeFault.LOSE_REQUEST)

    with pytest.raises(stripe.APIConnectionError):
        client.v1.payment_intents.create(CHARGE, under("k1"))
    assert service.ledger.charges == []

    client.v1.payment_intents.create(CHARGE, under("k1"))
    assert len(service.ledger.charges) == 1


def test_a_request_is_executed_after_its_client_has_hung_up(http: httpx.Client, service: RunningStripe) -> None:
    service.fake.faults = Faults(slow_for=timedelta(seconds=1))
    service.force(StripeFault.SLOW)

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


def test_one_seed_draws_the_same_faults_and_in_the_given_fractions() -> None:
    faults = Faults(lose_response=0.1, rate_limit=0.3)

    drawn = [faults.draw(random) for random in [Random(5)] for _ in range(10_000)]
    again = [faults.draw(random) for random in [Random(5)] for _ in range(10_000)]

    assert drawn == again
    assert set(drawn) == {None, StripeFault.LOSE_RESPONSE, StripeFault.RATE_LIMIT}
    assert 900 < drawn.count(StripeFault.LOSE_RESPONSE) < 1100
    assert 2800 < drawn.count(StripeFault.RATE_LIMIT) < 3200


def test_fractions_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="together at most 1"):
        Faults(lose_response=0.6, slow=0.5)
    with pytest.raises(ValueError, match="at least 0"):
        Faults(slow=-0.1)


def test_under_a_storm_of_faults_each_key_still_charges_at_most_once(
    service: RunningStripe, http: httpx.Client
) -> None:
    fractions = {fault.value: 0.1 for fault in StripeFault}
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
