"""`AwsAdapter` with moto, over HTTP: tokens, SES and SMS. moto imitates AWS; no test here uses AWS itself."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import boto3
import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.dsql.models import dsql_backends
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from moto.ses.models import ses_backends
from moto.sns.models import sns_backends
from support.deliveries import asked
from support.faulty_aws import SESSION

from dispatchers import Delivered
from dispatchers.adapters import AwsAdapter
from dispatchers.adapters.providers import Mark, NoKey

TAG = Mark("EmailTags[]", {"Name": "outbox_key", "Value": "{key}"})


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def made(server: str, service: str, operation: str, session: Any = SESSION, **given: Any) -> AwsAdapter:
    return AwsAdapter(service, operation, boto3_session=session, endpoint_url=server, **given)


def test_a_token_that_is_sent_twice_makes_one_cluster(server: str) -> None:
    key, session = str(uuid4()), boto3.Session("AKIDEXAMPLE", "secret", region_name="us-east-1")
    given = {"session": session, "window": timedelta(hours=1)}
    outcomes = [asked(made(server, "dsql", "create_cluster", **given), "send", key, {}) for _ in range(2)]

    (cluster,) = dsql_backends[DEFAULT_ACCOUNT_ID]["us-east-1"].clusters.values()
    assert outcomes == [Delivered({"identifier": cluster.identifier, "arn": cluster.arn})] * 2


def test_a_mail_by_ses_has_the_key_as_a_tag(server: str) -> None:
    SESSION.client("ses", endpoint_url=server).verify_email_identity(EmailAddress="shop@example.com")
    text = {"Subject": {"Data": "Your order"}, "Body": {"Text": {"Data": "Hello"}}}
    mail = {
        "FromEmailAddress": "shop@example.com",
        "Destination": {"ToAddresses": ["ada@example.com"]},
        "Content": {"Simple": text},
    }
    outcome = asked(made(server, "sesv2", "send_email", key=NoKey(mark=TAG)), "send", "ck1_a", mail)

    (sent,) = ses_backends[DEFAULT_ACCOUNT_ID]["eu-central-1"].sent_messages
    assert outcome == Delivered({"MessageId": sent.id})


def test_an_sms_by_sns_is_sent_once(server: str) -> None:
    sms = {"PhoneNumber": "+4915112345678", "Message": "Your order is ready"}
    outcome = asked(made(server, "sns", "publish", key=NoKey()), "send", "ck1_a", sms)

    (id,) = sns_backends[DEFAULT_ACCOUNT_ID]["eu-central-1"].sms_messages
    assert outcome == Delivered({"MessageId": id})
