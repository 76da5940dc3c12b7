"""How an adapter's HTTP requests are sent: one at a time on their own connection, with a deadline, and with a limit for the
answer's size.

An adapter makes an `httpx.Request`, and gets an `Answer` or one of httpx's exceptions. The adapter decides what they mean.
"""

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncIterable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, cast

import httpcore
import httpx

from dispatchers.adapters.causes import Cause
from dispatchers.adapters.http_client.answer_reader import AnswerHeaders, AnswerReader
from dispatchers.adapters.http_client.belonging import Belonging, ForeignAnswer, doubt_of_key
from dispatchers.adapters.http_client.connection import Connection
from dispatchers.adapters.http_client.connector import Connector
from dispatchers.adapters.http_client.pool import ConnectionPool
from dispatchers.adapters.http_client.request_writer import WITHOUT_ANSWERED_BODY, Origin, Outgoing
from dispatchers.adapters.trust import for_http
from outbox.errors import ConfigurationError

MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
MAX_REUSED_BYTES: Final = 64 * 1024
"""A longer request gets a connection of its own: a service may refuse it before it has read all of it, and on a connection that
was used before, such an answer would be in doubt."""
MAX_CONNECT_SECONDS: Final = 10.0  # a connection that takes longer will not succeed
HEADER_VALUE: Final = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
"""Values of headers that every server accepts. Source: RFC 9110, 5.5, without the obsolete bytes."""

NEVER_SENT: Final = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
)
"""The exceptions after which no byte of the request was sent: no connection, no TLS, no tunnel, or not in time."""

