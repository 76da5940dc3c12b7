"""The services' own clients talk to the generated fakes: a fake takes what a client sends, and a client reads what it answers.

A client has the paths, the place of the key and the form of the answers from its maker, and not from our profile.
"""

import asyncio
import gc
import json
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from support.restore import eventually

from dispatchers import Delivered, Delivery
from dispatchers.adapters.providers import PROVIDERS
from dispatchers.adapters.providers.key_places import BodyField
from dispatchers.testing.conformance_frame import ENTRY
from dispatchers.testing.provider_service import RunningProvider, service_of
from dispatchers.testing.service_faults import ServiceFault

Ask = Callable[[str, str | None, int], str]
"""Asks the service at a URL for one effect, under a key, for an amount. Returns the id of what was made."""

API_KEY = f"test_{'a' * 30}"  # of the form that Mollie's client demands
WINDOW = timedelta(hours=24)  # where the service publishes none


def by_resend(url: str, key: str | None, amount: int) -> str:
    resend = pytest.importorskip("resend")
    resend.api_url, resend.api_key = url, API_KEY
    mail = {"from": "shop@example.com", "to": "ada@example.com", "subject": f"Bill of {amount}", "html": "<p>Hello</p>"}
    return str(resend.Emails.send(mail, {"idempotency_key": key} if key else None)["id"])


def by_adyen(url: str, key: str | None, amount: int) -> str:
    adyen = pytest.importorskip("Adyen").Adyen()
    adyen.client.platform, adyen.client.xapikey = "test", API_KEY
    payments = adyen.checkout.payments_api
    payments.baseUrl = url
    payment = {"amount": {"value": amount, "currency": "EUR"}, "reference": "order-1", "merchantAccount": "Shop"}
    return str(payments.payments(payment, idempotency_key=key).message["pspReference"])


def by_square(url: str, key: str | None, amount: int) -> str:
    square = pytest.importorskip("square").Square(token=API_KEY, base_url=url)
    answer = square.payments.create(
        source_id="cnon:ok",
        idempotency_key=key or str(uuid4()),  # the client demands one
        amount_money={"amount": amount, "currency": "USD"},
        request_options={"max_retries": 0},
    )
    return str(answer.payment.id)


def by_mollie(url: str, key: str | None, amount: int) -> str:
    mollie = pytest.importorskip("mollie.api.client").Client(api_endpoint=url.removesuffix("/v2"))
    mollie.set_api_key(API_KEY)
    payment = {"amount": {"currency": "EUR", "value": f"{amount}.00"}, "description": "order-1"}
    return str(mollie.payments.create(payment, idempotency_key=key or "").id)


def by_gocardless(url: str, key: str | None, amount: int) -> str:
    gocardless_pro = pytest.importorskip("gocardless_pro")
    client = gocardless_pro.Client(access_token=API_KEY, base_url=url, raise_on_idempotency_conflict=True)
    payment = {"amount": amount, "currency": "GBP", "links": {"mandate": "MD1"}}
    try:
        return str(client.payments.create(params=payment, headers={"Idempotency-Key": key} if key else None).id)
    except gocardless_pro.errors.IdempotentCreationConflictError as error:
        return str(error.conflicting_resource_id)


def by_modern_treasury(url: str, key: str | None, amount: int) -> str:
    client = pytest.importorskip("modern_treasury").ModernTreasury(
        api_key=API_KEY, organization_id=API_KEY, base_url=url.removesuffix("/api"), max_retries=0
    )
    order: dict[str, Any] = {
        "type": "ach",
        "direction": "credit",
        "originating_account_id": "acc_1",
        "receiving_account_id": "acc_2",
        "amount": amount,
    }
    return str(client.payment_orders.create(**order, **({"idempotency_key": key} if key else {})).id)


def by_sendgrid(url: str, key: str | None, amount: int) -> str:
    sendgrid = pytest.importorskip("sendgrid")
    mail = sendgrid.Mail("shop@example.com", "ada@example.com", f"Bill of {amount}", html_content="<p>Hello</p>")
    client = sendgrid.SendGridAPIClient(API_KEY, host=url.removesuffix("/v3"))
    return str(client.send(mail).status_code)


def by_postmark(url: str, key: str | None, amount: int) -> str:
    client = pytest.importorskip("postmarker.core").PostmarkClient(server_token=API_KEY, root_api_url=url)
    mail = {"From": "shop@example.com", "To": "ada@example.com", "Subject": f"Bill of {amount}", "TextBody": "Hello"}
    return str(client.emails.send(**mail)["MessageID"])


def by_slack(url: str, key: str | None, amount: int) -> str:
    client = pytest.importorskip("slack_sdk").WebClient(token=API_KEY, base_url=url, retry_handlers=[])
    return str(client.chat_postMessage(channel="C1", text=f"Bill of {amount}")["ts"])


KEYED: dict[str, tuple[str, Ask]] = {
    "adyen": ("payments.create", by_adyen),
    "gocardless": ("payments.create", by_gocardless),
    "modern_treasury": ("payment_orders.create", by_modern_treasury),
    "mollie": ("payments.create", by_mollie),
    "resend": ("emails.send", by_resend),
    "square": ("payments.create", by_square),
}
KEYLESS: dict[str, tuple[str, Ask]] = {
    "postmark": ("email.send", by_postmark),
    "sendgrid": ("mail.send", by_sendgrid),
    "slack": ("chat.post_message", by_slack),
}

