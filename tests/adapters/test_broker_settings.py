"""What a broker's or a workflow engine's adapter refuses before it sends: settings and options with which nothing can be sent."""

from datetime import timedelta
from typing import Any

import pytest
from support.deliveries import asked
from support.faulty_aws import SESSION

from dispatchers import CannotTell, Rejected
from dispatchers.adapters import (
    DbosAdapter,
    EventBridgeAdapter,
    KafkaAdapter,
    NatsAdapter,
    RabbitMqAdapter,
    RedisAdapter,
    RestateAdapter,
    SqsFifoAdapter,
    TemporalAdapter,
)
from dispatchers.time_limits import FOREVER
from outbox.errors import ConfigurationError

SECRET = "s3cret"
FIFO = "https://sqs.eu-central-1.amazonaws.com/123456789012/orders.fifo"
ACCEPTED: dict[Any, dict[str, Any]] = {
    DbosAdapter: {"engine": "postgresql://db/shop", "queue": "orders", "window": FOREVER},
    EventBridgeAdapter: {"bus": "shop", "source": "com.example.shop", "boto3_session": SESSION},
    KafkaAdapter: {"bootstrap_servers": "127.0.0.1:1"},
    NatsAdapter: {"urls": "nats://127.0.0.1:1", "stream": "ORDERS"},
    RabbitMqAdapter: {"urls": "amqp://127.0.0.1:1/"},
    RedisAdapter: {"urls": "redis://127.0.0.1:1"},
    RestateAdapter: {"url": "https://restate.example.com"},
    SqsFifoAdapter: {"queue": FIFO, "boto3_session": SESSION},
    TemporalAdapter: {"address": "localhost:7233", "task_queue": "orders", "window": timedelta(days=7)},
}
"""The settings that each must have."""


