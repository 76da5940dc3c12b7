"""One connection to a NATS server: publishes to one stream, and waits for the answer to each message."""

import asyncio
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from random import sample
from typing import Any, Final, NamedTuple, TypeAlias

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import (
    BadHeaderError,
    BadSubjectError,
    ConnectionClosedError,
    ConnectionDrainingError,
    Error,
    MaxPayloadError,
    OutboundBufferLimitError,
)
from nats.js.errors import NotFoundError

from dispatchers.adapters.brokers.nats_answers import answer_reader, unfit
from dispatchers.adapters.one_connection import NotReady
from dispatchers.delivery import Answered, Deferred, Outcome, Rejected, Unknown

log = logging.getLogger("outbox.dispatcher")

CONNECT_SECONDS: Final = 2  # for one server of several
MAX_CHECK_SECONDS: Final = 1.5
"""The limit for the server's answer about the stream: below CONNECT_SECONDS, so that the reason names the stream."""
CHECK_SECONDS: Final = 10.0  # how old the knowledge of the stream's configuration may be when a message is sent
HEADERS_BYTES: Final = 512  # more than the headers of the adapter and of a trace have
MAX_PINGS_UNANSWERED: Final = 2
NO_LIMIT: Final = -1
"""No limit for bytes that wait to be written: above one, `Client.publish` waits for the server and ignores cancellation."""

NOT_WRITTEN: Final = (ConnectionClosedError, ConnectionDrainingError, OutboundBufferLimitError)
NEVER_WRITTEN: Final = (BadHeaderError, BadSubjectError, MaxPayloadError)
"""What the client raises before it writes anything: because of the connection, and because of the message."""
TOO_LARGE: Final = "the message is larger than the server allows: {} bytes"


class Message(NamedTuple):
    """One message, before it is published."""

    subject: str
    payload: bytes
    headers: dict[str, str]


class Batch:
    """Messages that were published together. answered: called with the outcome of each. ended: after the last outcome."""

    __slots__ = ("answered", "ended", "left")

    def __init__(self, answered: Answered, ended: asyncio.Future[None], left: int) -> None:
        self.answered = answered
        self.ended = ended
        self.left = left

    def take(self, number: int, outcome: Outcome) -> None:
        self.left -= 1
        if not self.left and not self.ended.done():
            self.ended.set_result(None)
        self.answered(number, outcome)


Sent: TypeAlias = tuple[str, int, Batch]
"""A message that waits for its answer: its subject, and its number in its batch."""

REFUSED_SUBJECT: Final = re.compile(
    r'permissions violation for publish to "([^"]+)"'
)  # the client reports it in small letters