ERRORS = {  # what each client raises for an error of the service
    "adyen": "AdyenAPICommunicationError",
    "gocardless": "GoCardlessInternalError",
    "modern_treasury": "InternalServerError",
    "mollie": "ResponseError",
    "postmark": "ClientError",
    "resend": "ApplicationError",
    "sendgrid": "InternalServerError",
    "slack": "SlackApiError",
    "square": "ApiError",
}


@pytest.fixture(autouse=True)
def leftover_connections() -> Iterator[None]:
    """Some clients leave their connections to the garbage collector."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.mark.parametrize("name", KEYED)
def test_a_client_that_asks_twice_under_one_key_has_one_effect(name: str) -> None:
    (operation, ask), key = KEYED[name], str(uuid4())
    with service_of(PROVIDERS[name]) as service:
        ids = [ask(service.url, key, 5) for _ in range(2)]

        (effect,) = service.fake.effects
        assert (effect.operation, effect.key, ids) == (operation, key, [effect.id, effect.id])


@pytest.mark.parametrize("name", KEYED)
def test_what_a_client_sent_is_known_to_our_adapter(name: str) -> None:
    """The adapter's request is the client's: the same route, the same place of the key, the same members."""
    (operation, ask), key = KEYED[name], str(uuid4())
    with service_of(PROVIDERS[name]) as service:
        id = ask(service.url, key, 5)
        outcome = send(service, operation, without_key(service, service.fake.effects[0].payload), key)

        assert isinstance(outcome, Delivered)
        assert len(service.fake.effects) == 1, "the adapter's request must be a repetition of the client's"
        assert id in str(outcome.result)


@pytest.mark.parametrize(
    ("name", "sign"),
    [("mollie", "400"), ("resend", "invalid_idempotent_request"), ("square", "IDEMPOTENCY_KEY_REUSED")],
)
def test_a_client_reads_that_the_key_has_another_request(name: str, sign: str) -> None:
    (_, ask), key = KEYED[name], str(uuid4())
    with service_of(PROVIDERS[name]) as service:
        ask(service.url, key, 5)
        with pytest.raises(Exception) as caught:  # noqa: PT011  # each client has its own class
            ask(service.url, key, 6)

        assert sign in str(vars(caught.value))
        assert len(service.fake.effects) == 1


def test_modern_treasury_gives_another_request_the_first_answer() -> None:
    key = str(uuid4())
    with service_of(PROVIDERS["modern_treasury"]) as service:
        ids = [by_modern_treasury(service.url, key, amount) for amount in (5, 6)]

        assert ids == [service.fake.effects[0].id] * 2
        assert len(service.fake.effects) == 1


@pytest.mark.parametrize(
    ("name", "sign"),
    [("adyen", "704"), ("modern_treasury", "409"), ("mollie", "409"), ("resend", "concurrent_idempotent_requests")],
)
def test_a_client_reads_that_its_key_is_in_use(name: str, sign: str) -> None:
    (_, ask), key = KEYED[name], str(uuid4())
    with service_of(PROVIDERS[name]) as service, ThreadPoolExecutor() as threads:
        with service.hold():
            first = threads.submit(ask, service.url, key, 5)
            eventually(lambda: service.fake.executing(key))
            with pytest.raises(Exception) as caught:  # noqa: PT011  # each client has its own class
                ask(service.url, key, 5)

        assert sign in str(vars(caught.value))
        assert first.result() == service.fake.effects[0].id


@pytest.mark.parametrize("name", ["gocardless", "modern_treasury", "mollie"])
def test_a_client_without_our_key_makes_up_one_at_each_call(name: str) -> None:
    """Such a client protects one call in one process: the retry of a job would be a second effect."""
    _, ask = KEYED[name]
    with service_of(PROVIDERS[name]) as service:
        ids = [ask(service.url, None, 5) for _ in range(2)]

        assert len({*ids}) == len({effect.key for effect in service.fake.effects}) == 2


@pytest.mark.parametrize(("name", "error"), ERRORS.items())
def test_a_client_reads_an_error_of_the_service(name: str, error: str) -> None:
    _, ask = (KEYED | KEYLESS)[name]
    with service_of(PROVIDERS[name]) as service:
        service.fake.force(ServiceFault.FAIL_BEFORE)
        with pytest.raises(Exception) as caught:  # noqa: PT011  # each client has its own class
            ask(service.url, str(uuid4()), 5)

        assert type(caught.value).__name__ == error


@pytest.mark.parametrize("name", KEYLESS)
def test_a_service_without_keys_executes_each_request(name: str) -> None:
    operation, ask = KEYLESS[name]
    with service_of(PROVIDERS[name]) as service:
        for _ in range(2):
            ask(service.url, None, 5)

        assert [effect.operation for effect in service.fake.effects] == [operation] * 2


def send(service: RunningProvider, operation: str, payload: Any, key: str) -> Any:
    profile = service.fake.profile
    given: dict[str, Any] = dict.fromkeys(profile.settings(service.url), API_KEY)
    adapter = service.adapter(**given, **({"window": WINDOW} if profile.window is None else {}))
    delivery = Delivery(ENTRY, f"{profile.name}.{operation}", json.dumps(payload).encode(), key, 1, {}, {}, 0.0)

    async def main() -> Any:
        try:
            return await adapter.send(delivery)
        finally:
            await adapter.aclose()

    return asyncio.run(main())


def without_key(service: RunningProvider, payload: Any) -> Any:
    place = service.fake.profile.key
    return {name: value for name, value in payload.items() if not (isinstance(place, BodyField) and name == place.path)}
