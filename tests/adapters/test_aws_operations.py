"""AwsAdapter: the child key is the token of any operation that has one."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import boto3
import pytest
from support.faulty_aws import SECRET, SESSION

from dispatchers import Deferred, Delivered, Delivery, InProgress, KeyConflict, Outcome, Rejected, Unknown
from dispatchers.adapters import AwsAdapter
from dispatchers.adapters.providers import Mark, NoKey
from dispatchers.testing.attempts import due_in_time
from dispatchers.testing.conformance_frame import ENTRY, TAGS
from dispatchers.testing.faulty_http import FaultyHttp, answer, close
from outbox import ConfigurationError

HOUR = timedelta(hours=1)
WRITE = {"TransactItems": [{"Put": {"TableName": "orders", "Item": {"id": {"S": "C-1"}}}}]}


def made(remote: FaultyHttp, service: str = "dynamodb", operation: str = "transact_write_items", **given: Any) -> Any:
    return AwsAdapter(service, operation, boto3_session=SESSION, endpoint_url=remote.url, **given)


def send(adapter: Any, payload: Any = WRITE, attempt: int = 1) -> Outcome:
    key = adapter.key_format.encode(TAGS[0])
    delivery = Delivery(ENTRY, "aws.call", json.dumps(payload).encode(), key, attempt, {}, {}, 0.0)

    async def main() -> Outcome:
        outcome: Outcome = await adapter.send(due_in_time(adapter, delivery))
        await adapter.aclose()
        return outcome

    return asyncio.run(main())


def test_each_attempt_has_the_child_key_as_its_token(remote: FaultyHttp) -> None:
    remote.behave(answer(200, json={}))
    adapter = made(remote)

    outcomes = [send(adapter, attempt=number) for number in (1, 2)]

    token = adapter.key_format.encode(TAGS[0])
    assert outcomes == [Delivered({})] * 2
    assert [json.loads(request.body) for request in remote.requests] == [{**WRITE, "ClientRequestToken": token}] * 2


def test_only_ids_of_an_answer_are_stored(remote: FaultyHttp) -> None:
    body = {"ARN": "arn:aws:secret", "Name": "n", "VersionId": "v1", "SecretString": "open sesame"}
    remote.behave(answer(200, json=body))
    adapter = made(remote, "secretsmanager", "create_secret", window=HOUR)

    assert send(adapter, {"Name": "n"}) == Delivered({"ARN": "arn:aws:secret", "VersionId": "v1"})


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "IdempotentParameterMismatchException", KeyConflict),
        (400, "TransactionInProgressException", InProgress),
        (400, "ThrottlingException", Deferred),
        (400, "ValidationException", Rejected),
        (500, "InternalServerError", Unknown),
    ],
)
def test_an_error_of_aws_is_an_outcome(remote: FaultyHttp, status: int, code: str, expected: type[Outcome]) -> None:
    remote.behave(answer(status, json={"__type": f"com.amazonaws#{code}", "message": "secret"}))

    outcome = send(made(remote))

    assert isinstance(outcome, expected)
    assert "secret" not in repr(outcome)
    assert len(remote.requests) == 1


def test_a_lost_answer_is_unknown_and_is_not_repeated_by_boto3(remote: FaultyHttp) -> None:
    remote.behave(close)

    assert isinstance(send(made(remote)), Unknown)
    assert len(remote.requests) == 1


def test_a_payload_that_sets_the_token_is_rejected_unsent(remote: FaultyHttp) -> None:
    outcome = send(made(remote), {**WRITE, "ClientRequestToken": "mine"})

    assert isinstance(outcome, Rejected)
    assert "must not set 'ClientRequestToken'" in outcome.reason
    assert remote.requests == []


def test_without_a_token_the_key_is_a_mark_and_nothing_is_sent_again(remote: FaultyHttp) -> None:
    mark = Mark("EmailTags[]", {"Name": "outbox_key", "Value": "{key}"})
    remote.behave(answer(200, json={"MessageId": "m-1"}))
    mails = made(remote, "sesv2", "send_email", key=NoKey(mark=mark, search="events with the tag outbox_key = {key}"))

    outcome = send(mails, {"Content": {"Raw": {"Data": "eA=="}}, "EmailTags": [{"Name": "a", "Value": "b"}]})

    assert outcome == Delivered({"MessageId": "m-1"})
    key = mails.key_format.encode(TAGS[0])
    assert json.loads(remote.requests[0].body)["EmailTags"][1] == {"Name": "outbox_key", "Value": key}
    assert (mails.window, mails.at_least_once) == (None, False)


@pytest.mark.parametrize(
    ("service", "operation", "given", "said"),
    [
        ("sesv2", "send_email", {}, "has no idempotency token"),
        ("ec2", "run_instances", {}, "how long ec2 remembers ClientToken"),
        ("ec2", "run_instance", {}, "did you mean 'run_instances'"),
        ("ec2", "run_instances", {"key": NoKey()}, "has a token, ClientToken"),
        ("nowhere", "x", {}, "cannot make a client for nowhere"),
    ],
)
def test_what_cannot_be_repeated_safely_is_refused(
    remote: FaultyHttp, service: str, operation: str, given: Any, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        made(remote, service, operation, **given)


def test_a_token_s_window_that_the_model_states_is_known(remote: FaultyHttp) -> None:
    assert made(remote).window == timedelta(minutes=10)


@pytest.mark.parametrize("service", ["ec2", "dynamodb", "secretsmanager", "scheduler", "ecs", "efs", "route53domains"])
def test_every_token_of_a_service_takes_the_key(remote: FaultyHttp, service: str) -> None:
    client = boto3.Session(region_name="eu-central-1").client(service)
    names = client.meta.method_to_api_mapping
    tokened = [n for n in names if client.meta.service_model.operation_model(names[n]).idempotent_members]

    adapters = [made(remote, service, name, window=HOUR) for name in tokened[:3]]

    assert all(adapter.key_format.misfit() is None for adapter in adapters)


def test_credentials_are_never_shown(remote: FaultyHttp) -> None:
    adapter = made(remote)

    assert SECRET not in repr(adapter) + adapter.pinned