_is_sending: ContextVar[bool] = ContextVar("is_sending", default=False)


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Suppress DEBUG logs of httpcore: they show headers of answers, which quote requests and set cookies."""
    return not _is_sending.get()


for _name in ("connection", "http11", "http2", "proxy", "socks"):  # www.python-httpx.org/logging
    logging.getLogger(f"httpcore.{_name}").addFilter(_is_not_ours)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the service.

    body: the bytes as they were sent, never decompressed.
    whole: False if the body broke off, or was too long or too slow.
    is_first: the connection carried no other request, so this answer belongs to no other.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    whole: bool = field(default=True, kw_only=True)
    is_first: bool = field(default=True, repr=False, kw_only=True)


class Transport:
    """Sends requests over HTTP/1.1, without retries, redirects or compression.

    timeout: how long one send may take. The transport cancels it a little earlier, because a cancellation from outside loses
        the details. Connecting and TLS get up to a third each, so that an unreachable service is recognised.
    max_answer_bytes: how many bytes of a body are read.
    tls: by default the environment's authorities, or httpx's.
    proxy: the URL of a proxy; by default the environment's, see `Proxies`.
    origins: the services whose proxy is checked now.
    transport: replaces real connections in tests; it is not closed.
    reuse: False for a connection of its own for each request. Then no answer can belong to another request.

    Each request in flight has its own connection. A connection is used again only 10 ms to 1.5 s after an answer that ended
    where its framing says, and only if the server has neither closed it nor sent anything more. While respx or pytest-httpx
    replaces how httpx sends, it gets the requests.

    Raises `ConfigurationError` for settings with which nothing could be sent.
    """

    def __init__(
        self,
        *,
        timeout: timedelta,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        tls: ssl.SSLContext | None = None,
        proxy: str | None = None,
        reuse: bool = True,
        origins: Iterable[Origin] = (),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
            raise ConfigurationError(f"timeout must be a positive timedelta, not {timeout!r}")
        if not isinstance(max_answer_bytes, int) or max_answer_bytes < 0:
            raise ConfigurationError(f"max_answer_bytes must be a number of bytes, 0 or more, not {max_answer_bytes!r}")
        if transport is not None and proxy is not None:
            raise ConfigurationError("transport replaces all connections, so it goes with no proxy")
        seconds = timeout.total_seconds()
        self._seconds = seconds - min(0.1, seconds / 20)
        self._timeouts = httpx.Timeout(seconds, connect=min(MAX_CONNECT_SECONDS, seconds / 3)).as_dict()
        self._max_answer_bytes = max_answer_bytes
        self._tls = tls or for_http(None)
        self._connector = Connector(
            seconds=min(MAX_CONNECT_SECONDS, seconds / 3),
            tls=self._tls,
            proxy=proxy,
        )
        if transport is None:
            self._connector.require(origins)
        self._reuse = reuse
        self._belonging = Belonging()
        self._pool = ConnectionPool(self._belonging)
        self._given = transport

    async def send(self, request: httpx.Request | Outgoing) -> Answer:
        """Send the request and return the service's answer, with any status. After the status has arrived, a broken body
        does not raise.

        Raises one of `NEVER_SENT` if nothing was sent. After any other exception the request may have been sent;
        `httpx.ReadTimeout` is raised after the timeout, and `ForeignAnswer` for an answer that may belong to another request.
        """
        if self._given is not None:
            return await self._send_over(self._given, request)
        if _is_test_double_active():
            async with httpx.AsyncHTTPTransport(verify=self._tls) as double:
                return await self._send_over(double, request)
        if isinstance(request, httpx.Request):
            request = await Outgoing.of(request)
        content = request.written(*self._connector.named(request.target))
        origin = request.target.origin
        deadline = asyncio.get_running_loop().time() + self._seconds
        answer = AnswerReader(self._max_answer_bytes, has_body=request.method not in WITHOUT_ANSWERED_BODY)
        connection = self._reused(origin, content) or await self._open(origin, deadline)
        doubt: str | None = None
        try:
            await connection.ask(content, answer, deadline)
        except TimeoutError:
            if answer.status is None:
                raise httpx.ReadTimeout("no answer in time") from None
        finally:
            doubt = self._doubt(connection, answer, request)
            if doubt is None and self._reuse and connection.can_be_used_again(answer) and not request.is_last:
                self._pool.keep(connection, origin)
            else:
                connection.abort()
        if doubt is not None:
            raise ForeignAnswer(doubt)
        if answer.status is None:
            raise httpx.RemoteProtocolError("the connection ended without an answer")
        is_first = not connection.is_reused
        return Answer(
            answer.status, AnswerHeaders(answer.headers), bytes(answer.body), whole=answer.whole, is_first=is_first
        )

    async def aclose(self) -> None:
        """Close the connections. You may use the transport again afterwards."""
        await self._pool.aclose()

    def _reused(self, origin: Origin, content: bytes) -> Connection | None:
        return self._pool.take(origin) if len(content) <= MAX_REUSED_BYTES else None

    def _doubt(self, connection: Connection, answer: AnswerReader, request: Outgoing) -> str | None:
        """Why the answer may belong to another request. A close that the request asked for is no sign of that."""
        origin = request.target.origin
        if answer.status is None:
            return None
        is_first = not connection.is_reused
        doubt = doubt_of_key(answer.status, answer.headers, request.echo, is_first=is_first)
        if is_first:
            self._belonging.note_first(origin, answer)
        elif doubt is None and not request.is_last:
            doubt = self._belonging.doubt(origin, answer, is_followed=connection.has_spoken())
        if doubt is not None:
            self._belonging.distrust(origin, connection.loop.time())
        return doubt

    async def _open(self, origin: Origin, deadline: float) -> Connection:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._connector.open(origin)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(Cause.TIMED_OUT) from error

    async def _send_over(self, transport: httpx.AsyncBaseTransport, outgoing: httpx.Request | Outgoing) -> Answer:
        """Send over a transport of httpx, with the same deadline and the same limit for the answer's size."""
        request = outgoing if isinstance(outgoing, httpx.Request) else outgoing.for_httpx()
        request.headers["Accept-Encoding"] = "identity"  # a compressed answer can be a bomb
        request.extensions["timeout"] = self._timeouts
        response: httpx.Response | None = None
        body = bytearray()
        whole = False
        sending = _is_sending.set(True)
        try:
            async with asyncio.timeout(self._seconds):
                response = await transport.handle_async_request(request)
                whole = await self._read(response, body)
        except TimeoutError:
            if response is None:
                raise httpx.ReadTimeout("no answer in time", request=request) from None
        finally:
            _is_sending.reset(sending)
        headers = AnswerHeaders(dict(response.headers))
        echo = None if isinstance(outgoing, httpx.Request) else outgoing.echo
        if doubt := doubt_of_key(response.status_code, headers, echo, is_first=True):
            raise ForeignAnswer(doubt)
        return Answer(response.status_code, headers, bytes(body[: self._max_answer_bytes]), whole=whole)

    async def _read(self, response: httpx.Response, body: bytearray) -> bool:
        try:
            async for chunk in cast(
                AsyncIterable[bytes], response.stream
            ):  # the bytes as they were sent: `aiter_bytes` would decompress them
                body += chunk
                if len(body) > self._max_answer_bytes:
                    return False
        except Exception:  # the status is known, so an error in the body does not matter
            return False
        finally:
            with suppress(Exception):
                await response.aclose()
        return True


_HTTPX_SENDS: Final = (httpx.AsyncHTTPTransport.handle_async_request, httpcore.AsyncConnectionPool.handle_async_request)
_TEST_DOUBLES: Final = ("respx", "pytest_httpx")


def _is_test_double_active() -> bool:
    """Whether respx or pytest-httpx replaces how httpx sends. Others wrap it in production, to trace it: that changes nothing."""
    now = (httpx.AsyncHTTPTransport.handle_async_request, httpcore.AsyncConnectionPool.handle_async_request)
    return now != _HTTPX_SENDS and any(each.__module__.partition(".")[0] in _TEST_DOUBLES for each in now)
