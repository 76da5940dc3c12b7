"""Redis Streams: appends each entry to a stream as one message, and waits for the server's answer.

    orders = RedisAdapter(urls="rediss://shop:...@redis.example.com", at_least_once=True)
    Dispatcher(..., adapters={"orders": orders})

    outbox.enqueue(session, "orders.placed", {"number": "C-1"}, parent="order:C-1")     # to the stream `orders.placed`

The field `payload` is the payload's JSON. The child key is the field `event_id`, where `outbox.inboxes.from_redis` finds it.
The adapter deduplicates nothing: after a lost answer an entry is `uncertain`, unless the adapter has `at_least_once=True`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot

from dispatchers.adapters.brokers.batch import BatchAdapter, messages_of, parts_of
from dispatchers.adapters.brokers.redis_answers import Moved
from dispatchers.adapters.brokers.redis_connection import FAILURES, Arguments, RedisConnection, connected
from dispatchers.adapters.brokers.urls import checked_urls
from dispatchers.adapters.one_connection import OneConnection
from dispatchers.adapters.places import EVENT_ID, OPERATION, Places
from dispatchers.delivery import Answered, Deferred, Delivery, Outcome
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy
from outbox.errors import ConfigurationError

PAYLOAD: Final = "payload"
MAX_MESSAGES: Final = 500  # in one write
MAX_BYTES: Final = 1_048_576  # of the payloads in one write
OPTIONS: Final = frozenset(
    {
        *("username", "password", "credential_provider", "client_name"),
        *("ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_password"),
        *("ssl_check_hostname", "ssl_min_version"),
    }
)
"""What `client_options` may have: the options of redis-py that decide neither how long it waits nor whether it tries again."""

Node = tuple[str, int] | None
"""A node of a cluster, or one of the servers that the adapter was given."""


class Message(NamedTuple):
    """One XADD. bucket: the hash bucket of its stream. size: of its payload, in bytes."""

    bucket: int
    command: Arguments
    size: int


Numbered: TypeAlias = tuple[int, Message]
"""A message, with the place of its delivery in the batch."""

Take: TypeAlias = Callable[[Numbered, Outcome | Moved], None]


class RedisAdapter(BatchAdapter):
    """Appends to streams. It needs Redis 6 or later, also as a cluster, or what speaks its protocol.

    urls: "redis://user:password@host:6379/0", "rediss://" or "unix://"; several for one primary that moves among them, or for one
        cluster. They are never shown.
    stream: of each operation: a template with `{operation}`, or a mapping from operations to streams. An entry's
        `options={"stream": ...}` replaces it.
    maxlen: about how many messages a stream keeps (`MAXLEN ~`); None for all. Redis deletes the oldest, read or not.
    replicas: how many replicas must confirm a message (`WAIT`). Without enough of them it is in doubt.
    at_least_once: whether to append again after a lost answer. The message may then be there twice, and the consumer's inbox
        must recognise it. False, the default: the entry is `uncertain`.
    client_options: options of redis-py for the connection: username, password, credential_provider, ssl_ca_certs. They are
        never shown.
    """

    def __init__(
        self,
        *,
        urls: str | Sequence[str],
        stream: str | Mapping[str, str] = OPERATION,
        maxlen: int | None = None,
        replicas: int = 0,
        at_least_once: bool = False,
        timeout: timedelta = timedelta(seconds=10),
        retry: RetryPolicy = DEFAULT_RETRY,
        client_options: Mapping[str, Any] | None = None,
    ) -> None:
        if maxlen is not None and (not isinstance(maxlen, int) or maxlen < 1):
            raise ConfigurationError(f"maxlen={maxlen!r} must be an int of at least 1, or None")
        if not isinstance(replicas, int) or replicas < 0:
            raise ConfigurationError(f"replicas={replicas!r} must be an int of at least 0")
        self.at_least_once = at_least_once
        self.timeout = timeout
        self.retry = retry
        self._pools = _pools(urls, client_options or {})
        self._places = Places("stream", stream)
        self._trimming: Arguments = () if maxlen is None else ("MAXLEN", "~", maxlen)
        self._replicas = replicas
        self._connections: dict[Node, OneConnection[RedisConnection]] = {}
        self._nodes: dict[int, Node] = {}  # by hash bucket; empty without a cluster

    def __repr__(self) -> str:
        return f"RedisAdapter(replicas={self._replicas!r})"

    async def send_batch(self, deliveries: Sequence[Delivery], answered: Answered) -> None:
        """Append the messages, and those that a cluster has moved once more, at the node that it names."""
        messages = messages_of(deliveries, self._message_of, answered)
        latest = deliveries[0].deadline - self.timeout.total_seconds() / 2
        for part in parts_of(messages, max_items=MAX_MESSAGES, max_size=MAX_BYTES, size=lambda each: each[1].size):
            moved = await self._append(part, latest, answered)
            for number, _ in await self._append(moved, latest, answered):
                answered(number, Deferred("the cluster moves the stream"))

    async def aclose(self) -> None:
        """Close the connections. You may use the adapter again afterwards."""
        for connection in self._connections.values():
            await connection.aclose()

    def _message_of(self, delivery: Delivery) -> Message:
        stream = self._places.of(delivery)
        bucket = key_slot(stream.encode())
        fields = {EVENT_ID: delivery.key, "content-type": "application/json", **delivery.headers}
        named = [part for field in fields.items() for part in field]
        command = ("XADD", stream, *self._trimming, "*", PAYLOAD, delivery.payload_json, *named)
        return Message(bucket, command, len(delivery.payload_json))

    async def _append(self, messages: Sequence[Numbered], latest: float, answered: Answered) -> Sequence[Numbered]:
        """Append each message at the node that has its stream, as far as known. Returns those that another node must take."""
        of_nodes = dict[Node, list[Numbered]]()
        for each in messages:
            of_nodes.setdefault(self._nodes.get(each[1].bucket), []).append(each)
        moved = list[Numbered]()

        def take(message: Numbered, outcome: Outcome | Moved) -> None:
            if isinstance(outcome, Moved):
                self._nodes[outcome.bucket] = (outcome.host, outcome.port)
                moved.append(message)
            else:
                answered(message[0], outcome)

        async with asyncio.TaskGroup() as writes:
            for node, those in of_nodes.items():
                writes.create_task(self._append_at(node, those, latest, take))
        return moved

    async def _append_at(self, node: Node, messages: Sequence[Numbered], latest: float, take: Take) -> None:
        if node not in self._connections:
            self._connections[node] = OneConnection(partial(self._open, node))
        connection = await self._connections[node].ready_or_refusal(latest, FAILURES)
        if isinstance(connection, Deferred):
            self._nodes = {bucket: each for bucket, each in self._nodes.items() if each != node}
            for message in messages:
                take(message, connection)
            return
        commands = [message.command for _, message in messages]
        await connection.append(commands, latest, lambda place, outcome: take(messages[place], outcome))

    async def _open(self, node: Node) -> RedisConnection:
        wait_seconds = (
            self.timeout.total_seconds() * 0.4
        )  # what is written at `latest` must be answered in the other half
        return await connected(
            [_client(pool, node) for pool in (self._pools if node is None else self._pools[:1])],
            lambda client: RedisConnection(client, self._replicas, wait_seconds),
        )


def _client(pool: ConnectionPool, node: Node) -> Callable[[], AbstractConnection]:
    """The constructor of a client; for a node of a cluster with the settings of the first server."""
    there = {} if node is None else {"host": node[0], "port": node[1]}
    return partial(pool.connection_class, **pool.connection_kwargs | there)


def _pools(urls: str | Sequence[str], client_options: Mapping[str, Any]) -> list[ConnectionPool]:
    """One for each server. They hold settings and no connection."""
    given = checked_urls(urls, ("redis", "rediss", "unix"), example="rediss://user:password@host:6379/0")
    if unknown := sorted(client_options.keys() - OPTIONS):
        raise ConfigurationError(f"client_options has {unknown}: it may have {', '.join(sorted(OPTIONS))}")
    for number, url in enumerate(given):
        if unknown := sorted(parse_qs(urlsplit(url).query).keys() - OPTIONS - {"db"}):
            raise ConfigurationError(
                f"urls[{number}] has {unknown}: its query may have db, {', '.join(sorted(OPTIONS))}"
            )
    try:
        alone = {"retry": Retry(NoBackoff(), 0), "socket_timeout": None, "socket_connect_timeout": None}
        settings = {"protocol": 2, **alone, **client_options}
        return [ConnectionPool.from_url(url, **settings) for url in given]
    except ValueError as error:
        raise ConfigurationError(f"urls: redis-py refuses them: {type(error).__name__}") from None
