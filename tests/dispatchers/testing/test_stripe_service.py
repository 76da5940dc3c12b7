"""The fake Stripe, spoken to by the real SDK and by a bare HTTP client: each rule of keys that Stripe documents."""

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import stripe
from stripe import StripeClient
from support.stripe_clients import CHARGE, Clock, headers, post, sdk, under

from dispatchers.testing.stripe_core import API_KEY, Answer, Execution, FakeStripe, Request
from dispatchers.testing.stripe_faults import Faults, StripeFault
from dispatchers.testing.stripe_ledger import StripeLedger
from dispatchers.testing.stripe_service import RunningStripe

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
    service.force(StripeFault.SLOW)

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


# --- as a process


def test_as_a_process_it_prints_its_port_and_others_read_its_ledger(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dispatchers.testing.stripe_service", "--port", "0", "--lose", "1", "--seed", "1"]
    command += ["--ledger", str(tmp_path / "ledger.sqlite")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            for _ in range(3):
                with pytest.raises(stripe.APIConnectionError):
                    sdk(url).v1.payment_intents.create(CHARGE, under("k1"))

            ledger = StripeLedger(tmp_path / "ledger.sqlite")
            assert [charge.key for charge in ledger.charges] == ["k1"]
            assert ledger.count("replayed") == 2
            assert ledger.count("lost") == 3
            assert ledger.count("object = 'charge'", table="effect") == 1
            ledger.close()
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
