"""RabbitMQ: publishes each entry as one persistent message, and waits until the server has confirmed it.

    orders = RabbitMqAdapter(urls="amqps://shop:...@host/", exchange="shop")
    Dispatcher(..., adapters={"orders": orders})

    outbox.enqueue(session, "orders.placed", {"number": "C-1"}, parent="order:C-1")     # with routing key `orders.placed`

The body is the payload's JSON. The child key is the property `message_id`, where `outbox.inboxes.from_rabbitmq` finds it.
RabbitMQ deduplicates nothing: after a lost confirmation an entry is `uncertain`, unless the adapter has `at_least_once=True`.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

from aiormq import spec
from aiormq.exceptions import AMQPError

from dispatchers.adapters.brokers.rabbitmq_connection import RabbitMqConnection, connected
from dispatchers.adapters.brokers.urls import checked_urls
from dispatchers.adapters.one_connection import OneConnection
from dispatchers.adapters.places import OPERATION, Places, PlacesAdapter, Unsendable
from dispatchers.adapters.trust import Tls, given_context
from dispatchers.delivery import Deferred, Delivery, Outcome, Rejected
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy
from outbox.errors import ConfigurationError

FAILURES: Final = (AMQPError, OSError, RuntimeError)  # a TimeoutError too
PERSISTENT: Final = 2
MAX_NAME_BYTES: Final = 255  # AMQP 0-9-1, "short string"


class RabbitMqAdapter(PlacesAdapter):
    """Publishes to one exchange with publisher confirms. Every message is mandatory: one that reaches no queue is refused.

    urls: of one cluster: "amqp://user:password@host:5672/vhost", or "amqps://". They are never shown.
    exchange: it must exist. "" is the default exchange, in which the routing key is the name of a queue.
    routing_key: of each operation: a template with `{operation}`, or a mapping from operations to keys. An entry's
        `options={"routing_key": ...}` replaces it.
    at_least_once: whether to publish again after a lost confirmation. The message may then be there twice, and the consumer's
        inbox must recognise it. False, the default: the entry is `uncertain`.
    tls: for amqps, as in `HttpAdapter`; by default aiormq's authorities.
    """

    def __init__(
        self,
        *,
        urls: str | Sequence[str],
        exchange: str = "",
        routing_key: str | Mapping[str, str] = OPERATION,
        at_least_once: bool = False,
        timeout: timedelta = timedelta(seconds=10),
        retry: RetryPolicy = DEFAULT_RETRY,
        tls: Tls = None,
    ) -> None:
        self._urls = checked_urls(urls, ("amqp", "amqps"), example="amqps://user:password@host/vhost")
        if not isinstance(exchange, str) or len(exchange.encode()) > MAX_NAME_BYTES:
            raise ConfigurationError(f"exchange={exchange!r} must be a text of at most {MAX_NAME_BYTES} bytes")
        self.at_least_once = at_least_once
        self.timeout = timeout
        self.retry = retry
        self._exchange = exchange
        self._places = Places("routing_key", routing_key)
        self._tls = given_context(tls)
        self._connection = OneConnection(self._open)

    def __repr__(self) -> str:
        return f"RabbitMqAdapter(exchange={self._exchange!r})"

    async def send(self, delivery: Delivery) -> Outcome:
        try:
            routing_key = self._places.of(delivery)
        except Unsendable as problem:
            return Rejected(str(problem))
        if len(routing_key.encode()) > MAX_NAME_BYTES:
            return Rejected(f"the routing key is longer than {MAX_NAME_BYTES} bytes")
        latest = delivery.deadline - self.timeout.total_seconds() / 2
        connection = await self._connection.ready_or_refusal(latest, FAILURES)
        if isinstance(connection, Deferred):
            return connection
        properties = spec.Basic.Properties(
            content_type="application/json",
            delivery_mode=PERSISTENT,
            headers=dict(delivery.headers) or None,
            message_id=delivery.key,
        )
        return await connection.publish(delivery.payload_json, routing_key, properties, latest)

    async def aclose(self) -> None:
        """Close the connection. You may use the adapter again afterwards."""
        await self._connection.aclose()

    async def _open(self) -> RabbitMqConnection:
        return await connected(self._urls, self._tls, self._exchange)
