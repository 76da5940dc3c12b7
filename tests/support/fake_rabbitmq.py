"""A RabbitMQ for the conformance suite: it speaks AMQP 0-9-1, and answers as a scenario demands."""

import asyncio
from typing import Any

from pamqp import commands, frame
from pamqp.body import ContentBody
from pamqp.exceptions import UnmarshalingException
from pamqp.header import ContentHeader, ProtocolHeader
from pamqp.heartbeat import Heartbeat

from support.fake_broker import CLOSE, HANG, FakeBroker

NO_QUEUE, NACK, FORBIDDEN, BLOCK = "no queue", "nack", "forbidden", "block"
CAPABILITIES = {"capabilities": {"publisher_confirms": True, "basic.nack": True, "connection.blocked": True}}


class FakeRabbitMq(FakeBroker):
    """A behaviour is a mapping: `publish` says how a message is answered (confirmed, or one of the words above).

    `greeting` replaces the server's first frame by one of them, `blocked` blocks every publisher, `no exchange` has none.
    """

    async def follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _Exchange(self, writer).follow(reader)

    def at(self, point: str) -> Any:
        return self._at.get(point)


class _Exchange:
    """One connection of a client."""

    def __init__(self, server: FakeRabbitMq, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._writer = writer
        self._message: list[bytes] = []
        self._size = 0
        self._count = 0

    async def follow(self, reader: asyncio.StreamReader) -> None:
        buffered = b""
        while data := await reader.read(65536):
            buffered += data
            while buffered:
                try:
                    used, channel, found = frame.unmarshal(buffered)
                except UnmarshalingException:
                    break  # the rest follows
                self._take(channel, found, buffered[:used])
                buffered = buffered[used:]

    def _say(self, channel: int, answer: Any) -> None:
        self._writer.write(frame.marshal(answer, channel))

    def _take(self, channel: int, found: Any, raw: bytes) -> None:
        match found:
            case ProtocolHeader():
                if self._server.at("greeting") != HANG:
                    self._say(0, commands.Connection.Start(0, 9, CAPABILITIES, "PLAIN", "en_US"))
            case commands.Connection.StartOk():
                if self._server.at("greeting") == CLOSE:
                    self._writer.close()
                else:
                    self._say(0, commands.Connection.Tune(2047, 131072, 60))
            case commands.Connection.Open():
                self._say(0, commands.Connection.OpenOk())
                if self._server.at("blocked"):
                    self._say(0, commands.Connection.Blocked("low on memory"))
            case commands.Channel.Open():
                self._say(channel, commands.Channel.OpenOk())
            case commands.Confirm.Select():
                self._say(channel, commands.Confirm.SelectOk())
            case commands.Exchange.Declare():
                self._declare(channel, found)
            case commands.Connection.Close():
                self._say(0, commands.Connection.CloseOk())
                self._writer.close()
            case commands.Channel.Close():
                self._say(channel, commands.Channel.CloseOk())
            case commands.Basic.Publish():
                self._message = [f"{found.exchange} {found.routing_key} {found.mandatory}\r\n".encode()]
            case ContentHeader():
                self._message.append(raw)
                self._size, self._properties = found.body_size, found.properties
            case ContentBody():
                self._message.append(found.value)
                self._size -= len(found.value)
                if not self._size:
                    self._answer(channel)
            case Heartbeat() | _:
                pass

    def _declare(self, channel: int, found: Any) -> None:
        if self._server.at("no exchange"):
            self._say(channel, commands.Channel.Close(404, f"NOT_FOUND - no exchange '{found.exchange}'", 40, 10))
        else:
            self._say(channel, commands.Exchange.DeclareOk())

    def _answer(self, channel: int) -> None:
        self._server.requests.append(b"".join(self._message))
        self._count += 1
        how = self._server.at("publish")
        if how == CLOSE:
            self._writer.transport.abort()
        elif how == FORBIDDEN:
            self._say(channel, commands.Channel.Close(403, "ACCESS_REFUSED - ada@example.com", 60, 40))
        elif how == NACK:
            self._say(channel, commands.Basic.Nack(self._count))
        elif how != HANG:
            if how == NO_QUEUE:
                self._say(channel, commands.Basic.Return(312, "NO_ROUTE", "", "orders.placed"))
                self._say(channel, ContentHeader(0, 1, self._properties))
                self._say(channel, ContentBody(b"x"))
            elif how == BLOCK:  # as RabbitMQ does where memory or disk run low: a connection is blocked as it publishes
                self._say(0, commands.Connection.Blocked("low on memory"))
            self._say(channel, commands.Basic.Ack(self._count))
