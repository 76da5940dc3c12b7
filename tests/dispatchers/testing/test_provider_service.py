"""The fake of a profile's service is strict, and the suite for profiles notices a service that is not as the profile says."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest

from dispatchers.adapters.providers import resend, sendgrid
from dispatchers.testing import RunningProvider, service_of
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
