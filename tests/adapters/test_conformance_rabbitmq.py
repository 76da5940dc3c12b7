"""RabbitMqAdapter in the conformance suite: with an exchange, and with the default exchange."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import aiormq
import aiormq.exceptions
import pytest
from support.fake_broker import CLOSE, HANG, NO_LISTENER
from support.fake_rabbitmq import FORBIDDEN, NACK, NO_QUEUE, FakeRabbitMq

from dispatchers import Adapter, Deferred, Delivered, InProgress, KeyConflict, Rejected, Unknown
from dispatchers.adapters import RabbitMqAdapter
from dispatchers.testing.conformance import AdapterSuite, Scenario

PASSWORD = "open-sesame-5eb63bbb"


def on_publish(how: str) -> dict[str, Any]:
    return {"publish": how}


class RabbitMqSuite(AdapterSuite):
    operation = "orders.placed"
    payload: Any = {"to": "ada@example.com"}  # noqa: RUF012
    secrets = (PASSWORD,)
    private = ("ada@example.com",)
    client_exceptions = (aiormq.exceptions.AMQPError, OSError)
    exchange: str
    scenarios = (
        Scenario("confirmed", {}, Delivered),
        Scenario("no queue takes it", on_publish(NO_QUEUE), Deferred),
        Scenario("a forbidden exchange", on_publish(FORBIDDEN), Deferred),
        Scenario("closed after the message", on_publish(CLOSE), Unknown),
        Scenario("hangs after the message", on_publish(HANG), Unknown, hangs=True),
        Scenario("connection refused", {NO_LISTENER: ""}, Deferred, requests=0),
        Scenario("hangs before the message", {"greeting": HANG}, Deferred, requests=0, hangs=True),
        Scenario("login refused", {"greeting": CLOSE}, Deferred, requests=0),
        Scenario("publishers are blocked", {"blocked": True}, Deferred, requests=0, hangs=True),
    )
    never = {  # noqa: RUF012
        KeyConflict: "RabbitMQ does not compare messages",
        InProgress: "RabbitMQ knows no keys",
        Rejected: "it rejects only options of an entry and long routing keys, and no message",
    }

    def remote(self) -> FakeRabbitMq:
        return FakeRabbitMq()

    def adapter(self, remote: FakeRabbitMq, timeout: timedelta) -> Adapter:
        url = f"amqp://shop:{PASSWORD}@127.0.0.1:{remote.port}/"
        return RabbitMqAdapter(urls=url, exchange=self.exchange, routing_key="orders.{operation}", timeout=timeout)

    def raising(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Adapter:
        async def fail(*arguments: object, **named: object) -> None:
            raise error

        monkeypatch.setattr(aiormq, "connect", fail)
        return RabbitMqAdapter(urls="amqp://127.0.0.1:1/")

    def exception(self, cls: type[Exception], text: str) -> Exception:
        if issubclass(cls, aiormq.exceptions.PublishError):
            returned: Any = SimpleNamespace(delivery=aiormq.spec.Basic.Return(312, text, "", text))
            return cls(returned, aiormq.spec.Basic.Ack(1))
        return super().exception(cls, text)


class TestRabbitMq(RabbitMqSuite):
    exchange = "shop"
    scenarios = (
        *RabbitMqSuite.scenarios,
        Scenario("a queue refuses it", on_publish(NACK), Unknown),
        Scenario("no such exchange", {"no exchange": True}, Deferred, requests=0),
    )
    never = RabbitMqSuite.never
