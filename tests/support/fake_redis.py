"""A Redis for the conformance suite: it speaks RESP2, and answers as a scenario demands."""

import asyncio
from collections.abc import Sequence

from support.fake_broker import CLOSE, HANG, FakeBroker

ID = b"$15\r\n1763900000000-0\r\n"
HELLO = b"*4\r\n$4\r\nrole\r\n$6\r\nmaster\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n"
REPLICA = HELLO.replace(b"$6\r\nmaster", b"$7\r\nreplica")


class FakeRedis(FakeBroker):
    """A behaviour is a mapping from a command (`XADD`, `AUTH`, `HELLO`, `PING`, `WAIT`) to the bytes of its answer, or to one of
    the words above; `NO_LISTENER` stops it.
    """

    async def follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            self._answer(await _command(reader), writer)

    def _answer(self, command: Sequence[bytes], writer: asyncio.StreamWriter) -> None:
        name = command[0].decode()
        if name == "XADD":
            self.requests.append(b"\r\n".join(command))
        usual = {"XADD": ID, "HELLO": HELLO, "PING": b"+PONG\r\n", "WAIT": b":1\r\n"}.get(name, b"+OK\r\n")
        answer = self._at.get(name, usual)
        if answer == CLOSE:
            writer.transport.abort()
        elif answer != HANG:
            writer.write(answer.replace(b"PORT", str(self.port).encode()))


async def _command(reader: asyncio.StreamReader) -> list[bytes]:
    parts = []
    for _ in range(int((await reader.readuntil(b"\r\n"))[1:])):
        size = int((await reader.readuntil(b"\r\n"))[1:])
        parts.append((await reader.readexactly(size + 2))[:-2])
    return parts
