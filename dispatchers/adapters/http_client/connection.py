"""One HTTP/1.1 connection. It carries one request at a time, and is used again only if that is certainly harmless."""

import asyncio
import re
import select
import ssl
from typing import Final, cast

import httpx

from dispatchers.adapters.causes import Cause
from dispatchers.adapters.http_client.answer_reader import AnswerReader
from dispatchers.adapters.sockets import has_unreceived

CLOSED: Final = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)
READABLE: Final = CLOSED | select.POLLIN

CERTIFICATE_REFUSED: Final = re.compile(r"ALERT_(.*CERTIFICATE.*|UNKNOWN_CA|ACCESS_DENIED)")
"""Alerts about the client certificate. In TLS 1.3 they come after the client's handshake, so the request is written already, but
the server has not read it. Source: RFC 8446, 4.4.2.4 and 6.2."""


class Connection(asyncio.Protocol):
    """loop: the event loop of the connection, which no other loop may use. idle_since: by the loop's clock, between requests.

    is_reused: whether it carries, or has carried, a second request. Only then can an answer belong to another request.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.idle_since = 0.0
        self.is_reused = False
        self._transport: asyncio.Transport | None = None
        self._tcp: asyncio.Transport | None = None  # under TLS
        self._poll = select.poll()
        self._descriptor = -1
        self._is_encrypted = False
        self._has_received = False
        self._has_spoken = False
        self._awaits_first_bytes = False
        self._reader: AnswerReader | None = None
        self._answered: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    async def ask(self, request: bytes, reader: AnswerReader, deadline: float) -> None:
        """Send the request, and read until the answer has ended, or the connection broke after the answer's head.

        deadline: on the loop's clock.
        Raises: `httpx.RemoteProtocolError` or `httpx.ReadError` if there is no head of an answer; `TimeoutError` at the deadline.
        """
        if self._transport is None or self._reader is not None:
            raise RuntimeError("this connection is not open, or it is in use")
        self._reader = reader
        self._awaits_first_bytes = self.is_reused
        self._answered = self.loop.create_future()
        self._deadline = deadline
        if self._alarm is None or self._alarm.when() > deadline:
            self._set_alarm()
        try:
            self._transport.write(request)
            await self._answered
        finally:
            self._reader = self._answered = None
            self._awaits_first_bytes = False

    def can_be_used_again(self, reader: AnswerReader) -> bool:
        """Whether the connection may carry another request after the answer in `reader`."""
        transport = self._transport
        return (
            reader.reusable
            and transport is not None
            and not self._is_closing()
            and not transport.get_write_buffer_size()  # otherwise the answer came before the whole request was sent
        )

    def is_quiet(self) -> bool:
        """Whether it is open, and the server has neither closed it nor sent unexpected bytes.

        It reads the socket itself, because the event loop may not have reported that yet.
        """
        return not self._events() & READABLE

    def is_closed(self) -> bool:
        """Whether one side has closed it: a request would be lost. After the TLS handshake, a quiet server may send data."""
        return bool(self._events() & CLOSED)

    def has_spoken(self) -> bool:
        """Whether the server has sent bytes that no request asked for. Under TLS, unread bytes may announce a close."""
        events = self._events()
        return self._has_spoken or (not self._is_encrypted and bool(events & select.POLLIN) and not events & CLOSED)

    def _events(self) -> int:
        if self._is_closing():
            return select.POLLNVAL
        found = self._poll.poll(0)
        return found[0][1] if found else 0

    def _is_closing(self) -> bool:
        """Whether either is closing: TLS does not report at once that the connection below it is."""
        return self._transport is None or self._transport.is_closing() or self._tcp is None or self._tcp.is_closing()

    def abort(self) -> None:
        """Close it at once, even with a request in flight."""
        if self._transport is not None:
            self._transport.abort()

    async def encrypt(self, tls: ssl.SSLContext, host: str) -> None:
        """Begin TLS on this connection. host: the name that the certificate must have."""
        if self._transport is None:
            raise ConnectionResetError("the connection was closed before TLS")
        self._is_encrypted, self._has_received = True, False
        self._transport = await self.loop.start_tls(self._transport, self, tls, server_hostname=host)
        if self._transport is None:
            raise ConnectionResetError("the connection was closed during TLS")

    @property
    def protocol(self) -> str | None:
        """The application's protocol that the server chose in TLS; None if it chose none."""
        tls = self._transport and self._transport.get_extra_info("ssl_object")
        return tls.selected_alpn_protocol() if tls else None

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked: the transports of other event loops, such as uvloop, do not inherit from asyncio's.
        self._transport = self._tcp = cast(asyncio.Transport, transport)
        # The event loop closes this descriptor only while the transport is closing. Then it is not used any more.
        self._descriptor = transport.get_extra_info("socket").fileno()
        self._poll.register(self._descriptor, READABLE)

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        if self._reader is None:  # no request is open
            self._has_spoken = True
            self.abort()
        else:
            if self._awaits_first_bytes:
                self._awaits_first_bytes = False
                self._reader.came_early = self._transport is not None and has_unreceived(
                    self._transport, self._descriptor
                )
            self._take(self._reader, data)

    def eof_received(self) -> None:
        """Close the connection too, if the server closes its side."""
        if self._reader is not None:
            self._close(self._reader)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._tcp = None
        if self._alarm is not None:
            self._alarm.cancel()
        if self._reader is None:
            return
        if exc is None:
            self._close(self._reader)
        elif self._reader.status is None:
            self._fail(self._without_answer(exc))
        else:
            self._finish()

    def _without_answer(self, exc: Exception) -> httpx.NetworkError:
        reason = exc.reason or "" if isinstance(exc, ssl.SSLError) else ""
        if CERTIFICATE_REFUSED.search(reason) and not self._has_received:
            return httpx.ConnectError(Cause.CLIENT_CERTIFICATE)
        return httpx.ReadError("the connection broke off before an answer")

    def _close(self, reader: AnswerReader) -> None:
        """End the answer at a close. A body that only the close would end is not whole over TLS: the event loop does not report
        whether the server announced the close, so an attacker may have caused it. Source: RFC 9112, 9.8.
        """
        if self._is_encrypted and reader.status is not None:
            self._finish()
        else:
            self._take(reader, b"")

    def _take(self, reader: AnswerReader, data: bytes) -> None:
        try:
            reader.feed(data)
        except httpx.RemoteProtocolError as error:
            self._fail(error)
        else:
            if reader.ended:
                self._finish()

    def _set_alarm(self) -> None:
        """Set the timer. All requests of the connection share one: a timer for each would cost as much as writing the request."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self.loop.call_at(self._deadline, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self._reader is not None:
            if self.loop.time() < self._deadline:
                self._set_alarm()
            else:
                self._fail(TimeoutError())

    def _finish(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)
