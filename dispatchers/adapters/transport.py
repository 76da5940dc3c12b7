"""How an adapter's HTTP requests travel: one at a time over a connection of their own, in bounded time, to a bounded answer.

An adapter makes an `httpx.Request`, and gets an `Answer` or one of httpx's exceptions. What either means is the adapter's.
"""

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncIterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, cast

import httpx

from outbox.errors import ConfigurationError

ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
CONNECT_SECONDS_MAX: Final = 10.0  # whoever has not connected by then was not going to
KEEP_SECONDS: Final = 1.5
"""How long a connection waits for its next request: less than any server waits (gunicorn 2 s, Node.js and uvicorn 5 s, by
their documentation), because a request that crosses the server's close is in doubt."""

HEADER_VALUE: Final = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
"""What every server takes as a header's value. Source: RFC 9110, 5.5, without the obsolete bytes."""

NEVER_SENT: Final = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
)
"""Refused, unresolved, no TLS, no tunnel through the proxy, not in time: no byte of the request left."""

_is_sending: ContextVar[bool] = ContextVar("is_sending", default=False)


def _is_not_ours(record: logging.LogRecord) -> bool:
    """At DEBUG httpcore logs the headers of answers, which quote requests, and set cookies."""
    return not _is_sending.get()


for _name in ("connection", "http11", "http2", "proxy", "socks"):  # www.python-httpx.org/logging
    logging.getLogger(f"httpcore.{_name}").addFilter(_is_not_ours)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. body: as it was sent, never decompressed. whole: False if it broke off, or was too long or too slow."""

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    whole: bool = True


class Transport:
    """Carries requests over httpx: no retries, no redirects, no compression, no proxy of the environment.

    timeout: what one send may take in all; it is given up a little earlier, because whoever cancels it at that time knows
        less of it. Connecting and TLS get up to a third each, so that an unreachable service is known as such.
    answer_bytes_max: how much of a body is read.
    tls: whom to trust; left out, the authorities that httpx trusts.
    proxy: its URL. transport: carries everything instead of connections of its own, for tests; it is not closed.

    Each request in flight has a connection pool of its own, with one connection. One pool for all is searched from end to
    end at every request: with 100 in flight it made 240 to 290 sends a second, these 1,040.
    As many connections are opened as there are requests in flight.

    Raises `ConfigurationError` for settings with which nothing could be sent.
    """

    def __init__(
        self,
        *,
        timeout: timedelta,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
        tls: ssl.SSLContext | None = None,
        proxy: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
            raise ConfigurationError(f"timeout must be a positive timedelta, not {timeout!r}")
        if not isinstance(answer_bytes_max, int) or answer_bytes_max < 0:
            raise ConfigurationError(f"answer_bytes_max must be a number of bytes, 0 or more, not {answer_bytes_max!r}")
        if proxy is not None and (not re.match(r"https?://[^/]", proxy) or transport is not None):
            raise ConfigurationError(
                "proxy must be an http:// or https:// URL (it is not shown), and goes with no transport"
            )
        seconds = timeout.total_seconds()
        self._seconds = seconds - min(0.1, seconds / 20)
        self._timeouts = httpx.Timeout(seconds, connect=min(CONNECT_SECONDS_MAX, seconds / 3)).as_dict()
        self._answer_bytes_max = answer_bytes_max
        self._tls = tls or httpx.create_ssl_context(trust_env=False)
        self._proxy = proxy
        self._given = transport
        self._idle: list[httpx.AsyncBaseTransport] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    async def send(self, request: httpx.Request) -> Answer:
        """What the service answers, whatever its status. Once that is known, nothing that befalls the body raises.

        Raises: one of `NEVER_SENT` if nothing was sent; after any other exception it may have been. `httpx.ReadTimeout`
        when the time is up.
        """
        request.headers["Accept-Encoding"] = "identity"  # a compressed answer can be a bomb
        request.extensions["timeout"] = self._timeouts
        loop = asyncio.get_running_loop()
        connection = self._take(loop)
        response: httpx.Response | None = None
        body = bytearray()
        whole = False
        sending = _is_sending.set(True)
        try:
            async with asyncio.timeout(self._seconds):
                response = await connection.handle_async_request(request)
                whole = await self._read(response, body)
        except TimeoutError:
            if response is None:
                raise httpx.ReadTimeout("no answer in time", request=request) from None
        finally:
            await self._give_back(connection, loop)
            _is_sending.reset(sending)
        return Answer(response.status_code, response.headers, bytes(body[: self._answer_bytes_max]), whole)

    async def aclose(self) -> None:
        """Close the connections. It may be used again afterwards."""
        idle, self._idle = self._idle, []
        if self._loop is asyncio.get_running_loop():
            for connection in idle:
                await connection.aclose()

    async def _read(self, response: httpx.Response, body: bytearray) -> bool:
        """Read into `body`; whether that is all of it."""
        try:
            async for chunk in cast(
                AsyncIterable[bytes], response.stream
            ):  # as it was sent: `aiter_bytes` decompresses
                body += chunk
                if len(body) > self._answer_bytes_max:
                    return False
        except Exception:  # whatever breaks the body, the status counts
            return False
        finally:
            with suppress(Exception):
                await response.aclose()
        return True

    def _take(self, loop: asyncio.AbstractEventLoop) -> httpx.AsyncBaseTransport:
        if loop is not self._loop:
            # Connections die with the loop they were opened on, and `asyncio.run(run_once())` brings a new one.
            self._loop, self._idle = loop, []
        if self._given is not None:
            return self._given
        return self._idle.pop() if self._idle else self._open()

    async def _give_back(self, connection: httpx.AsyncBaseTransport, loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._loop or connection is self._given:
            return
        if _has_left_overs(connection):
            await connection.aclose()
        else:
            self._idle.append(connection)

    def _open(self) -> httpx.AsyncBaseTransport:
        limits = httpx.Limits(max_keepalive_connections=1, keepalive_expiry=KEEP_SECONDS)
        return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, retries=0, proxy=self._proxy, limits=limits)


def _has_left_overs(connection: httpx.AsyncBaseTransport) -> bool:
    """Whether more came than was asked for: httpcore would take it for the answer to the next request.

    There is no public way to ask; where this one is gone, no connection is used again, which a test notices.
    """
    try:
        pool = connection._pool  # type: ignore[attr-defined]
        return any(each._connection._h11_state.trailing_data[0] for each in pool.connections)
    except AttributeError:
        return True
