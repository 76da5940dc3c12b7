"""Mail servers over loopback, in the test's own event loop or on a thread: a real one (aiosmtpd), and a faulty one."""

import asyncio
import json
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import UUID

from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword

from dispatchers.adapters import SmtpAdapter
from dispatchers.delivery import Delivery, Outcome

KEY = "ck1_AAECAwQFBgcICQoLDA0ODxAREhMUFRYX"
ENTRY = UUID("00000000-0000-8000-8000-000000000001")
DUE_AT = datetime(2026, 11, 21, 9, 30, tzinfo=UTC)
MAIL = {"to": "ada@example.com", "subject": "Your invoice", "text": "Dear Ada\n"}


def delivery(payload: Any = MAIL, *, seconds: float = 30, **fields: Any) -> Delivery:
    """A send that the dispatcher would cancel in `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    given = {"operation": "email.send", "key": KEY, "attempt": 1, "options": {}, "headers": {}, "deadline": deadline}
    given |= {"due_at": DUE_AT}
    return Delivery(id=ENTRY, payload_json=json.dumps(payload).encode(), **{**given, **fields})


def adapter_for(port: int, **settings: Any) -> SmtpAdapter:
    given = {"host": "127.0.0.1", "encryption": "none", "sender": "Shop <shop@example.com>", "local_hostname": "test"}
    return SmtpAdapter(port=port, **{**given, **settings})


async def send(adapter: SmtpAdapter, payload: Any = MAIL, **fields: Any) -> Outcome:
    """One send with the deadline that the dispatcher sets. The adapter must end it; a cancellation at the deadline, as the
    dispatcher makes it, would on a slow machine come together with the adapter's own.
    """
    given = delivery(payload, seconds=adapter.timeout.total_seconds(), **fields)
    async with asyncio.timeout(50):
        return await adapter.send(given)


# --- a real server


class Mailbox:
    """What a real server was handed in. refuse: replies to RCPT by address."""

    def __init__(self, refuse: Mapping[str, str] | None = None) -> None:
        self.refuse = refuse or {}
        self.envelopes: list[Envelope] = []
        self.logins: list[tuple[bytes, bytes]] = []
        self.encrypted: list[bool] = []
        self.connections = 0

    @property
    def contents(self) -> list[bytes]:
        return [bytes(envelope.original_content or b"") for envelope in self.envelopes]

    async def handle_RCPT(  # noqa: N802
        self, server: SMTP, session: Any, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address in self.refuse:
            return self.refuse[address]
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Any, envelope: Envelope) -> str:  # noqa: N802
        self.envelopes.append(envelope)
        self.encrypted.append(session.ssl is not None)
        return "250 2.0.0 Ok: queued as 4F1C"

    def authenticate(self, server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        assert isinstance(data, LoginPassword)
        self.logins.append((data.login, data.password))
        return AuthResult(success=data.password == b"right", handled=False)


@asynccontextmanager
async def mail_server(
    mailbox: Mailbox, *, implicit_tls: ssl.SSLContext | None = None, **settings: Any
) -> AsyncIterator[int]:
    """A real server's port."""

    def connected() -> SMTP:
        mailbox.connections += 1
        given = {"hostname": "mail.test", "authenticator": mailbox.authenticate, "auth_require_tls": False}
        return SMTP(mailbox, **{**given, **settings})

    server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0, ssl=implicit_tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@contextmanager
def running_mailbox() -> Iterator[tuple[Mailbox, int]]:
    """A real mail server on a thread, with its port."""
    mails, loop, stopped = Mailbox(), asyncio.new_event_loop(), asyncio.Event()
    listening: Future[int] = Future()

    async def serve() -> None:
        async with mail_server(mails) as port:
            listening.set_result(port)
            await stopped.wait()

    thread = Thread(target=lambda: loop.run_until_complete(serve()), name="mailbox", daemon=True)
    thread.start()
    try:
        yield mails, listening.result(60)
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()


def handed_in(mailbox: Mailbox, *payloads: Any, server: Any = None, **settings: Any) -> Outcome:
    """The outcome of the last of the mails sent to a real server."""

    async def main() -> Outcome:
        async with mail_server(mailbox, **(server or {})) as port:
            adapter = adapter_for(port, **settings)
            outcomes = [await send(adapter, payload) for payload in payloads or (MAIL,)]
            await adapter.aclose()
            return outcomes[-1]

    return asyncio.run(main())


