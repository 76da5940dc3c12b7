"""The outcomes of answers by the profiles: what may have been executed is never judged as refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from dispatchers import Deferred, Delivered, InProgress, Outcome, Rejected, Unknown
from dispatchers.adapters.http_client.answer_reader import AnswerHeaders
from dispatchers.adapters.http_client.transport import Answer
from dispatchers.adapters.providers import PROVIDERS, Delete, Profile, Signal, adyen, hubspot, mollie, slack
from dispatchers.adapters.providers.answers import outcome_by

GRAPHQL = [PROVIDERS["braintree"], PROVIDERS["shopify"]]
UNREAD: dict[str, Any] = {
    "data": {"pay": {"id": None, "userErrors": []}},
    "errors": [
        {
            "path": ["pay", "id"],
            "extensions": {"code": "ACCESS_DENIED", "errorClass": "AUTHORIZATION"},
        }
    ],
}


def outcome(profile: Profile, status: int, body: Any = None, **headers: str) -> Outcome:
    content = b"" if body is None else json.dumps(body).encode()
    operation = next(iter(profile.operations.values()))
    return outcome_by(profile, operation, Answer(status, AnswerHeaders(headers), content))


@pytest.mark.parametrize("profile", GRAPHQL, ids=lambda each: each.name)
def test_a_mutation_is_delivered_though_a_member_cannot_be_read(profile: Profile) -> None:
    assert isinstance(outcome(profile, 200, UNREAD), Delivered)
    assert isinstance(outcome(profile, 200, UNREAD | {"data": None}), Rejected)


@pytest.mark.parametrize("body", [{}, [], "text", {"data": None}, {"data": {"pay": None}}, {"errors": "Not Found"}])
@pytest.mark.parametrize("profile", [*GRAPHQL, slack], ids=lambda each: each.name)
def test_a_200_that_is_not_the_service_s_own_proves_nothing(profile: Profile, body: Any) -> None:
    assert isinstance(outcome(profile, 200, body), Unknown)


def test_a_limit_of_slack_under_either_name_is_deferred() -> None:
    for name in ("ratelimited", "rate_limited"):
        assert isinstance(outcome(slack, 200, {"ok": False, "error": name}), Deferred)


def test_a_batch_that_was_written_in_part_is_not_refused() -> None:
    assert outcome(hubspot, 207, {"status": "COMPLETE"}) == Unknown("HTTP 207", final=True)


def test_an_answer_without_a_body_needs_none_to_be_read() -> None:
    tokens = replace(adyen, operations={"tokens.delete": Delete("/storedPaymentMethods/{id}", success=204)})

    assert isinstance(outcome(tokens, 204), Delivered)
    assert isinstance(outcome(tokens, 200), Unknown)


@pytest.mark.parametrize(
    "mark", [Signal(208), Signal(None, body={"cached": True}), Signal(422, headers={"X-Cached": "yes"})]
)
def test_only_the_whole_mark_of_a_repeated_answer_is_one(mark: Signal) -> None:
    """A repeated refusal is conclusive: it ends an entry whose first attempt was lost as failed."""
    refused = outcome(replace(mollie, replay=mark), 422, {"field": "amount"})

    assert isinstance(refused, Rejected)
    assert not refused.conclusive


def test_a_transient_error_of_adyen_may_have_been_executed() -> None:
    """Its key is known from then on, so the window counts from there, and the entry does not end as failed."""
    assert outcome(adyen, 422, {"errorCode": "905"}, **{"transient-error": "true"}) == Unknown("HTTP 422 905")


def test_a_repeated_answer_is_not_in_flight() -> None:
    """Mollie repeats a stored 409 as long as it knows the key: there is nothing to wait for."""
    assert outcome(mollie, 409, {}) == InProgress()
    assert outcome(mollie, 409, {}, **{"idempotent-replayed": "true"}) == Unknown("HTTP 409", final=True)
