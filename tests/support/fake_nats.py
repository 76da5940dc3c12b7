"""A NATS server for the conformance suite: it speaks the protocol, and answers as a scenario demands."""

import asyncio
import json
import threading
from typing import Any

from support.fake_broker import CLOSE, HANG, FakeBroker

STREAM = "ORDERS"
INFO = {
    "server_id": "fake",
    "version": "2.9.10",
    "max_payload": 1_000_000,
    "headers": True,
    "proto": 1,
    "jetstream": True,
}
CONFIG = {
    "name": STREAM,
    "subjects": ["orders.>"],
    "retention": "limits",
    "storage": "file",
    "duplicate_window": 120_000_000_000,
    "num_replicas": 1,
}
STATE = {"messages": 0, "bytes": 0, "first_seq": 1, "last_seq": 0, "consumer_count": 0}
STORED = {"stream": STREAM, "seq": 7}
NO_RESPONDERS = "no responders"
READS_NOTHING = "reads nothing"


class FakeNats(FakeBroker):
    """A behaviour is a mapping: `publish` says how a message is answered (a PubAck, or one of the words above), `config` changes
    the stream's configuration, `info` the server's greeting, `greeting` replaces it by one of the words. After `READS_NOTHING` a
    connection reads no more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads_no_more = threading.Event()
        self._subscriptions: dict[str, str] = {}

    async def follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._at.get("greeting") != HANG:
            writer.write(b"INFO %s\r\n" % json.dumps(INFO | self._at.get("info", {})).encode())
        while line := await reader.readline():
            await self._command(line, reader, writer)

    async def _command(self, line: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        verb, *words = line.decode().split()
        if verb == "SUB":
            self._subscriptions[words[0].removesuffix("*")] = words[-1]
        elif verb == "PING":
            writer.write(b"PONG\r\n")
        elif verb == "CONNECT" and self._at.get("greeting") == CLOSE:
            writer.write(b"-ERR 'Authorization Violation'\r\n")
            writer.close()
        elif verb in ("PUB", "HPUB"):
            subject, reply = words[:2]
            if self._at.get("publish") == READS_NOTHING and not subject.startswith("$JS"):
                self.reads_no_more.set()
                await writer.wait_closed()
                return
            data = await reader.readexactly(int(words[-1]) + 2)
            if subject.startswith("$JS.API.STREAM.INFO"):
                self._say(writer, reply, self._about())
            else:
                self.requests.append(f"{subject}\r\n".encode() + data)
                await self._take(subject, reply, writer)

    async def _take(self, subject: str, reply: str, writer: asyncio.StreamWriter) -> None:
        answer = self._at.get("publish", STORED)
        if answer == CLOSE:
            writer.transport.abort()
        elif answer == NO_RESPONDERS:
            head = b"NATS/1.0 503\r\n\r\n"
            writer.write(b"HMSG %s %d %d\r\n%s\r\n" % (self._to(reply), len(head), len(head), head))
        elif answer == "forbidden":
            writer.write(b"-ERR 'Permissions Violation for Publish to \"%s\"'\r\n" % subject.encode())
        elif answer != HANG:
            self._say(writer, reply, answer)

    def _about(self) -> dict[str, Any]:
        if "no stream" in self._at:
            error = {"code": 404, "err_code": 10059, "description": "stream not found"}
            return {"type": "io.nats.jetstream.api.v1.stream_info_response", "error": error}
        config = CONFIG | self._at.get("config", {})
        return {"config": config, "state": STATE, "created": "2026-11-23T12:00:00Z"}

    def _say(self, writer: asyncio.StreamWriter, subject: str, answer: Any) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        writer.write(b"MSG %s %d\r\n%s\r\n" % (self._to(subject), len(data), data))

    def _to(self, subject: str) -> bytes:
        """The subject and the number of the subscription that waits for it."""
        number = next(number for prefix, number in self._subscriptions.items() if subject.startswith(prefix))
        return f"{subject} {number}".encode()
