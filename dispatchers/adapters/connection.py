"""One HTTP/1.1 connection: it carries one request at a time, and is used again only where that is surely harmless."""

import asyncio
import select
import ssl
from typing import Final

import httpx

from dispatchers.adapters.answer_reader import AnswerReader

READABLE: Final = select.POLLIN | select.POLLHUP | select.POLLERR | select.POLLNVAL


class Connection(asyncio.Protocol):
    """loop: the one it was opened on; it is used on no other. idle_since: on that loop's clock, while nothing is asked."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._is_encrypted = False
        self._reader: AnswerReader | None = None
        self._answered: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    async def ask(self, request: bytes, reader: AnswerReader, deadline: float) -> None:
        """Send the request, and read until the answer has ended, or broken off after its head.

        deadline: on the loop's clock.
        Raises: `httpx.RemoteProtocolError` or `httpx.ReadError` without the head of an answer; `TimeoutError` in any case.
        """
        if self._transport is None or self._reader is not None:
            raise RuntimeError("this connection is not open, or it is in use")
        self._reader = reader
        self._answered = self.loop.create_future()
        self._deadline = deadline
        if self._alarm is None or self._alarm.when() > deadline:
            self._set_alarm()
        try:
            self._transport.write(request)
            await self._answered
        finally:
            self._reader = self._answered = None

    def can_be_used_again(self, reader: AnswerReader) -> bool:
        """Whether the answer that `reader` read leaves it fit for another request."""
        transport = self._transport
        return (
            reader.reusable
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()  # the answer came before the request was taken
        )

    def is_quiet(self) -> bool:
        """Whether it is open, and the server has neither closed it nor said anything that no one asked for.

        The event loop may not have come to report it yet, so the socket itself is asked.
        """
        if self._transport is None or self._transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), READABLE)
        return not poll.poll(0)

    def abort(self) -> None:
        """Close it at once, whatever is in flight."""
        if self._transport is not None:
            self._transport.abort()

    async def encrypt(self, tls: ssl.SSLContext, host: str) -> None:
        """Have TLS over what carries it now. host: whose certificate is wanted."""
        if self._transport is None:
            raise ConnectionResetError("the connection was closed before TLS")
        self._is_encrypted = True
        self._transport = await self.loop.start_tls(self._transport, self, tls, server_hostname=host)
        if self._transport is None:
            raise ConnectionResetError("the connection was closed during TLS")

    # --- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._reader is None:  # no one asked
            self.abort()
        else:
            self._take(self._reader, data)

    def eof_received(self) -> None:
        """The server has said its last word: what is closed for it is closed for us."""
        if self._reader is not None:
            self._close(self._reader)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._alarm is not None:
            self._alarm.cancel()
        if self._reader is None:
            return
        if exc is None:
            self._close(self._reader)
        elif self._reader.status is None:
            self._fail(httpx.ReadError("the connection broke off before an answer"))
        else:
            self._finish()

    def _close(self, reader: AnswerReader) -> None:
        """Over TLS a close may be an attacker's, since the event loop does not report whether the server announced it: a body
        that only it would end is not whole. Source: RFC 9112, 9.8.
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
        """One timer for all requests of the connection: one for each would cost as much as to write it."""
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
