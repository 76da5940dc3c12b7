"""What the fake brokers share: a server on a thread of its own, whose behaviour a scenario of the conformance suite chooses."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self

CLOSE, HANG, NO_LISTENER = "close", "hang", "no listener"


class FakeBroker(ABC):
    """requests: what was published, as the suite searches it.

    A behaviour is a mapping that each broker explains; in all of them `NO_LISTENER` stops the server.
    """

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[bytes] = []
        self._at: Mapping[str, Any] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._listening: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name=type(self).__name__, daemon=True
        )

    def behave(self, behaviour: Mapping[str, Any]) -> None:
        self._at = behaviour
        if NO_LISTENER in behaviour:
            self.stop()

    def __enter__(self) -> Self:
        self._thread.start()
        self._listening.result(timeout=60)
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def stop(self) -> None:
        loop, stopped = self._listening.result(timeout=60)
        if not loop.is_closed():
            loop.call_soon_threadsafe(stopped.set)
            self._thread.join(timeout=60)

    @abstractmethod
    async def follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one client until it has gone."""

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
            await self.follow(reader, writer)
        writer.close()
        self._writers.discard(writer)
