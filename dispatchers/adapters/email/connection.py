"""One connection to a mail server. The client library speaks SMTP, except for the end of a message.

The client library writes the message and its final dot together, so an interrupted sender could not know whether the mail was
sent. This module writes the dot separately, after everything before it was sent.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias, cast

import aiosmtplib
from aiosmtplib.protocol import SMTPProtocol

from dispatchers.adapters.email.message import Message
from dispatchers.adapters.email.outcomes import Exchange, is_permanent
from dispatchers.adapters.email.replies import Replies

Encryption: TypeAlias = Literal["starttls", "tls", "none"]
START_INPUT = 354  # RFC 5321, 4.2.3
MAX_WRITTEN_BYTES = 256 * 1024  # at a time: to encrypt more would keep the event loop from everything else


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The address of the mail server, and the login."""

    host: str
    port: int
    encryption: Encryption
    tls: ssl.SSLContext = field(repr=False)
    username: str | None = field(repr=False)
    password: str | None = field(repr=False)
    local_hostname: str | None


class _Client(aiosmtplib.SMTP):
    # Without CRAM-MD5: with TLS it has no advantage, and where MD5 is forbidden (FIPS) the whole login would fail.
    AUTH_METHODS = ("plain", "login")


class Connection:
    """An open connection, encrypted and logged in according to `server`. After a close or an error, create another one."""

    def __init__(self, client: aiosmtplib.SMTP, replies: Replies) -> None:
        transport, protocol = _opened(client)
        # With this limit, `drain` waits until all bytes are sent. With 0, asyncio's TLS transport would pause permanently.
        transport.set_write_buffer_limits(high=1)
        self.idle_since = 0.0
        self._client = client
        self._transport = transport
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._replies = replies
        self._writer = asyncio.StreamWriter(transport, protocol, None, self._loop)

    @classmethod
    async def open(cls, server: Server, exchange: Exchange) -> "Connection":
        # No timeouts of the client library: they apply to single replies, but there is one deadline for the whole send.
        client = _Client(
            hostname=server.host,
            port=server.port,
            local_hostname=server.local_hostname,
            use_tls=server.encryption == "tls",
            start_tls=False,
            tls_context=server.tls,
            timeout=None,
        )
        try:
            exchange.phase = "connect"
            await client.connect()
            replies = Replies(*_opened(client))
            exchange.phase = "EHLO"
            await _asked(replies, client.ehlo)
            if server.encryption == "starttls":
                exchange.phase = "STARTTLS"
                replies.will_ask()
                await client.starttls()  # it drops what came before the encryption
                replies = Replies(*_opened(client))
                exchange.phase = "EHLO"
                await _asked(replies, client.ehlo)
            if server.username is not None and server.password is not None:
                exchange.phase = "AUTH"
                replies.will_ask()
                replies.has_answered(await client.login(server.username, server.password), is_login=True)
            return cls(client, replies)
        except BaseException:
            _abort(client.transport)
            raise

    @property
    def is_open(self) -> bool:
        return self._client.is_connected

    async def reset(self) -> None:
        """Let the server discard the last transaction. Raises what the client raises if the connection is closed."""
        await _polled()
        await _asked(self._replies, self._client.rset)

    async def offer(self, message: Message, exchange: Exchange) -> None:
        """Write the message without the final dot. Raises what the client raises, also for a refusal; then no mail was sent."""
        exchange.phase, exchange.recipients = "MAIL", len(message.recipients)
        encoding = "utf-8" if message.international else "ascii"
        options = self._mail_options(message)
        await _asked(self._replies, partial(self._client.mail, message.sender, options=options, encoding=encoding))
        exchange.phase = "RCPT"
        for recipient in message.recipients:
            try:
                await _asked(self._replies, partial(self._client.rcpt, recipient, encoding=encoding))
            except aiosmtplib.SMTPRecipientRefused as refusal:
                if not is_permanent(refusal.code):
                    raise  # no recipient gets the mail now; the retry reaches all of them
                exchange.refused.append(refusal)
        if len(exchange.refused) == len(message.recipients):
            raise aiosmtplib.SMTPRecipientsRefused(exchange.refused)
        exchange.phase = "DATA"
        reply = await _asked(self._replies, partial(self._client.execute_command, b"DATA"))
        if reply.code != START_INPUT:
            raise aiosmtplib.SMTPDataError(reply.code, reply.message)
        exchange.phase = "message"
        text = memoryview(message.stuffed)
        for begin in range(0, len(text), MAX_WRITTEN_BYTES):
            self._writer.write(text[begin : begin + MAX_WRITTEN_BYTES])
            await self._writer.drain()
        await _polled()

    async def end(self, exchange: Exchange, latest: float) -> aiosmtplib.SMTPResponse:
        """Write the final dot, unless the loop's clock has reached `latest`, and return the server's reply."""
        if self._loop.time() >= latest:
            raise TimeoutError
        if not self.is_open:
            raise aiosmtplib.SMTPServerDisconnected("Connection lost")
        self._replies.will_ask()
        exchange.dot_left = True
        self._writer.write(b".\r\n")
        exchange.phase = "end of message"
        reply = await self._protocol.read_response()
        self._replies.has_answered(reply)
        return reply

    async def quit(self) -> None:
        """Send QUIT. Raises what the client raises if the connection is closed. Call `abort` in each case."""
        await self._client.quit()

    def abort(self) -> None:
        """Close at once: bytes that are still in the buffer are never sent."""
        _abort(self._transport)

    def _mail_options(self, message: Message) -> list[str]:
        options = []
        if self._client.supports_extension("size"):
            options.append(
                f"SIZE={len(message.content)}"
            )  # RFC 1870: the server refuses a mail that is too large before it is sent
        if message.international:
            if not self._client.supports_extension("smtputf8"):
                raise aiosmtplib.SMTPNotSupported("SMTPUTF8")
            options += ["SMTPUTF8", "BODY=8BITMIME"]
        return options


async def _polled() -> None:
    """Let the event loop report a close of the connection, or a reply that no command asked for."""
    for _ in range(2):  # one iteration polls the socket, and one reacts
        await asyncio.sleep(0)


def _opened(client: aiosmtplib.SMTP) -> tuple[asyncio.WriteTransport, SMTPProtocol]:
    if client.transport is None or client.protocol is None:
        raise aiosmtplib.SMTPServerDisconnected("Connection lost")
    # Not checked: the transports of other event loops, such as uvloop, do not inherit from asyncio's.
    return cast(asyncio.WriteTransport, client.transport), client.protocol


async def _asked(
    replies: Replies, command: Callable[[], Awaitable[aiosmtplib.SMTPResponse]]
) -> aiosmtplib.SMTPResponse:
    """Send one command, and return its reply. Raises `OutOfStep` in place of a reply that may belong to another command."""
    replies.will_ask()
    try:
        reply = await command()
    except aiosmtplib.SMTPResponseException as refusal:
        replies.has_answered(aiosmtplib.SMTPResponse(refusal.code, refusal.message))
        raise
    replies.has_answered(reply)
    return reply


def _abort(transport: asyncio.BaseTransport | None) -> None:
    if transport is not None:
        cast(asyncio.WriteTransport, transport).abort()