@pytest.mark.parametrize(
    ("adapter", "changed", "says"),
    [
        (
            SqsFifoAdapter,
            {"queue": "https://sqs.eu-central-1.amazonaws.com/123456789012/orders"},
            "whose name ends in .fifo",
        ),
        (SqsFifoAdapter, {"queue": {"orders.placed": "orders"}}, "whose name ends in .fifo"),
        (SqsFifoAdapter, {"window": timedelta(minutes=6)}, "at most 0:05:00"),
        (SqsFifoAdapter, {"window": None}, "at most 0:05:00"),
        (SqsFifoAdapter, {"max_threads": 0}, "at least 1"),
        (SqsFifoAdapter, {"endpoint_url": "nowhere"}, "Invalid endpoint: nowhere"),
        (EventBridgeAdapter, {"source": ""}, "source="),
        (EventBridgeAdapter, {"source": "aws.shop"}, "source="),
        (DbosAdapter, {"queue": ""}, "queue='' must be the name of a DBOS queue"),
        (DbosAdapter, {"window": None}, "window=None: DBOS keeps the id of a workflow"),
        (DbosAdapter, {"engine": "sqlite:///shop.db"}, "engine has the driver 'sqlite'"),
        (DbosAdapter, {"engine": SECRET}, "engine must be a URL such as postgresql+psycopg://... (it is not shown)"),
        (KafkaAdapter, {"bootstrap_servers": ""}, "host:port"),
        (KafkaAdapter, {"timeout": timedelta(seconds=4)}, "at least 0:00:05"),
        (KafkaAdapter, {"client_options": {"acks": "1"}}, "must not contain ['acks']"),
        (KafkaAdapter, {"client_options": {"sasl.pasword": "s3cret"}}, "sasl.pasword"),
        (KafkaAdapter, {"client_options": {"security.protocol": "s3cret"}}, "security.protocol"),
        (KafkaAdapter, {"topic": {}}, "topic={}"),
        (NatsAdapter, {"urls": "127.0.0.1:4222"}, "urls[0] must be a URL"),
        (NatsAdapter, {"urls": []}, "must name one server at least"),
        (NatsAdapter, {"stream": "orders.placed"}, "stream='orders.placed' must be the name of a stream"),
        (NatsAdapter, {"subject": {}}, "subject={} must be a text"),
        (NatsAdapter, {"subject": {"orders.placed": ""}}, "or a mapping from operations to texts"),
        (NatsAdapter, {"subject": "orders.*"}, "subject='orders.*' cannot be used: the subject has a wildcard"),
        (NatsAdapter, {"subject": {"orders.placed": "$JS.API.INFO"}}, "belongs to the API of the server"),
        (NatsAdapter, {"window": FOREVER}, "window=FOREVER"),
        (NatsAdapter, {"client_options": {"allow_reconnect": True}}, "client_options has ['allow_reconnect']"),
        (RabbitMqAdapter, {"urls": "http://guest:s3cret@127.0.0.1"}, "urls[0] must be a URL such as amqps://"),
        (RabbitMqAdapter, {"urls": []}, "must name one server at least"),
        (RabbitMqAdapter, {"exchange": "a" * 256}, "must be a text of at most 255 bytes"),
        (RedisAdapter, {"urls": "http://guest:s3cret@127.0.0.1"}, "urls[0] must be a URL such as rediss://"),
        (RedisAdapter, {"urls": []}, "must name one server at least"),
        (RedisAdapter, {"urls": "redis://127.0.0.1:6379?retry_on_timeout=yes"}, "urls[0] has ['retry_on_timeout']"),
        (RedisAdapter, {"client_options": {"socket_timeout": 1}}, "client_options has ['socket_timeout']"),
        (RedisAdapter, {"maxlen": 0}, "maxlen=0 must be an int of at least 1"),
        (RedisAdapter, {"replicas": -1}, "replicas=-1 must be an int of at least 0"),
        (RestateAdapter, {"url": "restate.example.com"}, "url must be a URL"),
        (RestateAdapter, {"window": None}, "window=None must be a positive timedelta"),
        (RestateAdapter, {"target": "orders"}, "the target 'orders' must be Service/handler"),
        (RestateAdapter, {"target": {"orders.fulfil": "a/b/c/d"}}, "the target 'a/b/c/d' must be Service/handler"),
        (RestateAdapter, {"target": "{key}/run"}, "the target '{key}/run' must be Service/handler"),
        (RestateAdapter, {"headers": {"Idempotency-Key": SECRET}}, "headers: 'Idempotency-Key' cannot be set"),
        (RestateAdapter, {"headers": {"Authorization": "Bearer s3cret\n"}}, "headers: 'Authorization' cannot be set"),
        (TemporalAdapter, {"address": "https://s3cret"}, "address must be host:port"),
        (TemporalAdapter, {"address": "localhost"}, "address must be host:port"),
        (TemporalAdapter, {"task_queue": ""}, "task_queue='' must be a text"),
        (TemporalAdapter, {"namespace": ""}, "namespace='' must be a text"),
        (TemporalAdapter, {"window": None}, "window=None must be a positive timedelta"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(adapter: Any, changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        adapter(**ACCEPTED[adapter] | changed)

    assert says in str(refused.value)
    assert SECRET not in str(refused.value)


def test_a_mapping_serves_its_own_operations_and_names_a_similar_one() -> None:
    adapter = NatsAdapter(**ACCEPTED[NatsAdapter], subject={"orders.placed": "shop.orders"})

    assert adapter.serves("orders.placed")
    assert not adapter.serves("orders.plased")
    assert adapter.nearest("orders.plased") == "orders.placed"


@pytest.mark.parametrize(
    ("adapter", "options"),
    [
        (NatsAdapter, {"queue": "orders"}),
        (RabbitMqAdapter, {"subject": "orders"}),
        (RabbitMqAdapter, {"routing_key": "a" * 256}),
        (RedisAdapter, {"subject": "orders"}),
        (RestateAdapter, {"target": "orders"}),
        (RestateAdapter, {"target": "a//b"}),
        (RestateAdapter, {"target": "../b"}),
        (RestateAdapter, {"queue": "b"}),
        (SqsFifoAdapter, {"queue": FIFO.removesuffix(".fifo")}),
        *(
            (NatsAdapter, {"subject": subject})
            for subject in (
                "orders.two words",
                "orders.a\r\nPUB orders.b 0\r\n",
                "orders..placed",
                "orders.placed.",
                "orders.*",
                "orders.>",
                "$JS.API.STREAM.PURGE.ORDERS",
                "$SYS.REQ.SERVER.PING",
                f"orders.{'x' * 4_000}",
            )
        ),
    ],
)
def test_options_that_no_message_can_have_are_rejected_unsent(adapter: Any, options: dict[str, Any]) -> None:
    """A NATS server ends the connection after a long subject, and executes a command of its API."""
    made = adapter(**ACCEPTED[adapter])

    assert isinstance(asked(made, options=options), Rejected)
    if getattr(made, "find", None):
        assert isinstance(asked(made, "find", options=options), CannotTell)
