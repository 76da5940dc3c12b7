"""An HTTP server for tests that injects faults, on a loopback port, in its own thread.

    with faulty_http() as remote:
        remote.behave(answer(503, headers={"Retry-After": "7"}))
        ...                                            # send something to remote.url
        assert [request.body for request in remote.requests] == [b"{}"]

The server reads each request in full and strictly, and records it before it injects the fault. So `requests` contains only
requests that have arrived.
"""

import asyncio
import contextlib
import gzip
import json as json_module
import re
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, cast

import h11

MAX_READ_BYTES = 65_536
LARGE_BYTES = 64 * 1024 * 1024  # what giant bodies and bombs hold: far more than any answer that is worth keeping
DRIP_SECONDS = 0.05  # shorter than any read timeout, so that only an overall deadline ends it
NO_LINGERING = struct.pack("ii", 1, 0)  # SO_LINGER of no time at all: closing sends RST


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request that has arrived in full. Header names are in lower case. `bytes(request)` is the whole request."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    def __bytes__(self) -> bytes:
        head = [f"{self.method} {self.target}", *(f"{name}: {value}" for name, value in self.headers.items())]
        return "\r\n".join([*head, "", ""]).encode("latin-1") + self.body


Behaviour: TypeAlias = Callable[[Request, asyncio.StreamWriter], Awaitable[bool]]
"""The treatment of a request: it may write, and returns whether the connection may be used again."""


# --- behaviours


def answer(
    status: int = 200, *, headers: Mapping[str, str] | None = None, body: bytes = b"", json: Any = None
) -> Behaviour:
    """A correct answer.

    json: sent as the body, with its content type. `body` then stays empty.
    """
    content = body if json is None else json_module.dumps(json).encode()
    kind = {} if json is None else {"Content-Type": "application/json"}
    lengths = {} if status == 204 else {"Content-Length": str(len(content))}
    return _writing(_head(status, kind | lengths | dict(headers or {})) + content, stays_open=True)


def redirect(status: int) -> Behaviour:
    """A redirect to another path of this server. If the client follows it, the server records that request."""
    return answer(status, headers={"Location": "/elsewhere"})


def echo(status: int) -> Behaviour:
    """An answer that quotes the whole request, with its credentials, in each place in which services write messages."""

    async def behave(request: Request, writer: asyncio.StreamWriter) -> bool:
        quoted = bytes(request).decode("latin-1")
        texts = dict.fromkeys(("type", "code", "message", "param", "decline_code"), quoted)
        said = json_module.dumps({**texts, "id": quoted, "error": texts, "errors": [texts]}).encode()
        line = re.sub(r"[^\x20-\x7e]+", " ", quoted)
        headers = {"X-Quoted": line, "Request-Id": line}
        writer.write(_head(status, {"Content-Length": str(len(said)), **headers}) + said)
        await writer.drain()
        return True

    return behave


def cut_short(status: int = 200) -> Behaviour:
    """Half a body; then the server closes the connection normally."""
    return _writing(_head(status, {"Content-Length": "1000"}) + b'{"id": "', stays_open=False)


def reset_in_body(status: int = 200) -> Behaviour:
    """Half a body; then the server resets the connection."""

    async def behave(request: Request, writer: asyncio.StreamWriter) -> bool:
        # A chunk large enough that the head is read before the reset throws away what was not.
        writer.write(_head(status, {"Content-Length": "1000000"}) + b"x" * 1000)
        await writer.drain()
        await asyncio.sleep(DRIP_SECONDS)
        reset_connection(writer)
        return False

    return behave


def answer_twice(status: int = 200) -> Behaviour:
    """An answer, followed at once by a second one that belongs to no request and remains on the connection."""
    return _writing(2 * (_head(status, {"Content-Length": "2"}) + b"{}"), stays_open=True)