# --- a server that breaks


CLOSE, RESET, HANG, DRIP, STALL = "close", "reset", "hang", "drip", "stall"
THEN_CLOSE = ", and closes"


@dataclass
class Faulty:
    """A good mail server but for what it does `at` a point of the dialogue: a reply of its own (one that
    ends with THEN_CLOSE is its last), or one of the five above.

    HANG continues to read and answers nothing. STALL does not read on before the event "resume".

    Points: greeting, EHLO, MAIL, RCPT, DATA, message (its first line has come), dot, RSET, QUIT. messages: those whose
    final dot came. turns: at which connection, from 1, it misbehaves; left out, at all.
    """

    at: dict[str, str] = field(default_factory=dict)
    turns: set[int] = field(default_factory=set)
    extensions: tuple[str, ...] = ("SIZE 1000000",)
    commands: list[str] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)
    received: bytearray = field(default_factory=bytearray)
    connections: int = 0
    reached: dict[str, asyncio.Event] = field(default_factory=dict)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        turn = self.connections
        try:
            await self._talk(
                reader, writer, lambda point: self.at.get(point) if turn in (self.turns or {turn}) else None
            )
        except (ConnectionError, _Over):
            pass
        finally:
            self.gone.set()
            writer.close()

    async def _talk(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault_at: Callable[[str], str | None]
    ) -> None:
        async def reply(point: str, usual: str) -> None:
            self.event(point).set()
            match fault_at(point) or usual:
                case "close":
                    raise _Over
                case "reset":
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    writer.transport.abort()
                    raise _Over
                case "hang":
                    while data := await reader.read(65536):
                        self.received += data
                    raise _Over
                case "stall":
                    await self.event("resume").wait()
                case "drip":
                    while not writer.transport.is_closing():
                        writer.write(b"250-more\r\n")
                        await asyncio.sleep(0.01)
                    raise _Over
                case text:
                    writer.write(f"{text}\r\n".encode())
                    await writer.drain()
                    if text.endswith(THEN_CLOSE):
                        raise _Over

        await reply("greeting", "220 faulty")
        while line := await reader.readline():
            command = line.decode().strip()
            self.commands.append(command)
            verb = command.split()[0].upper()
            if verb == "EHLO":
                await reply(
                    "EHLO", "\r\n".join([f"250-{each}" for each in ("faulty", *self.extensions)] + ["250 HELP"])
                )
            elif verb == "DATA":
                await reply("DATA", "354 continue")
                if (fault_at("DATA") or "354").startswith("354"):
                    await self._message(reader, reply, fault_at)
                    await reply("dot", "250 2.0.0 Ok: queued as 77")
            elif verb == "QUIT":
                await reply("QUIT", "221 bye")
                return
            else:
                await reply(verb, "250 ok")

    async def _message(self, reader: asyncio.StreamReader, reply: Any, fault_at: Callable[[str], str | None]) -> None:
        lines: list[bytes] = []
        while (line := await reader.readline()) != b".\r\n":
            if not line:
                raise _Over
            lines.append(line)
            self.received += line
            if len(lines) == 1 and fault_at("message"):
                await reply("message", "")
        self.messages.append(b"".join(lines))

    def event(self, point: str) -> asyncio.Event:
        """Set once `point` was reached."""
        return self.reached.setdefault(point, asyncio.Event())


class _Over(Exception):
    pass


@asynccontextmanager
async def faulty_server(faulty: Faulty) -> AsyncIterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that little is on its way unread
    server = await asyncio.start_server(faulty.serve, sock=listening)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def against(faulty: Faulty, work: Callable[[SmtpAdapter], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    """What `work` returns with an adapter for this server."""

    async def main() -> Any:
        async with asyncio.timeout(60), faulty_server(faulty) as port:
            adapter = adapter_for(port, **settings)
            try:
                return await work(adapter)
            finally:
                await adapter.aclose()

    return asyncio.run(main())


def tls_contexts(directory: Path, *names: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a certificate of these names made for the occasion, and a client's that trusts only it."""
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    names_of = f"subjectAltName={','.join(names)}"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, "-addext", names_of, *files], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=str(certificate))
