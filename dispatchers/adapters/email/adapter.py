"""E-mail over SMTP: each send is one message, whose Message-ID is derived from the entry's child key.

    Dispatcher(..., adapters={"email": SmtpAdapter(host="smtp.example.com", sender="Shop <shop@example.com>",
                                                   username="shop", password=os.environ["SMTP_PASSWORD"])})

    outbox.enqueue(session, "email.send", {"to": "ada@example.com", "subject": "Your invoice", "text": "..."}, ...)

`message` describes the payload's fields. Before the final dot of its text, a mail is certainly not sent; after it, only the
server's reply is proof. SMTP has no keys: a mail whose reply was lost is `uncertain`, unless `at_least_once` is set.
"""

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import aiosmtplib

from dispatchers.adapters.credentials import Credentials
from dispatchers.adapters.email.connection import Connection, Encryption, Server
from dispatchers.adapters.email.message import (
    HEADER_NAME,
    Address,
    Message,
    Unsendable,
    compose,
    is_own_header,
    parse_address,
)
from dispatchers.adapters.email.outcomes import Exchange, answered, is_in_step, outcome_of
from dispatchers.adapters.email.replies import OutOfStep
from dispatchers.adapters.trust import Tls, given_context, trusting
from dispatchers.delivery import Adapter, CannotTell, Deferred, Delivery, Outcome, Rejected, Unknown
from dispatchers.threads import Threads, as_async
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy, Window
from outbox.errors import ConfigurationError

PORTS: Final[dict[Encryption, int]] = {
    "starttls": 587,  # RFC 6409, 3.1
    "tls": 465,  # RFC 8314, 3.3
    "none": 25,  # RFC 5321, 4.5.4.2
}
NAME: Final = re.compile(r"[\w.:\[\]-]+", re.ASCII)
MAX_IDLE_SECONDS: Final = (
    60.0  # servers wait 5 minutes (RFC 5321, 4.5.3.2.7); firewalls between drop connections sooner
)
MAX_COMPOSED_BYTES: Final = 64 * 1024  # of a payload: such a mail takes about 15 ms
QUIT_SECONDS: Final = 2.0  # QUIT is only polite, so it gets little time


