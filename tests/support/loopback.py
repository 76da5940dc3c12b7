"""Servers on loopback ports that answer as a test says, for what only real sockets can show."""

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

GONE = (ConnectionError, asyncio.IncompleteReadError)


@asynccontextmanager
async def serving(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server at this loopback port; each of its connections is handed to `answer`, then closed."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(*GONE):
                await answer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()  # without `async with`, which waits since Python 3.12 until the last client has gone


@asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[str]:
    """A server without TLS, at this base URL."""
    async with serving(answer) as port:
        yield f"http://127.0.0.1:{port}"


def closed_port() -> str:
    """The base URL of a port on which no server listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{reserved.getsockname()[1]}"


async def whole_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return head + await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)


def answering(status: int = 200, body: Any = None, *head: str, seen: list[bytes] | None = None) -> Answer:
    """Answers every request of a connection alike. seen: where the requests are put."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await whole_request(reader)
            if seen is not None:
                seen.append(request)
            await say(writer, status, json.dumps(body).encode(), *head)

    return answer


async def say(writer: asyncio.StreamWriter, status: int, body: bytes, *head: str) -> None:
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(body)}", *head, "", ""]
    writer.write("\r\n".join(lines).encode() + body)
    await writer.drain()


async def say_without_end(writer: asyncio.StreamWriter, head: bytes, chunk: bytes, pause: float = 0) -> int:
    """Write until the other side is gone; how many bytes it took until then."""
    writer.write(head)
    written = 0
    with suppress(*GONE):
        while True:
            writer.write(chunk)
            await writer.drain()
            written += len(chunk)
            await asyncio.sleep(pause)
    return written


def reset(writer: asyncio.StreamWriter) -> None:
    """Break the connection off, with RST rather than FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def tunnelling(port: int, asked: list[bytes]) -> Answer:
    """A proxy whose tunnels all lead to `port`. asked: where what it was asked for is put."""

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await whole_request(reader))
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.0 200 Connection established\r\n\r\n")
        await asyncio.gather(pour(reader, far_writer), pour(far_reader, writer), return_exceptions=True)

    return tunnel
