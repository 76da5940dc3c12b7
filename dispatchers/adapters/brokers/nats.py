"""NATS JetStream: publishes each entry as one message of a stream, which drops a second message with the same id.

    orders = NatsAdapter(urls="nats://127.0.0.1:4222", stream="ORDERS", window=timedelta(minutes=2))
    Dispatcher(..., adapters={"orders": orders})

    outbox.enqueue(session, "orders.placed", {"number": "C-1"}, parent="order:C-1")     # to the subject `orders.placed`

The message carries the payload's JSON. The child key is the header `Nats-Msg-Id`, where `outbox.inboxes.from_nats` finds it.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from nats.errors import Error

from dispatchers.adapters.brokers.batch import BatchAdapter, messages_of
from dispatchers.adapters.brokers.nats_answers import unfit_subject
from dispatchers.adapters.brokers.nats_connection import Message, NatsConnection, connected
from dispatchers.adapters.brokers.urls import checked_urls
from dispatchers.adapters.one_connection import NotReady, OneConnection, no_connection
from dispatchers.adapters.places import OPERATION, Places, Unsendable
from dispatchers.adapters.trust import Tls, given_context
from dispatchers.delivery import Answered, Deferred, Delivery
from dispatchers.time_limits import DEFAULT_RETRY, FOREVER, RetryPolicy, Window
from outbox.errors import ConfigurationError

WINDOW: Final = timedelta(minutes=2)  # docs.nats.io/using-nats/developer/develop_jetstream/model_deep_dive
OPTIONS: Final = frozenset(
    {
        *("name", "inbox_prefix", "password", "tls_handshake_first", "tls_hostname", "token", "user"),
        *("nkeys_seed", "nkeys_seed_str", "user_credentials"),
    }
)
"""What `client_options` may have: the options of nats-py that decide neither when to connect again nor what is logged."""


class NatsAdapter(BatchAdapter):
    """Publishes to one stream. Before it sends, it compares the stream's configuration with what it declares.

    urls: of one cluster, such as "nats://host:4222" or "tls://host:4222".
    stream: the stream that must store the messages. Another stream that has the subject refuses them.
    subject: the subject of each operation: a template with `{operation}`, or a mapping from operations to subjects. An entry's
        `options={"subject": ...}` replaces it.
    window: how long the stream remembers an id: at most its `duplicate_window`. While it remembers ids for a shorter time, the
        adapter sends nothing, and the whole destination waits. None for a stream that remembers no ids.
    at_least_once: with `window=None`: whether to publish again after a lost answer, so that the message may be there twice.
    tls: as in `HttpAdapter`; by default nats-py's authorities.
    client_options: options of nats-py for the connection: user_credentials, nkeys_seed, user, password, token, name. They are
        never shown.
    """

    def __init__(
        self,
        *,
        urls: str | Sequence[str],
        stream: str,
        subject: str | Mapping[str, str] = OPERATION,
        window: Window = WINDOW,
        at_least_once: bool = False,
        timeout: timedelta = timedelta(seconds=10),
        retry: RetryPolicy = DEFAULT_RETRY,
        tls: Tls = None,
        client_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._urls = checked_urls(urls, ("nats", "tls", "ws", "wss"), example="nats://host:4222")
        if not isinstance(stream, str) or not stream or set(stream) & set(" \t\r\n.*>"):
            raise ConfigurationError(f"stream={stream!r} must be the name of a stream, without spaces, dots, * and >")
        if unknown := sorted((client_options or {}).keys() - OPTIONS):
            raise ConfigurationError(f"client_options has {unknown}: it may have {', '.join(sorted(OPTIONS))}")
        if window is FOREVER:
            raise ConfigurationError("window=FOREVER: every stream forgets ids: give its duplicate_window, or None")
        for name in [subject] if isinstance(subject, str) else subject.values():
            if isinstance(name, str) and name and (unfit := unfit_subject(name.replace(OPERATION, "orders.placed"))):
                raise ConfigurationError(f"subject={name!r} cannot be used: {unfit}")
        self.window = window
        self._remembered: timedelta | None = window  # FOREVER is refused above
        self.at_least_once = at_least_once
        self.timeout = timeout
        self.retry = retry
        if window is not None:  # the ids are those of one stream
            self.pinned = f"nats {stream}"
        self._stream = stream
        self._headers = {"Nats-Expected-Stream": stream, "Content-Type": "application/json"}
        self._places = Places("subject", subject)
        self._client_options = {**(client_options or {}), "tls": given_context(tls)}
        self._connection = OneConnection(self._open)

    def __repr__(self) -> str:
        return f"NatsAdapter(stream={self._stream!r}, window={self.window!r})"

    async def send_batch(self, deliveries: Sequence[Delivery], answered: Answered) -> None:
        """Publish the messages with one write, and wait for the answer to each."""
        messages = messages_of(deliveries, self._message_of, answered)
        if not messages:
            return
        connection = self._connection.present()
        if connection is None or not connection.is_checked:
            ready = await self._ready(deliveries[0].deadline - self.timeout.total_seconds() / 2)
            if isinstance(ready, Deferred):
                for number, _ in messages:
                    answered(number, ready)
                return
            connection = ready
        await connection.publish(messages, answered)

    def _message_of(self, delivery: Delivery) -> Message:
        subject = self._places.of(delivery)
        unfit = unfit_subject(subject)
        if unfit is not None:
            raise Unsendable(unfit)
        headers = {"Nats-Msg-Id": delivery.key, **self._headers, **delivery.headers}
        return Message(subject, delivery.payload_json, headers)

    async def aclose(self) -> None:
        """Close the connection. You may use the adapter again afterwards."""
        await self._connection.aclose()

    async def _ready(self, latest: float) -> NatsConnection | Deferred:
        """A connection to a stream that keeps what is declared; else why nothing was sent."""
        try:
            connection = await self._connection.ready(latest)
            if not connection.is_checked:
                await connection.check(latest)
            return connection
        except NotReady as problem:
            return problem.outcome
        except (Error, OSError) as error:  # a TimeoutError too
            return no_connection(error)

    async def _open(self) -> NatsConnection:
        seconds = self.timeout.total_seconds()
        return await connected(
            self._urls, self._client_options, stream=self._stream, window=self._remembered, ping_seconds=seconds / 2
        )
