"""The adapters of the library, one folder for each service. No adapter uses another one.

    from dispatchers.adapters import StripeAdapter

A service's SDK is imported when its adapter is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outbox.extras import missing, require_before

if TYPE_CHECKING:
    from dispatchers.adapters.brokers.aws.eventbridge import EventBridgeAdapter
    from dispatchers.adapters.brokers.aws.operation import AwsAdapter
    from dispatchers.adapters.brokers.aws.sns import SnsFifoAdapter
    from dispatchers.adapters.brokers.aws.sqs import SqsFifoAdapter
    from dispatchers.adapters.brokers.kafka import KafkaAdapter
    from dispatchers.adapters.brokers.nats import NatsAdapter
    from dispatchers.adapters.brokers.rabbitmq import RabbitMqAdapter
    from dispatchers.adapters.brokers.redis import RedisAdapter
    from dispatchers.adapters.email.adapter import SmtpAdapter
    from dispatchers.adapters.email.lookup import ImapSearch
    from dispatchers.adapters.http.adapter import HttpAdapter
    from dispatchers.adapters.memory import MemoryAdapter
    from dispatchers.adapters.stripe.adapter import StripeAdapter
    from dispatchers.adapters.workflows.dbos import DbosAdapter
    from dispatchers.adapters.workflows.restate import RestateAdapter
    from dispatchers.adapters.workflows.temporal import TemporalAdapter

__all__ = [
    "AwsAdapter",
    "DbosAdapter",
    "EventBridgeAdapter",
    "HttpAdapter",
    "ImapSearch",
    "KafkaAdapter",
    "MemoryAdapter",
    "NatsAdapter",
    "RabbitMqAdapter",
    "RedisAdapter",
    "RestateAdapter",
    "SmtpAdapter",
    "SnsFifoAdapter",
    "SqsFifoAdapter",
    "StripeAdapter",
    "TemporalAdapter",
]

_HOMES = {
    "AwsAdapter": "brokers.aws.operation",
    "DbosAdapter": "workflows.dbos",
    "EventBridgeAdapter": "brokers.aws.eventbridge",
    "HttpAdapter": "http.adapter",
    "ImapSearch": "email.lookup",
    "KafkaAdapter": "brokers.kafka",
    "MemoryAdapter": "memory",
    "NatsAdapter": "brokers.nats",
    "RabbitMqAdapter": "brokers.rabbitmq",
    "RedisAdapter": "brokers.redis",
    "RestateAdapter": "workflows.restate",
    "SmtpAdapter": "email.adapter",
    "SnsFifoAdapter": "brokers.aws.sns",
    "SqsFifoAdapter": "brokers.aws.sqs",
    "StripeAdapter": "stripe.adapter",
    "TemporalAdapter": "workflows.temporal",
}
"""The module of each adapter. The extra that installs an SDK has the folder's name; a broker's or a workflow
engine's has the file's name."""

_ON_HTTPX = {"HttpAdapter", "RestateAdapter", "StripeAdapter"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    extra = home.removeprefix("brokers.").removeprefix("workflows.").partition(".")[0]
    if name in _ON_HTTPX:
        require_before(name, extra, "httpx", 1)
    try:
        module = import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in {"dispatchers", "outbox"}:
            raise
        raise missing(name, extra, error) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