def giant(status: int = 200) -> Behaviour:
    """An answer with a body of 64 MiB."""

    async def behave(request: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(_head(status, {"Content-Length": str(LARGE_BYTES)}))
        for _ in range(LARGE_BYTES // MAX_READ_BYTES):
            writer.write(b"x" * MAX_READ_BYTES)
            await writer.drain()
        return True

    return behave


def gzip_bomb(status: int = 200) -> Behaviour:
    """An answer of 64 KiB that decompress to 64 MiB, whether or not the client accepts gzip."""
    return answer(status, headers={"Content-Encoding": "gzip"}, body=_bomb())


def giant_head(status: int = 200) -> Behaviour:
    """An answer with a header line of 1 MiB."""
    return answer(status, headers={"X-Giant": "x" * 1024 * 1024})


def drip_body(status: int = 200) -> Behaviour:
    """The head at once; then a byte of the body from time to time, for as long as the client's remote_timeout."""

    async def behave(request: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(_head(status, {"Content-Length": str(LARGE_BYTES)}))
        return await _drip(writer)

    return behave


async def drip_head(request: Request, writer: asyncio.StreamWriter) -> bool:
    """A head that never ends, one byte from time to time."""
    writer.write(b"HTTP/1.1 200 OK\r\nX-Dripping: ")
    return await _drip(writer)


async def hang(request: Request, writer: asyncio.StreamWriter) -> bool:
    """No byte of an answer. The connection stays open."""
    await asyncio.Event().wait()
    return False


async def close(request: Request, writer: asyncio.StreamWriter) -> bool:
    """The server reads the request and closes the connection without an answer."""
    return False


async def reset(request: Request, writer: asyncio.StreamWriter) -> bool:
    """The server reads the request and resets the connection."""
    reset_connection(writer)
    return False


async def garble(request: Request, writer: asyncio.StreamWriter) -> bool:
    """An answer that is not HTTP."""
    return await _writing(b"\x16\x03\x01\x00\x00 this is no HTTP\r\n\r\n", stays_open=False)(request, writer)


async def refuse(request: Request, writer: asyncio.StreamWriter) -> bool:
    """The server stops listening. Connections are refused from then on."""
    raise AssertionError("a server that does not listen was reached")


# --- the server


class FaultyHttp:
    """A server that listens at `url`.

    requests: the requests that have arrived, in order.
    connected: the open connections.
    """

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[Request] = []
        self._behaviour: Behaviour = answer()
        self._conversations: set[asyncio.Task[None]] = set()
        self._answering: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def connected(self) -> int:
        return len(self._conversations)

    def behave(self, behaviour: Behaviour) -> None:
        """Treat requests in this way from now on. Open requests are cut off."""

        changed: Future[None] = Future()

        def change() -> None:
            self._behaviour = behaviour
            for task in self._answering:
                task.cancel()
            if behaviour is refuse and self._server is not None:
                self._server.close()
            changed.set_result(None)

        if self._loop is None:
            raise RuntimeError("this server does not run: `with faulty_http() as remote:`")
        self._loop.call_soon_threadsafe(change)
        changed.result(timeout=10)

    async def serve(self, listening: "Future[asyncio.Event]") -> None:
        """Serve until the event that `listening` receives is set."""
        stopped = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._converse, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        listening.set_result(stopped)
        await stopped.wait()
        self._server.close()
        conversations = list(self._conversations)
        for task in conversations:
            task.cancel()
        await asyncio.gather(*conversations, return_exceptions=True)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast(asyncio.Task[None], asyncio.current_task())
        self._conversations.add(task)
        # A client that leaves, sends garbage or is cut off gets no answer.
        with contextlib.suppress(ConnectionError, h11.RemoteProtocolError, asyncio.CancelledError):
            while (request := await read_request(h11.Connection(h11.SERVER), reader, writer)) is not None:
                self.requests.append(request)
                self._answering.add(task)
                try:
                    if not await self._behaviour(request, writer):
                        break
                finally:
                    self._answering.discard(task)
        writer.close()
        self._conversations.discard(task)


@contextlib.contextmanager
def faulty_http() -> Iterator[FaultyHttp]:
    """A server on a free loopback port, in its own thread and event loop. It answers 200 until `behave` is called."""
    remote = FaultyHttp()
    listening: Future[asyncio.Event] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(remote.serve(listening)), name="faulty-http", daemon=True)
    thread.start()
    stopped = listening.result(timeout=10)
    loop = cast(asyncio.AbstractEventLoop, remote._loop)
    try:
        yield remote
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(timeout=10)


async def read_request(
    http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Request | None:
    """The next request in full, or None when the client has closed. What is no HTTP is an error."""
    body = b""
    head: h11.Request | None = None
    while True:
        match http.next_event():
            case h11.NEED_DATA:
                if http.they_are_waiting_for_100_continue:
                    writer.write(http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
                http.receive_data(await reader.read(MAX_READ_BYTES))
            case h11.Request() as head:
                pass
            case h11.Data(data=data):
                body += bytes(data)
            case h11.EndOfMessage() if head is not None:
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
                method, target = head.method.decode("latin-1"), head.target.decode("latin-1")
                return Request(method=method, target=target, headers=headers, body=body)
            case _:
                return None


def _writing(data: bytes, *, stays_open: bool) -> Behaviour:
    async def behave(request: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(data)
        await writer.drain()
        return stays_open

    return behave


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Said", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


async def _drip(writer: asyncio.StreamWriter) -> bool:
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(DRIP_SECONDS)


def reset_connection(writer: asyncio.StreamWriter) -> None:
    """End the connection so that the other side gets RST, not FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGERING)
    writer.transport.abort()


@cache
def _bomb() -> bytes:
    return gzip.compress(bytes(LARGE_BYTES))
