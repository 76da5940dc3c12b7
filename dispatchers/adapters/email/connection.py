"""One connection to a mail server. The client speaks SMTP; only how a message ends is ours.

The client writes message and final dot at once, so that an interrupted sender could not know whether it was sent. Here
the dot is written by itself, when everything before it has left.
"""

import asyncio
import ssl
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import aiosmtplib

from dispatchers.adapters.email.message import Message
from dispatchers.adapters.email.outcomes import Exchange, is_permanent

Tls: TypeAlias = Literal["starttls", "tls", "none"]
START_INPUT = 354  # RFC 5321, 4.2.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where mail is handed in, and as whom."""

    host: str
    port: int
    tls: Tls
    context: ssl.SSLContext = field(repr=False)
    username: str | None = field(repr=False)
    password: str | None = field(repr=False)
    local_hostname: str | None


class _Client(aiosmtplib.SMTP):
    # Without CRAM-MD5: it saves nothing under TLS, and where MD5 is barred (FIPS) trying it fails all of them.
    AUTH_METHODS = ("plain", "login")


class Connection:
    """Open, encrypted and logged in as `server` says. After `close` or an error, make another."""

    def __init__(self, client: aiosmtplib.SMTP) -> None:
        transport, protocol = client.transport, client.protocol
        if not isinstance(transport, asyncio.WriteTransport) or protocol is None:
            raise aiosmtplib.SMTPServerDisconnected("Connection lost")
        # So that `drain` waits until all has left. Not 0: asyncio's TLS transport then pauses permanently.
        transport.set_write_buffer_limits(high=1)
        self.idle_since = 0.0
        self._client = client
        self._transport = transport
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._writer = asyncio.StreamWriter(transport, protocol, None, self._loop)

    @classmethod
    async def open(cls, server: Server, exchange: Exchange) -> "Connection":
        # No timeouts of the client's own: they are per reply, and there is one for all.
        client = _Client(
            hostname=server.host,
            port=server.port,
            local_hostname=server.local_hostname,
            use_tls=server.tls == "tls",
            start_tls=False,
            tls_context=server.context,
            timeout=None,
        )
        try:
            exchange.phase = "connect"
            await client.connect()
            exchange.phase = "EHLO"
            await client.ehlo()
            if server.tls == "starttls":
                exchange.phase = "STARTTLS"
                await client.starttls()
                exchange.phase = "EHLO"
                await client.ehlo()
            if server.username is not None and server.password is not None:
                exchange.phase = "AUTH"
                await client.login(server.username, server.password)
            return cls(client)
        except BaseException:
            _abort(client.transport)
            raise

    @property
    def is_open(self) -> bool:
        return self._client.is_connected

    async def reset(self) -> None:
        """Have the server forget what came before. Raises what the client raises if it is gone."""
        await self._client.rset()

    async def offer(self, message: Message, exchange: Exchange) -> None:
        """Everything but the final dot. Raises what the client raises, for a refusal too; nothing was sent then."""
        exchange.phase, exchange.recipients = "MAIL", len(message.recipients)
        encoding = "utf-8" if message.international else "ascii"
        await self._client.mail(message.sender, options=self._mail_options(message), encoding=encoding)
        exchange.phase = "RCPT"
        for recipient in message.recipients:
            try:
                await self._client.rcpt(recipient, encoding=encoding)
            except aiosmtplib.SMTPRecipientRefused as refusal:
                if not is_permanent(refusal.code):
                    raise  # without this recipient no one gets it now; the retry reaches all
                exchange.refused.append(refusal)
        if len(exchange.refused) == len(message.recipients):
            raise aiosmtplib.SMTPRecipientsRefused(exchange.refused)
        exchange.phase = "DATA"
        reply = await self._client.execute_command(b"DATA")
        if reply.code != START_INPUT:
            raise aiosmtplib.SMTPDataError(reply.code, reply.message)
        exchange.phase = "message"
        self._writer.write(message.stuffed)
        await self._writer.drain()
        for _ in range(
            2
        ):  # one iteration of the loop to poll the socket, and one to act: a closed connection gets no dot
            await asyncio.sleep(0)

    async def end(self, exchange: Exchange, latest: float) -> aiosmtplib.SMTPResponse:
        """Write the final dot, unless it is `latest` already on the loop's clock, and return the server's reply."""
        if self._loop.time() >= latest:
            raise TimeoutError
        if not self.is_open:
            raise aiosmtplib.SMTPServerDisconnected("Connection lost")
        exchange.dot_left = True
        self._writer.write(b".\r\n")
        exchange.phase = "end of message"
        return await self._protocol.read_response()

    async def quit(self) -> None:
        """Take leave. Raises what the client raises if the server is gone; `abort` is due in any case."""
        await self._client.quit()

    def abort(self) -> None:
        """Close at once: what is not with the network yet never leaves."""
        _abort(self._transport)

    def _mail_options(self, message: Message) -> list[str]:
        options = []
        if self._client.supports_extension("size"):
            options.append(f"SIZE={len(message.content)}")  # RFC 1870: too large is known before it is sent
        if message.international:
            if not self._client.supports_extension("smtputf8"):
                raise aiosmtplib.SMTPNotSupported("SMTPUTF8")
            options += ["SMTPUTF8", "BODY=8BITMIME"]
        return options


def _abort(transport: asyncio.BaseTransport | None) -> None:
    if isinstance(transport, asyncio.WriteTransport):
        transport.abort()