class NatsConnection:
    """Publishes to one stream. It never connects again: a message that the client had buffered could leave long after its send.

    stream, window: as the adapter declares them.
    """

    def __init__(self, stream: str, window: timedelta | None) -> None:
        self._stream = stream
        self._window = window
        self._client = Client()
        self._inbox = ""
        self._count = 0
        self._read = answer_reader(stream, None)
        self._sent: dict[str, Sent] = {}  # by the inbox of its answer
        self._refusals = Counter[str]()  # of messages that have not ended, by subject in small letters
        self._comparing: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._checked_until = 0.0
        self._checking: asyncio.Task[None] | None = None
        self._unanswered = False

    async def open(self, server: str, options: Mapping[str, Any], ping_seconds: float) -> None:
        """Connect to this server and check the stream. Raises what the client raises, and `NotReady`."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._client.connect(
                    server,
                    **options,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=CONNECT_SECONDS,
                    ping_interval=ping_seconds,  # type: ignore[arg-type]  # it sleeps that long
                    max_outstanding_pings=MAX_PINGS_UNANSWERED,
                    pending_size=NO_LIMIT,
                    skip_subject_validation=True,  # the adapter has checked the subject more strictly
                    error_cb=self._reported,  # the client's own logs the error with all it holds
                    closed_cb=self._lost,
                )
                self._inbox = f"{self._client.new_inbox()}."
                await self._client.subscribe(f"{self._inbox}*", cb=self._answered)
                await self._check()
        except BaseException:
            await self.aclose()
            raise

    @property
    def is_usable(self) -> bool:
        return not self._unanswered and self._client.is_connected

    @property
    def is_awaited(self) -> bool:
        return bool(self._sent) or self._checking is not None

    @property
    def is_checked(self) -> bool:
        """Whether the stream's configuration was read a moment ago."""
        return self._loop.time() < self._checked_until

    async def check(self, latest: float) -> None:
        """Read the stream's configuration again; all sends wait for one reading. Raises as `open` does, and TimeoutError."""
        if self._checking is None:
            self._checking = self._loop.create_task(self._check())
            self._checking.add_done_callback(self._has_checked)
        async with asyncio.timeout_at(latest):
            await asyncio.shield(self._checking)

    async def publish(self, messages: Sequence[tuple[int, Message]], answered: Answered) -> None:
        """Publish the messages and wait for the stream's answers, without a limit of its own.

        messages: each with the place of its delivery in the batch. answered: gets each outcome.
        """
        batch = Batch(answered, self._loop.create_future(), len(messages))
        publish, surely_small = self._client.publish, self._client.max_payload - HEADERS_BYTES
        try:
            for number, (subject, payload, headers) in messages:
                self._count += 1
                reply = f"{self._inbox}{self._count}"
                self._sent[reply] = subject, number, batch
                if len(payload) > surely_small and self._is_too_large(payload, headers):
                    self._end(reply, Rejected(TOO_LARGE.format(self._client.max_payload)))
                    continue
                try:
                    await publish(subject, payload, reply, headers)
                except Exception as error:  # of this message: the others of the batch must still be sent
                    self._end(reply, unpublished(error))
            await batch.ended
        except asyncio.CancelledError:
            # Perhaps this server is cut off from the others: the next send connects again, to any server.
            self._unanswered = True
            raise
        finally:
            if batch.left:
                self._sent = {reply: sent for reply, sent in self._sent.items() if sent[2] is not batch}

    def _end(self, reply: str, outcome: Outcome) -> None:
        """End the message that waits for an answer to this inbox, if there is one."""
        sent = self._sent.pop(reply, None)
        if sent is not None:
            _, number, batch = sent
            batch.take(number, outcome)

    async def aclose(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
        await self._lost()
        with suppress(Exception):
            async with asyncio.timeout(CONNECT_SECONDS):  # it writes first what still waits
                await self._client.close()

    async def _check(self) -> None:
        began = self._loop.time()
        try:
            info = await self._client.jetstream(timeout=MAX_CHECK_SECONDS).stream_info(self._stream)
        except NotFoundError:
            raise NotReady(f"there is no stream {self._stream!r}") from None
        except Error as error:
            needed = f"the user needs the permission for $JS.API.STREAM.INFO.{self._stream}"
            reason = f"the stream's configuration cannot be read: {type(error).__name__}; {needed}"
            raise NotReady(reason) from None
        problem = unfit(info.config, self._window)
        if problem is not None:
            raise NotReady(f"the stream {self._stream!r} cannot be used: {problem}", cooldown=True)
        self._read = answer_reader(self._stream, info.config.num_replicas)
        self._checked_until = began + CHECK_SECONDS

    def _has_checked(self, checking: asyncio.Task[None]) -> None:
        self._checking = None
        with suppress(BaseException):  # a send that waited has raised it
            checking.exception()

    def _is_too_large(self, payload: bytes, headers: Mapping[str, str]) -> bool:
        written = sum(len(f"{name}: {value}\r\n".encode()) for name, value in headers.items())
        return len(payload) + len(b"NATS/1.0\r\n\r\n") + written > self._client.max_payload

    async def _answered(self, message: Msg) -> None:
        if message.subject in self._sent:
            self._end(message.subject, self._read(message.headers, message.data))
            if self._refusals:
                self._compare_soon()

    async def _lost(self) -> None:
        for reply in list(self._sent):
            self._end(reply, Unknown("the connection was lost before the answer"))

    async def _reported(self, error: Exception) -> None:
        """A server that forbids a subject says so here, and sends no answer. What else comes here, methods raise as well."""
        found = REFUSED_SUBJECT.search(str(error))
        if found is not None:
            self._refusals[found[1]] += 1
            self._compare_soon()

    def _compare_soon(self) -> None:
        """Compare soon, at most once in each turn of the event loop."""
        if self._comparing is None:
            self._comparing = self._loop.call_soon(self._end_refused)

    def _end_refused(self) -> None:
        """End the messages of a refused subject when no other one of this subject is in flight.

        The server reports each refusal, but not of which message. It may have taken an earlier one with the same subject.
        """
        self._comparing = None
        if self._unanswered:  # the refusals of the sends that were cancelled come too
            return
        in_flight = defaultdict[str, list[tuple[str, str]]](list)
        for reply, (subject, *_) in self._sent.items():
            in_flight[subject.lower()].append((reply, subject))
        for refused, count in list(self._refusals.items()):
            if count >= len(in_flight[refused]):
                del self._refusals[refused]
                for reply, subject in in_flight[refused]:
                    reason = f"the server's permissions forbid to publish to {subject!r}"
                    self._end(reply, Deferred(reason, cooldown=True))


def unpublished(error: Exception) -> Outcome:
    """The outcome of a message for which the client has raised this."""
    reason = type(error).__name__
    if isinstance(error, NEVER_WRITTEN):
        return Rejected(f"it cannot be sent: {reason}")
    if isinstance(error, NOT_WRITTEN):
        return Deferred(f"nothing was sent: {reason}")
    log.error("nats-py raised while a message was published: this counts as no answer", exc_info=error)
    return Unknown(f"no answer: {reason}")


async def connected(
    servers: Sequence[str],
    options: Mapping[str, Any],
    *,
    stream: str,
    window: timedelta | None,
    ping_seconds: float,
) -> NatsConnection:
    """A connection to one of the servers, in a random order. Raises what the last one has raised; `NotReady` at once."""
    failure: Exception = OSError("no server")
    for server in sample(servers, len(servers)):
        connection = NatsConnection(stream, window)
        try:
            await connection.open(server, options, ping_seconds)
        except (Error, OSError) as error:  # asyncio's TimeoutError is an OSError
            failure = error
        else:
            return connection
    raise failure
