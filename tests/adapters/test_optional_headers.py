"""What is optional in an answer never raises, and never changes which outcome it is: searched over all parsers of answers."""

import asyncio
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

import aiosmtplib
import pytest
from confluent_kafka import KafkaError
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import ResponseError
from support.stripe_sends import API_KEY
from support.stripe_sends import delivery as payment

from dispatchers.adapters import HttpAdapter, StripeAdapter
from dispatchers.adapters.brokers.kafka_answers import not_accepted, not_delivered
from dispatchers.adapters.brokers.nats_answers import answer_reader
from dispatchers.adapters.brokers.redis_answers import Moved, outcome_of_error, outcome_of_id
from dispatchers.adapters.email.outcomes import Exchange, answered
from dispatchers.adapters.http_client.answer_reader import AnswerHeaders
from dispatchers.adapters.http_client.transport import Answer
from dispatchers.adapters.workflows.restate import _finding, _outcome
from dispatchers.delivery import (
    Absent,
    CannotTell,
    Deferred,
    Delivered,
    Delivery,
    Found,
    InProgress,
    KeyConflict,
    Outcome,
    Rejected,
    Unknown,
)

NUMBERS = st.integers(-(10**21), 10**21).map(str) | st.sampled_from(["00", "1", "31", "9999", "99999999999999999999"])
DATES = st.builds(
    "{}, {} {} {} {}:{}:{} {}".format,
    st.sampled_from(["Thu", "Xyz", ""]),
    NUMBERS,
    st.sampled_from(["Jan", "Feb", "Foo"]),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.sampled_from(["GMT", "+0200", "-99999999999999999999", "+9999", "-0000", "Z", ""]),
)
TEXTS = DATES | NUMBERS | st.text(st.characters(max_codepoint=255), max_size=30)
OPTIONAL = (
    "retry-after",
    "date",
    "keep-alive",
    "content-type",
    "request-id",
    "server",
    "set-cookie",
    "stripe-should-retry",
)
HEADERS = st.dictionaries(st.sampled_from(OPTIONAL), TEXTS)
STATUSES = st.sampled_from([200, 201, 204, 302, 400, 401, 402, 404, 408, 409, 410, 422, 429, 500, 503])
BODIES = st.binary(max_size=40) | st.sampled_from(
    [b"{", b"[]", b'{"error": 1}', b'{"error": {"type": []}}', b"9" * 5000]
)
OUTCOMES = (Delivered, Rejected, KeyConflict, Deferred, InProgress, Unknown)

searched = settings(max_examples=150)


class Answering:
    """Takes the place of an adapter's transport."""

    answer: Answer

    async def send(self, request: Any) -> Answer:
        return self.answer


def outcome(adapter: Any, delivery: Delivery, status: int, headers: Mapping[str, str], body: bytes) -> Outcome:
    adapter._transport.answer = Answer(status, AnswerHeaders(headers), body)
    return asyncio.run(adapter.send(delivery))


CRM = HttpAdapter(base_url="https://crm.test", replays_errors="all", window=timedelta(days=1))
STRIPE = StripeAdapter(api_key=API_KEY)
CRM._transport = Answering()  # type: ignore[assignment]
STRIPE._transport = STRIPE._client._requestor._client._transport = Answering()  # type: ignore[assignment]


@pytest.mark.parametrize(
    "text", ["Thu, 01 Jan 99999999999999999999 00:00:00 GMT", "Thu, 99999999999999999999 Jan 2026 00:00:00 GMT"]
)
@pytest.mark.parametrize("name", ["retry-after", "date"])
def test_a_date_of_twenty_digits_leaves_a_refusal_a_refusal(text: str, name: str) -> None:
    headers = {"retry-after": "Thu, 01 Jan 2026 00:00:00 GMT", name: text}
    delivery = Delivery(UUID(int=1), "crm.x", b"{}", "ck1_A", 1, {}, {}, deadline=0.0)

    assert outcome(CRM, delivery, 422, headers, b"") == Rejected("HTTP 422", result={"status": 422})


@searched
@given(STATUSES, HEADERS, BODIES)
def test_optional_parts_do_not_change_the_outcome_of_an_http_answer(
    status: int, headers: dict[str, str], body: bytes
) -> None:
    delivery = Delivery(UUID(int=1), "crm.x", b"{}", "ck1_A", 1, {}, {}, deadline=0.0)

    assert type(outcome(CRM, delivery, status, headers, body)) is type(outcome(CRM, delivery, status, {}, b""))


ERRORS = [
    {"type": "card_error", "code": "card_declined"},
    {"type": "invalid_request_error", "param": "amount"},
    {"type": "idempotency_error"},
    {"type": "api_error"},
    {"code": "lock_timeout"},
]


@searched
@given(STATUSES, HEADERS, BODIES, st.sampled_from(ERRORS))
def test_optional_parts_do_not_change_the_outcome_of_stripes_answer(
    status: int, headers: dict[str, str], body: bytes, error: dict[str, str]
) -> None:
    said = json.dumps({"error": {"message": "no", **error}}).encode()

    assert type(outcome(STRIPE, payment(), status, headers, said)) is type(outcome(STRIPE, payment(), status, {}, said))
    odd = outcome(STRIPE, payment(), status, headers, body)
    assert isinstance(odd, Delivered) == (status < 300)


@searched
@given(STATUSES, HEADERS, BODIES)
def test_optional_parts_do_not_change_the_outcome_of_restates_answer(
    status: int, headers: dict[str, str], body: bytes
) -> None:
    answer = Answer(status, AnswerHeaders(headers), body)

    assert type(_outcome(answer)) is type(_outcome(Answer(status, {}, b"")))
    assert isinstance(_finding(answer), Found | Absent | CannotTell)


@given(st.integers(-1, 999), st.text(max_size=40))
def test_the_text_of_a_mail_servers_reply_does_not_change_the_outcome(code: int, text: str) -> None:
    said, silent = (answered(aiosmtplib.SMTPResponse(code, each), Exchange(), "<1@x>") for each in (text, ""))

    assert type(said) is type(silent)


@given(st.none() | st.dictionaries(st.sampled_from(["Status", "Description", "X"]), TEXTS), BODIES)
def test_no_answer_of_a_broker_raises(headers: dict[str, str] | None, data: bytes) -> None:
    text = data.decode("latin-1")

    assert isinstance(answer_reader("ORDERS", 1)(headers, data), OUTCOMES)
    assert isinstance(outcome_of_error(ResponseError(text), "h"), (*OUTCOMES, Moved))
    assert isinstance(outcome_of_id("s", data), OUTCOMES)


@given(st.integers(-200, 200), st.booleans())
def test_no_error_of_kafka_raises(code: int, may_be_repeated: bool) -> None:
    error = KafkaError(code)

    assert isinstance(not_accepted(error), OUTCOMES)
    assert isinstance(not_delivered(error, may_be_repeated=may_be_repeated), OUTCOMES)
