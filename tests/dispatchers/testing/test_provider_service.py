"""The fake of a profile's service is strict, and the suite for profiles notices a service that is not as the profile says."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

import httpx
import pytest
from support.database import Database
from support.entries import put, states

import outbox
from dispatchers import Dispatcher
from dispatchers.adapters.providers import Profile, modern_treasury, resend, sendgrid
from dispatchers.testing import RunningProvider, drain, service_of
from dispatchers.testing.conformance_providers import Offer, ProviderSuite
from dispatchers.testing.provider_core import FakeProvider, Refusal
from dispatchers.testing.service_faults import Faults, ServiceFault

OFFER = Offer(resend, "emails.send")
DAY = timedelta(days=1)


@pytest.fixture
def mails() -> Iterator[RunningProvider]:
    with service_of(resend) as running:
        yield running


def post(service: RunningProvider, path: str = "/emails", **given: Any) -> httpx.Response:
    headers = {"Authorization": "Bearer any", "Idempotency-Key": "k1", **given.pop("headers", {})}
    sent = {"json": {"to": "ada@example.com"}, **given}
    return httpx.post(service.url + path, headers=headers, trust_env=False, timeout=30, **sent)


def test_a_request_is_an_effect_with_its_key(mails: RunningProvider) -> None:
    response = post(mails)

    (effect,) = mails.fake.effects
    assert (response.status_code, response.json()) == (200, {"id": effect.id})
    assert (effect.operation, effect.key, effect.payload) == ("emails.send", "k1", {"to": "ada@example.com"})


def test_a_known_key_is_answered_alike_until_the_window_ends(mails: RunningProvider) -> None:
    first, second = post(mails), post(mails)
    mails.fake.advance(DAY)
    third = post(mails)

    assert first.json() == second.json() != third.json()
    assert [answer.replayed for answer in mails.fake.answers] == [False, True, False]


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"headers": {"Authorization": ""}}, 401),
        ({"path": "/elsewhere"}, 404),
        ({"content": b"{", "json": None}, 400),
        ({"headers": {"Idempotency-Key": "k" * 257}}, 400),
    ],
)
def test_a_wrong_request_is_refused(mails: RunningProvider, given: dict[str, Any], status: int) -> None:
    assert post(mails, **given).status_code == status
    assert mails.fake.effects == []


def test_another_request_under_a_key_gets_the_profile_s_answer(mails: RunningProvider) -> None:
    post(mails)

    response = post(mails, json={"to": "bob@example.com"})

    assert (response.status_code, response.json()["name"]) == (409, "invalid_idempotent_request")


def test_a_refusal_is_executed_again_where_only_successes_are_stored(mails: RunningProvider) -> None:
    mails.fake.force(Refusal(422, {"name": "validation_error"}))

    assert [post(mails).status_code for _ in range(2)] == [422, 200]


def test_faults_are_drawn_as_fractions() -> None:
    with service_of(resend, faults=Faults(rate_limit=1.0)) as mails:
        response = post(mails)

    assert (response.status_code, response.headers["Retry-After"]) == (429, "1")


def test_a_service_without_keys_executes_each_request() -> None:
    with service_of(sendgrid) as mails:
        for _ in range(2):
            post(mails, "/mail/send")

        assert [effect.key for effect in mails.fake.effects] == [None, None]


# --- the suite notices what is wrong


def fails(test: Any, offer: Offer = OFFER, *given: Any) -> bool:
    try:
        test(ProviderSuite(), offer, *given)
    except AssertionError:
        return True
    return False


def forgetting(fake: FakeProvider, *_: Any) -> None:
    """A service that knows no key."""


def test_the_suite_notices_a_key_that_is_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    test = ProviderSuite.test_a_lost_answer_is_one_effect
    assert not fails(test, OFFER, ServiceFault.LOSE_RESPONSE)

    monkeypatch.setattr(FakeProvider, "_recall", forgetting)

    assert fails(test, OFFER, ServiceFault.LOSE_RESPONSE)


def test_the_suite_notices_a_service_that_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    test = ProviderSuite.test_another_request_under_the_key_is_never_executed
    assert not fails(test)

    monkeypatch.setattr(FakeProvider, "_conflict", forgetting)

    assert fails(test)


# --- the whole dispatcher, in a storm of faults

STORM = Faults(lose_response=0.2, lose_request=0.1, cut_off=0.1, fail_before=0.1, unavailable=0.1, rate_limit=0.1)
STORMS: dict[str, tuple[Profile, str]] = {
    "keys": (resend, "emails.send"),
    "bound keys": (modern_treasury, "payment_orders.create"),
    "no keys": (sendgrid, "mail.send"),
}


@pytest.mark.parametrize("kind", STORMS)
def test_in_a_storm_of_faults_each_entry_happens_at_most_once(database: Database, ob: outbox.Outbox, kind: str) -> None:
    profile, name = STORMS[kind]
    with service_of(profile, faults=replace(STORM, retry_after=timedelta(0)), random=Random(7)) as service:
        payloads = [{"number": number} for number in range(30)]
        for number, payload in enumerate(payloads):
            put(database, ob, f"{profile.name}.{name}", payload=payload, parent=f"order:{number}")

        run_ahead(database, ob, {profile.name: service.adapter()})

        happened = Counter(effect.payload["number"] for effect in service.fake.effects)
    ended = states(database)
    assert max(happened.values()) == 1, "nothing may happen twice"
    assert ended["delivered"] + ended["uncertain"] == len(payloads)
    assert len(happened) >= ended["delivered"], "what counts as delivered has happened"
    assert (ended["uncertain"] > 0) is (kind == "no keys")


def run_ahead(database: Database, ob: outbox.Outbox, adapters: dict[str, Any]) -> None:
    """Send until nothing waits, without the waits."""

    async def main() -> None:
        sending = Dispatcher(database.dispatchers_engine, adapters=adapters, outbox=ob)
        await drain(sending, ahead=True)
        await sending.close()

    asyncio.run(main())