class SmtpAdapter(Adapter):
    """Sends mail through one server. If the server refuses some recipients, the others get the mail, and the result names the
    refused ones.

    host: name or address of the mail server.
    port: by default 587, 465 or 25, for `encryption` "starttls", "tls" or "none".
    encryption: there is no fallback: a server without STARTTLS, or with an invalid certificate, receives nothing.
    tls: as in `HttpAdapter`; by default the system's authorities.
    username, password: never shown, logged or stored. Without TLS they go only to this machine.
    sender: `Name <shop@example.com>`, for payloads without a `from`. The address in `from` also receives bounces.
    local_hostname: the name in EHLO; by default this machine's full name.
    key_header: the header for the child key; None for no header.
    window: how long the server remembers the keys of that header (Resend: key_header="Resend-Idempotency-Key",
        window=timedelta(hours=24)). Every attempt sends the same bytes: a payload without a `date` gets the time when it
        became due.
    timeout: how long one send may take. The adapter sends the final dot within the first half or not at all; the other half
        is for the reply. (RFC 5321, 4.5.3.2.6 would wait 10 minutes.) A server that scans mail may need more.
    max_connections: connections at a time. They are kept for the next mails.
    find: the status lookup: a function, async or sync, of the delivery and of the mail's Message-ID, such as an `ImapSearch`.
        SMTP itself has no command for it.

    If the server refuses a recipient temporarily, the whole mail is deferred. The headers of the trace are not sent: every
    attempt sends the same bytes, and the recipients would see them. An entry takes no options.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int | None = None,
        encryption: Encryption = "starttls",
        tls: Tls = None,
        username: str | None = None,
        password: str | None = None,
        sender: str | None = None,
        local_hostname: str | None = None,
        key_header: str | None = "Idempotency-Key",
        window: Window = None,
        at_least_once: bool = False,
        timeout: timedelta = timedelta(seconds=30),
        retry: RetryPolicy = DEFAULT_RETRY,
        max_connections: int = 10,
        find: Callable[[Delivery, str], Any] | None = None,
    ) -> None:
        _check_server(host, port, encryption, local_hostname, max_connections)
        _check_credentials(username, password, in_clear=encryption == "none" and not _is_loopback(host))
        _check_key_header(key_header, window)
        if find is not None and not callable(find):
            raise ConfigurationError(f"find={find!r} must be a function of the delivery and the Message-ID, or None")
        self.window = window
        self.timeout = timeout
        self.at_least_once = at_least_once
        self.retry = retry
        self.find = None if find is None else self._finding_by(find)
        self._sender = None if sender is None else _sender(sender)
        self._key_header = key_header
        self._server = Server(
            host=host,
            port=PORTS[encryption] if port is None else port,
            encryption=encryption,
            tls=given_context(tls) or trusting(),
            username=username,
            password=password,
            local_hostname=local_hostname,
        )
        self._connections = _Connections(self._server, max_connections)
        self._composer = Threads(1, "outbox-compose")  # one: many would keep the interpreter from the event loop
        self._credentials = Credentials([password or ""])
        if window is not None:  # the server with its keys, the header of the keys, and the values in the mail's bytes
            self.pinned = f"smtp {host}:{self._server.port} {key_header} from={sender}"

    def __repr__(self) -> str:
        return (
            f"SmtpAdapter(host={self._server.host!r}, port={self._server.port}, encryption={self._server.encryption!r})"
        )

    async def send(self, delivery: Delivery) -> Outcome:
        if delivery.options:
            return Rejected(f"unknown options {sorted(delivery.options)}: a mail takes none")
        try:
            async with asyncio.timeout_at(self._dot_latest(delivery.deadline)):
                message = await self._composed(delivery)
        except Unsendable as error:
            return Rejected(str(error))
        except TimeoutError:
            return Deferred("the mail was not made in time, as other large mails were made first; nothing was sent")
        return self._credentials.removed_from(await self._hand_in(message, delivery.deadline))

    async def aclose(self) -> None:
        """Close the connections. You may use the adapter again afterwards."""
        self._composer.close()
        await self._connections.close()

    def _finding_by(self, find: Callable[[Delivery, str], Any]) -> Callable[[Delivery], Awaitable[Any]]:
        ask = as_async(find, "outbox-find")

        async def found(delivery: Delivery) -> Any:
            try:
                message_id = (await self._composed(delivery)).id
            except Unsendable as error:
                return CannotTell(str(error))
            return await ask(delivery, message_id)

        return found

    async def _composed(self, delivery: Delivery) -> Message:
        """The mail; large ones are made on a thread, one at a time: they would keep the event loop from everything else."""
        if len(delivery.payload_json) <= MAX_COMPOSED_BYTES:
            return self._compose(delivery)
        message: Message = await asyncio.wrap_future(self._composer.submit(self._compose, delivery))
        return message

    def _compose(self, delivery: Delivery) -> Message:
        return compose(
            delivery.payload,
            sender=self._sender,
            key=delivery.key,
            key_header=self._key_header,
            date=delivery.due_at,
        )

    async def _hand_in(self, message: Message, deadline: float) -> Outcome:
        """One mail transaction on a connection. The connection is closed unless both sides agree on its state."""
        dot_latest, reply_latest = self._dot_latest(deadline), deadline - self.timeout.total_seconds() / 20
        exchange = Exchange()
        connection = None
        in_step = False
        try:
            async with asyncio.timeout_at(dot_latest):
                connection = await self._connections.take(exchange)
                await connection.offer(message, exchange)
            async with asyncio.timeout_at(reply_latest):
                reply = await connection.end(exchange, dot_latest)
            outcome = answered(reply, exchange, message.id)
            in_step = not isinstance(outcome, Unknown)
            return outcome
        except Exception as error:
            in_step = is_in_step(error)
            return outcome_of(error, exchange)
        finally:
            if connection is not None:
                self._connections.give_back(connection, in_step=in_step)

    def _dot_latest(self, deadline: float) -> float:
        """When the final dot may be sent at the latest, on the event loop's clock."""
        return deadline - self.timeout.total_seconds() / 2


