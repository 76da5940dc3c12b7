"""Counts a mail server's replies. SMTP binds a reply to its command by nothing but their order on the connection.

So a reply that no command asked for would be the reply to the next command: a 250 that was sent early would be taken for the
reply to the final dot. The client library drops such bytes in some cases only.
"""

import asyncio

import aiosmtplib

from dispatchers.adapters.sockets import has_unreceived


class OutOfStep(Exception):
    """Not exactly one reply came to the last command, or it came before the command had arrived."""

    def __init__(self) -> None:
        super().__init__("the server sent a reply that no command asked for")


class Replies(asyncio.Protocol):
    """Takes the place of the client library's protocol on an open connection, and passes everything on to it."""

    def __init__(self, transport: asyncio.WriteTransport, protocol: asyncio.Protocol) -> None:
        self._transport = transport
        self._protocol = protocol
        self._descriptor = transport.get_extra_info("socket").fileno()
        self._part = b""
        self._is_within = False
        self._last_lines: list[bytes] = []
        self._awaits_first_bytes = False
        self._came_early = False
        transport.set_protocol(self)

    def will_ask(self) -> None:
        """Call it before each command. Raises `OutOfStep` if bytes of the server are unread: then do not send the command."""
        if self._last_lines or self._is_incomplete:
            raise OutOfStep
        self._awaits_first_bytes = True

    def has_answered(self, reply: aiosmtplib.SMTPResponse, *, is_login: bool = False) -> None:
        """Call it with the reply to the command. Raises `OutOfStep` if that may be the reply to another one.

        is_login: the client has sent several commands, and the last reply, and only it, is positive.
        """
        came, self._last_lines = self._last_lines, []
        found = came[-1:] if is_login and sum(line.startswith(b"2") for line in came) == 1 else came
        text = reply.message.rpartition("\n")[2].encode("utf-8", "surrogateescape")
        if len(found) != 1 or self._is_incomplete or self._came_early or found[0][4:].strip(b" \t\r\n") != text:
            raise OutOfStep

    @property
    def _is_incomplete(self) -> bool:
        return bool(self._part) or self._is_within

    # --- called by the event loop

    def data_received(self, data: bytes) -> None:
        if self._awaits_first_bytes:
            self._awaits_first_bytes = False
            self._came_early = has_unreceived(self._transport, self._descriptor)
        *lines, self._part = (self._part + data).split(b"\n")
        for line in lines:
            self._is_within = line[3:4] == b"-"  # RFC 5321, 4.2.1
            if not self._is_within:
                self._last_lines.append(line)
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
