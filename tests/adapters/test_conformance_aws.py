"""The adapters for AWS in the conformance suite. `test_aws_adapters.py` has the services' own behaviour."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ClassVar

import botocore.client
import pytest
from botocore.exceptions import BotoCoreError, ClientError
from support import faulty_aws
from support.faulty_aws import SECRET, SESSION, TOKEN, FaultyAws, refused, refused_in_xml

from dispatchers import Adapter, Deferred, Delivered, InProgress, KeyConflict, Rejected, Unknown
from dispatchers.adapters import EventBridgeAdapter, SnsFifoAdapter, SqsFifoAdapter
from dispatchers.testing import faulty_http
from dispatchers.testing.conformance import AdapterSuite, Scenario

QUEUE = "https://sqs.eu-central-1.amazonaws.com/123456789012/orders.fifo"
TOPIC = "arn:aws:sns:eu-central-1:123456789012:orders.fifo"


def scenarios(taken: Any, failed: Any, refused: Any) -> Sequence[Scenario]:
    return (
        Scenario("taken", taken(), Delivered),
        Scenario("the entry is refused", failed("InvalidMessageContents", is_our_fault=True), Rejected),
        Scenario("the entry failed", failed("InternalError", is_our_fault=False), Unknown),
        Scenario("the entry is throttled", failed("RequestThrottled", is_our_fault=True), Deferred),
        Scenario("the entry has a code that quotes", failed("ada@example.com", is_our_fault=True), Rejected),
        Scenario("the request is too long", refused(400, "BatchRequestTooLong"), Rejected),
        Scenario("throttled", refused(400, "ThrottlingException"), Deferred),
        Scenario("too many requests", refused(429, "Odd"), Deferred),
        Scenario("forbidden", refused(403, "AccessDeniedException"), Deferred),
        Scenario("the token has expired", refused(400, "ExpiredTokenException"), Deferred),
        Scenario("no such place", refused(400, "QueueDoesNotExist"), Deferred),
        Scenario("failed", refused(500, "InternalFailure"), Unknown),
        Scenario("unavailable", refused(503, "ServiceUnavailable"), Unknown),
        Scenario("the answer lists nothing", faulty_http.answer(200, body=b"{}"), Unknown),
        Scenario("connection refused", faulty_http.refuse, Deferred, requests=0),
        Scenario("closed without an answer", faulty_http.close, Unknown),
        Scenario("reset without an answer", faulty_http.reset, Unknown),
        Scenario("an answer that is no HTTP", faulty_http.garble, Unknown),
        Scenario("a success cut short", faulty_http.cut_short(200), Unknown),
        Scenario("a redirect", faulty_http.redirect(307), Unknown),
        Scenario("hangs", faulty_http.hang, Unknown, hangs=True),
        Scenario("drips", faulty_http.drip_body(200), Unknown, hangs=True),
    )


class AwsSuite(AdapterSuite):
    operation = "orders.placed"
    payload: Any = {"email": "ada@example.com"}  # noqa: RUF012
    secrets = (SECRET, TOKEN)
    private = ("ada@example.com",)
    client_exceptions = (BotoCoreError, ClientError)
    never: Mapping[type[Any], str] = {
        KeyConflict: "the service compares no messages",
        InProgress: "the service has no answer for it",
    }
    entries_of: ClassVar[Any]

    def remote(self) -> AbstractContextManager[FaultyAws]:
        return faulty_aws.faulty_aws(type(self).entries_of)

    def adapter(self, remote: FaultyAws, timeout: timedelta) -> Adapter:
        return self.made(endpoint_url=remote.http.url, timeout=timeout)

    def made(self, **settings: Any) -> Adapter:
        raise NotImplementedError

    def raising(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Adapter:
        def fail(*args: object) -> None:
            raise error

        monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", fail)
        return self.made()

    def exception(self, cls: type[Exception], text: str) -> Exception:
        if issubclass(cls, ClientError):
            response = {"Error": {"Code": text, "Message": text}, "ResponseMetadata": {"HTTPStatusCode": 400}}
            return cls(response, "SendMessageBatch")
        error = cls.__new__(cls)  # each has a text of its own, with its own fields
        Exception.__init__(error, text)
        return error


class TestSqsFifo(AwsSuite):
    entries_of = faulty_aws.sqs_entries
    scenarios = scenarios(faulty_aws.sqs_taken, faulty_aws.sqs_failed, refused)

    def made(self, **settings: Any) -> Adapter:
        return SqsFifoAdapter(queue=QUEUE, boto3_session=SESSION, **settings)


class TestSnsFifo(AwsSuite):
    entries_of = faulty_aws.sns_entries
    scenarios = scenarios(faulty_aws.sns_taken, faulty_aws.sns_failed, refused_in_xml)

    def made(self, **settings: Any) -> Adapter:
        return SnsFifoAdapter(topic=TOPIC, boto3_session=SESSION, **settings)


class TestEventBridge(AwsSuite):
    entries_of = faulty_aws.event_entries
    scenarios = (
        Scenario("the event is malformed", faulty_aws.event_failed("MalformedDetail", is_our_fault=True), Rejected),
        Scenario("the event failed otherwise", faulty_aws.event_failed("Odd", is_our_fault=False), Unknown),
        Scenario(
            "the source is not allowed", faulty_aws.event_failed("NotAuthorizedForSource", is_our_fault=True), Deferred
        ),
        *(
            each
            for each in scenarios(faulty_aws.event_taken, faulty_aws.event_failed, refused)
            if each.name != "the entry has a code that quotes"
        ),
        Scenario("a code that quotes", faulty_aws.event_failed("ada@example.com", is_our_fault=False), Unknown),
    )

    def made(self, **settings: Any) -> Adapter:
        return EventBridgeAdapter(bus="shop", source="com.example.shop", boto3_session=SESSION, **settings)