class _Connections:
    """The connections to one server. At most `most` are in use at the same time; idle ones are kept for the next mails."""

    def __init__(self, server: Server, most: int) -> None:
        self._server = server
        self._most = most
        self._idle: list[Connection] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free = asyncio.Semaphore(most)

    async def take(self, exchange: Exchange) -> Connection:
        """A connection on which the server has just answered. Raises what the client raises."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # Connections end with their event loop, and `asyncio.run(run_once())` creates a new one.
            self._loop, self._idle, self._free = loop, [], asyncio.Semaphore(self._most)
        exchange.phase = "waiting for a connection"
        await self._free.acquire()
        try:
            return await self._reused(exchange) or await Connection.open(self._server, exchange)
        except BaseException:
            self._free.release()
            raise

    def give_back(self, connection: Connection, *, in_step: bool) -> None:
        self._free.release()
        if in_step and connection.is_open:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        if self._loop is asyncio.get_running_loop():
            await asyncio.gather(*map(_take_leave, idle))

    async def _reused(self, exchange: Exchange) -> Connection | None:
        """The connection used last, if it still works: the server may have closed it."""
        if not self._idle:
            return None
        exchange.phase = "RSET"
        connection = self._idle.pop()
        works = False
        try:
            if asyncio.get_running_loop().time() - connection.idle_since < MAX_IDLE_SECONDS:
                await connection.reset()
                works = True
        except (aiosmtplib.SMTPException, OSError, OutOfStep):
            pass
        finally:
            if not works:
                connection.abort()
        return connection if works else None


async def _take_leave(connection: Connection) -> None:
    try:
        with suppress(aiosmtplib.SMTPException, OSError):
            async with asyncio.timeout(QUIT_SECONDS):
                await connection.quit()
    finally:
        connection.abort()


# --- checks at the start


def _check_server(
    host: object, port: object, encryption: object, local_hostname: object, max_connections: object
) -> None:
    if not isinstance(host, str) or not NAME.fullmatch(host):
        raise ConfigurationError(f"host={host!r} must be the mail server's name or address")
    if port is not None and (not isinstance(port, int) or not 0 < port < 65536):
        raise ConfigurationError(f"port={port!r} must be a number from 1 to 65535")
    if encryption not in PORTS:
        raise ConfigurationError(f"encryption={encryption!r} must be one of {', '.join(map(repr, PORTS))}")
    if local_hostname is not None and (not isinstance(local_hostname, str) or not NAME.fullmatch(local_hostname)):
        raise ConfigurationError(f"local_hostname={local_hostname!r} must be this machine's name, or [its address]")
    if not isinstance(max_connections, int) or max_connections < 1:
        raise ConfigurationError(f"max_connections={max_connections!r} must be an int of at least 1")


def _check_credentials(username: object, password: object, *, in_clear: bool) -> None:
    given = [value for value in (username, password) if value is not None]
    if len(given) == 1 or not all(isinstance(value, str) and value for value in given):
        raise ConfigurationError("username and password must both be text, or both be left out (they are not shown)")
    if given and in_clear:
        raise ConfigurationError(
            "encryption='none' would show the password to the network: use encryption='starttls' or 'tls'"
        )


def _check_key_header(key_header: str | None, window: Window) -> None:
    if key_header is None:
        if window is not None:
            raise ConfigurationError(
                f"window={window!r} needs a key_header: without one no server can remember the key"
            )
    elif not HEADER_NAME.fullmatch(key_header) or is_own_header(key_header):
        raise ConfigurationError(
            f"key_header={key_header!r} is not a valid header name, or the adapter writes this header itself"
        )


def _sender(given: object) -> Address:
    try:
        return parse_address("sender", given)
    except Unsendable as error:
        raise ConfigurationError(f"{error} (it was {given!r})") from error


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
