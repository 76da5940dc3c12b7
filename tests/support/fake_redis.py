"""A Redis for the conformance suite: it speaks RESP2, and answers as a scenario demands."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

CLOSE, HANG, NO_LISTENER = "close", "hang", "no listener"
ID = b"$15\r\n1763900000000-0\r\n"
HELLO = b"*4\r\n$4\r\nrole\r\n$6\r\nmaster\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n"
REPLICA = HELLO.replace(b"$6\r\nmaster", b"$7\r\nreplica")


class FakeRedis:
    """In a thread of its own.

    A behaviour is a mapping from a command (`XADD`, `AUTH`, `HELLO`, `PING`, `WAIT`) to the bytes of its answer, or to one of
    the words above; `NO_LISTENER` stops it.
    """

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[bytes] = []
        self._at: Mapping[str, Any] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._listening: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="redis", daemon=True)

    def behave(self, behaviour: Mapping[str, Any]) -> None:
        self._at = behaviour
        if NO_LISTENER in behaviour:
            self.stop()

    def start(self) -> None:
        self._thread.start()
        self._listening.result(timeout=60)

    def stop(self) -> None:
        loop, stopped = self._listening.result(timeout=60)
        if not loop.is_closed():
            loop.call_soon_threadsafe(stopped.set)
            self._thread.join(timeout=60)

    async def _serve(self) -> None:
        stopped = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set_result((asyncio.get_running_loop(), stopped))
        await stopped.wait()
        server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                self._answer(await _command(reader), writer)
        writer.close()
        self._writers.discard(writer)

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
