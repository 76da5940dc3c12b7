"""One connection to RabbitMQ, with one channel: publishes messages, and waits for the server's confirmation of each."""

import asyncio
import ssl
from collections.abc import Sequence
from contextlib import suppress
from random import sample
from typing import Final, cast

import aiormq
from aiormq import Channel, spec
from aiormq.abc import AbstractConnection
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
    DeliveryError,
    PublishError,
)

from dispatchers.adapters.one_connection import NotReady
from dispatchers.delivery import Deferred, Delivered, Outcome, Unknown

CONNECT_SECONDS: Final = 5
FAILURES: Final = (AMQPError, OSError, RuntimeError, asyncio.CancelledError)
"""What the client raises when a connection or a channel ends. It cancels what waits, too."""


class RabbitMqConnection:
    """Publishes to one exchange, and never connects again.

    A server ends the channel of a message that it refuses for its exchange or user, and all messages in flight on it are then in
    doubt. So the first message is sent alone: if exchange or permission are wrong, it is the refused one.
    """

    def __init__(self, connection: AbstractConnection, exchange: str) -> None:
        self._connection = connection
        self._exchange = exchange
        self._channel: Channel | None = None
        self._alone = asyncio.Lock()
        self._has_confirmed = False
        self._in_flight = 0
        self._lost_with: int | None = None  # how many messages were in flight when the channel was refused
        self._unanswered = False

    async def open(self) -> None:
        channel = cast(
            Channel, await self._connection.channel(on_return_raises=True)
        )  # its abstract class lacks `wait`
        self._channel = channel
        if self._exchange:
            try:
                await channel.exchange_declare(self._exchange, passive=True)
            except ChannelNotFoundEntity:
                raise NotReady(f"there is no exchange {self._exchange!r}") from None

    @property
    def is_usable(self) -> bool:
        channel = self._channel
        return channel is not None and not (channel.is_closed or self._connection.is_closed or self._unanswered)

    @property
    def is_awaited(self) -> bool:
        return self._in_flight > 0

    async def publish(self, body: bytes, routing_key: str, properties: spec.Basic.Properties, latest: float) -> Outcome:
        """Publish one message and wait for its confirmation, without a limit. latest: when it may be written."""
        try:
            async with asyncio.timeout_at(latest):
                await self._connection.ready()
        except TimeoutError:
            return Deferred("the server takes no messages now (connection.blocked)", cooldown=True)
        if self._has_confirmed:
            return await self._publish(body, routing_key, properties)
        async with self._alone:
            if not self._has_confirmed:
                return await self._publish(body, routing_key, properties)
        return await self._publish(body, routing_key, properties)

    async def aclose(self) -> None:
        with suppress(Exception):
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._connection.close()

    async def _publish(self, body: bytes, routing_key: str, properties: spec.Basic.Properties) -> Outcome:
        channel = self._channel
        if channel is None or not self.is_usable:
            return Deferred("nothing was sent: the connection was lost")
        self._in_flight += 1
        try:
            await channel.basic_publish(
                body,
                exchange=self._exchange,
                routing_key=routing_key,
                properties=properties,
                mandatory=True,
                wait=False,  # all that are sent in one turn of the event loop share a write
            )
        except PublishError:
            self._has_confirmed = True
            return Deferred(f"no queue is bound to the exchange {self._exchange!r} for this routing key")
        except DeliveryError:
            self._has_confirmed = True
            return self._refused()
        except ChannelInvalidStateError:  # the channel ended while the message waited for those before it to be written
            return Deferred("nothing was sent: the channel was lost")
        except (ChannelAccessRefused, ChannelNotFoundEntity) as error:
            return self._channel_refused(type(error).__name__)
        except FAILURES as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                self._unanswered = True  # perhaps it is cut off from the others: the next send connects again
                raise
            return Unknown(f"no confirmation: {type(error).__name__}")
        finally:
            self._in_flight -= 1
        self._has_confirmed = True
        return Delivered()

    def _channel_refused(self, error: str) -> Outcome:
        """The server has ended the channel because of one message. It does not say which, and may have stored the others."""
        if self._lost_with is None:  # the others end after this one, and `_in_flight` counts down
            self._lost_with = self._in_flight
        reason = f"the exchange {self._exchange!r}: {error}"
        is_surely_this = self._lost_with == 1 and not self._unanswered
        return Deferred(reason, cooldown=True) if is_surely_this else Unknown(reason, cooldown=True)

    def _refused(self) -> Outcome:
        """A negative confirmation: a full queue with `overflow: reject-publish`, or a failure of the queue."""
        if not self._exchange:  # it names one queue
            return Deferred("the queue has refused the message", cooldown=True)
        return Unknown("a queue has refused the message; another one may have it", cooldown=True)


async def connected(urls: Sequence[str], tls: ssl.SSLContext | None, exchange: str) -> RabbitMqConnection:
    """A connection to one of the servers, in a random order. Raises what the last one has raised; `NotReady` at once."""
    failure: BaseException = OSError("no server")
    for url in sample(urls, len(urls)):
        opened: RabbitMqConnection | None = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                opened = RabbitMqConnection(await aiormq.connect(url, context=tls), exchange)
                await opened.open()
            return opened
        except BaseException as error:
            if opened is not None:
                await opened.aclose()
            if not isinstance(error, FAILURES) or _is_cancelled():
                raise
            failure = error
    raise OSError(type(failure).__name__) if isinstance(failure, asyncio.CancelledError) else failure


def _is_cancelled() -> bool:
    """Whether the present task itself was cancelled, and not only something of the client for which it waits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
