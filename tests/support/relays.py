"""A proxy between a client and a server, for tests: it can swallow what it carries, and counts round trips."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import sqlalchemy as sa

READY = re.compile(rb"Z\x00\x00\x00\x05[ITE]")
"""PostgreSQL's ReadyForQuery: it ends each answer to a query or to a pipeline."""
READY_BYTES = 6


class Relay:
    """Carries TCP connections to a server, until it discards all data and reports nothing, as a hung proxy does.

    round_trips: how often the server was ready for more: once after each pipeline, however its parts arrive.
    """

    def __init__(self, server: sa.URL) -> None:
        self._server = server
        self.port = 0
        self.round_trips = 0
        self.listening = threading.Event()
        self._writers: list[asyncio.StreamWriter] = []

    def swallow(self) -> None:
        self._call(self._open.clear)

    def resume(self) -> None:
        """Carry again, and what was swallowed first."""
        self._call(self._open.set)

    def forget(self) -> None:
        """Swallow what goes through the connections that there are; new ones are carried."""
        self._call(self._forget)

    def _forget(self) -> None:
        self._open.clear()
        self._open = asyncio.Event()
        self._open.set()

    def refuse(self) -> None:
        """End every connection, and each new one at once."""
        self._call(self._refuse)

    def accept(self) -> None:
        self._call(self._is_refusing.clear)

    def _refuse(self) -> None:
        self._is_refusing.set()
        for writer in self._writers:
            writer.transport.abort()

    def _call(self, change: Callable[[], None]) -> None:
        changed = threading.Event()
        self._loop.call_soon_threadsafe(change)
        self._loop.call_soon_threadsafe(changed.set)
        assert changed.wait(60)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)

    async def serve(self) -> None:
        self._loop, self._open, self._stopping = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._is_refusing = asyncio.Event()
        self._open.set()
        listener = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        self.listening.set()
        await self._stopping.wait()
        listener.close()  # and waits for no connection: what has been swallowed never ends

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await self._reach_server()
        if self._is_refusing.is_set():  # perhaps since the connection to the server was begun
            writer.transport.abort()
            far_writer.transport.abort()
            return
        self._writers += [writer, far_writer]
        is_open = self._open
        try:
            with suppress(ConnectionError):
                await asyncio.gather(
                    self._copy(reader, far_writer, is_open),
                    self._copy(far_reader, writer, is_open, self._count_trips),
                )
        except asyncio.CancelledError:
            return  # at the end; asyncio's server would report it
        finally:
            writer.transport.abort()
            far_writer.transport.abort()

    async def _reach_server(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        where = {"host": self._server.host, "port": self._server.port or 5432} | self._server.query
        if str(where["host"]).startswith("/"):
            return await asyncio.open_unix_connection(f"{where['host']}/.s.PGSQL.{where['port']}")
        return await asyncio.open_connection(str(where["host"]), int(str(where["port"])))

    def _count_trips(self, read: bytes, data: bytes) -> None:
        """read: the end of what came before, as a message may come in two pieces."""
        self.round_trips += len(READY.findall(read + data))

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        is_open: asyncio.Event,
        count: Callable[[bytes, bytes], None] = lambda read, data: None,
    ) -> None:
        read = b""
        while data := await reader.read(65536):
            count(read, data)
            read = (read + data)[-READY_BYTES + 1 :]
            await is_open.wait()
            writer.write(data)
            await writer.drain()
        writer.close()


@contextmanager
def relay(server: sa.URL) -> Iterator[tuple[Relay, sa.URL]]:
    carrying = Relay(server)
    thread = threading.Thread(target=lambda: asyncio.run(carrying.serve()))
    thread.start()
    assert carrying.listening.wait(60)
    try:
        yield carrying, server.set(host="127.0.0.1", port=carrying.port, query={})
    finally:
        carrying.stop()
        thread.join()
