"""A small HTTP server on the dispatcher's event loop: /metrics, /livez and /readyz.

No client can delay a send: each has a few seconds, the number of clients is bounded, and metrics are collected on a thread.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import NamedTuple

from dispatchers.threads import on_own_thread
from outbox.errors import ConfigurationError

log = logging.getLogger("outbox.daemon")

CLIENT_SECONDS = 10.0  # for a request and its answer: as long as Prometheus waits for a scrape
MAX_CLIENTS = 20  # at the same time; one more ends the oldest
MAX_HEAD_BYTES = 8192
TEXT = "text/plain; charset=utf-8"
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Address(NamedTuple):
    """host: a name or an IP address. port: 0 for any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address_of(text: str) -> Address:
    """Raises `ConfigurationError` for a text that is not HOST:PORT."""
    host, _, port = text.rpartition(":")
    is_ipv6 = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_ipv6 else host
    is_port = port.isascii() and port.isdigit() and int(port) <= 65535
    if not host or not is_port or (":" in host) != is_ipv6:
        raise ConfigurationError(f"{text!r} is not an address: write HOST:PORT, such as 127.0.0.1:9464 or [::1]:9464")
    return Address(host, int(port))


class Answer(NamedTuple):
    """One response, which closes its connection."""

    status: int
    body: bytes
    content_type: str = TEXT

    def encoded(self, *, with_body: bool) -> bytes:
        head = (
            f"HTTP/1.1 {self.status} {REASONS[self.status]}\r\nContent-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\nCache-Control: no-store\r\nConnection: close\r\n"
        )
        allow = "Allow: GET, HEAD\r\n" if self.status == 405 else ""
        return f"{head}{allow}\r\n".encode() + (self.body if with_body else b"")


class HttpServer:
    """page: returns the metrics with their content type; called on a thread. unready: returns why the dispatcher sends nothing,
    None if it is ready."""

    def __init__(
        self, address: Address, *, page: Callable[[], tuple[bytes, str]], unready: Callable[[], str | None]
    ) -> None:
        self._address = address
        self._page = page
        self._unready = unready
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.Task[None], None] = {}  # in the order in which they came
        self._scrape: asyncio.Future[tuple[bytes, str]] | None = None

    async def start(self) -> None:
        """Raises `ConfigurationError` if it cannot listen at the address."""
        try:
            self._server = await asyncio.start_server(self._accept, *self._address, limit=MAX_HEAD_BYTES)
        except OSError as error:
            is_of_name = isinstance(error, socket.gaierror) or error.errno is None
            reason = error.strerror or str(error) if is_of_name else os.strerror(error.errno or 0)
            raise ConfigurationError(f"cannot listen on {self._address}: {reason}") from error
        listening = Address(*self._server.sockets[0].getsockname()[:2])
        log.info("serving /metrics, /livez and /readyz at http://%s", listening)

    def close(self) -> None:
        """End at once, without waiting for clients."""
        if self._server is not None:
            self._server.close()
        for client in self._clients:
            client.cancel()
        if self._scrape is not None:
            self._scrape.cancel()

    # --- one client

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= MAX_CLIENTS:
            oldest = next(iter(self._clients))
            del self._clients[oldest]
            oldest.cancel()
        client = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._clients[client] = None
        client.add_done_callback(lambda ended: self._clients.pop(ended, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CLIENT_SECONDS):
                writer.write(await self._exchange(reader))
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, OSError):  # the client is slow, or has gone
            pass
        finally:
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, version = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
        except (asyncio.LimitOverrunError, ValueError):
            return Answer(400, b"not a request that this server understands\n").encoded(with_body=True)
        if not version.startswith("HTTP/1."):
            return Answer(400, b"only HTTP/1 is served\n").encoded(with_body=True)
        if method not in ("GET", "HEAD"):
            return Answer(405, b"only GET and HEAD are served\n").encoded(with_body=True)
        return (await self._answer(target.partition("?")[0])).encoded(with_body=method == "GET")

    async def _answer(self, path: str) -> Answer:
        match path:
            case "/livez":
                return Answer(200, b"alive\n")
            case "/readyz":
                reason = self._unready()
                return Answer(200, b"ready\n") if reason is None else Answer(503, f"{reason}\n".encode())
            case "/metrics":
                return await self._metrics()
            case _:
                return Answer(404, b"served are /metrics, /livez and /readyz\n")

    async def _metrics(self) -> Answer:
        """One collection at a time, for all clients that wait: one that hangs in a database gets no second thread."""
        if self._scrape is None or self._scrape.done():
            self._scrape = asyncio.ensure_future(on_own_thread("outbox-metrics", self._page))
        try:
            body, content_type = await asyncio.shield(self._scrape)
        except Exception:
            log.exception("cannot collect the metrics")
            return Answer(500, b"cannot collect the metrics; the log shows why\n")
        return Answer(200, body, content_type)
