"""KafkaAdapter in the conformance suite, with the mock cluster of librdkafka and a relay in front of it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer
from support.faulty_kafka import (
    CUT,
    DEAF,
    DELIVER,
    DUPLICATE_SEQUENCE_NUMBER,
    REFUSE,
    SWALLOW,
    FaultyKafka,
    faulty_kafka,
)

from dispatchers import Adapter, Deferred, Delivered, InProgress, KeyConflict, Rejected, Unknown
from dispatchers.adapters import KafkaAdapter
from dispatchers.adapters.brokers import kafka_producer
from dispatchers.testing.conformance import AdapterSuite, Scenario

PASSWORD = "open-sesame-5eb63bbb"
TOPIC_AUTHORIZATION_FAILED = 29
MESSAGE_TOO_LARGE = 10
REQUEST_TIMED_OUT = 7
UNKNOWN_SERVER_ERROR = -1


class TestKafka(AdapterSuite):
    operation = "orders.placed"
    payload: Any = {"email": "ada@example.com"}  # noqa: RUF012
    secrets = (PASSWORD,)
    private = ("ada@example.com",)
    client_exceptions = (KafkaException, BufferError)
    remote_timeout = timedelta(seconds=5)
    scenarios = (
        Scenario("appended", DELIVER, Delivered),
        Scenario("too large", MESSAGE_TOO_LARGE, Rejected, requests=0),
        Scenario("not allowed", TOPIC_AUTHORIZATION_FAILED, Deferred, requests=0),
        Scenario("failed", UNKNOWN_SERVER_ERROR, Unknown, requests=0),
        Scenario("connection refused", REFUSE, Deferred, requests=0),
        Scenario("hangs before it is connected", DEAF, Deferred, requests=0, hangs=True),
        Scenario("hangs after the record", SWALLOW, Unknown, hangs=True),
        Scenario("closed after the record, each time", CUT, Unknown, hangs=True),
        Scenario("closed after the record, once", (CUT, DUPLICATE_SEQUENCE_NUMBER), Delivered),
        Scenario("not allowed at librdkafka's repetition", (CUT, TOPIC_AUTHORIZATION_FAILED), Unknown),
    )
    never: Mapping[type[Any], str] = {
        KeyConflict: "Kafka compares no records",
        InProgress: "Kafka has no answer for it",
    }

    def remote(self) -> AbstractContextManager[FaultyKafka]:
        return faulty_kafka()

    def adapter(self, remote: FaultyKafka, timeout: timedelta) -> Adapter:
        """A repetition leaves so late that on a busy machine a slow refusal is not taken for the answer to one."""
        backoff = int(timeout.total_seconds() * 1000) // 4
        return KafkaAdapter(
            bootstrap_servers=remote.servers,
            topic=remote.topic,
            timeout=timeout,
            client_options={
                "sasl.password": PASSWORD,
                "retry.backoff.ms": backoff,
                "retry.backoff.max.ms": backoff,
            },
        )

    def raising(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Adapter:
        class Failing(Producer):
            def produce(self, *args: object, **named: object) -> None:
                raise error

        monkeypatch.setattr(kafka_producer, "Producer", Failing)
        monkeypatch.setattr(kafka_producer.RunningProducer, "is_proven", lambda producer, topic: True)
        return KafkaAdapter(bootstrap_servers="127.0.0.1:1")
