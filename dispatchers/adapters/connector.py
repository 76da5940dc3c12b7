"""Opens connections: TCP, a tunnel through a proxy, TLS. No byte of a request is sent before all of this has succeeded."""

import asyncio
import ipaddress
import ssl
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import httpx

from dispatchers.adapters.answer_reader import AnswerReader
from dispatchers.adapters.connection import Connection
from dispatchers.adapters.request_writer import Origin, Target, head_of
from dispatchers.adapters.resolver import Address, Resolver

HAPPY_EYEBALLS_SECONDS: Final = 0.25  # until the next address of a host is also tried: RFC 8305, 5


class Connector:
    """Opens connections to any origin.

    seconds: the limit for each of connecting, the tunnel and TLS. tls: for the service and for the proxy. proxy: its URL, with
    or without credentials.
    """

    def __init__(self, *, seconds: float, tls: ssl.SSLContext, proxy: str | None) -> None:
        self._seconds = seconds
        self._tls = tls
        self._resolver = Resolver()
        self._proxy: Origin | None = None
        self._proxy_headers: list[tuple[str, str]] = []
        if proxy is not None:
            url = httpx.URL(proxy)
            self._proxy = Target.of(url).origin
            if url.userinfo:
                credentials = b64encode(f"{url.username}:{url.password}".encode()).decode()
                self._proxy_headers.append(("Proxy-Authorization", f"Basic {credentials}"))

    def named(self, target: Target) -> tuple[str, Sequence[tuple[str, str]]]:
        """The target in the request line, and the headers for the proxy. Plain HTTP uses no tunnel, so the proxy reads both."""
        if self._proxy is None or target.origin.scheme == "https":
            return target.path, ()
        return f"http://{target.host}{target.path}", self._proxy_headers

    async def open(self, origin: Origin) -> Connection:
        """Open a connection. Raises only `httpx.ConnectError`, `httpx.ConnectTimeout` and `httpx.ProxyError`."""
        connection: Connection | None = None
        opened = False
        try:
            connection = await self._connect(self._proxy or origin)
            if self._proxy is not None and self._proxy.scheme == "https":
                await self._encrypt(connection, self._proxy)
            if self._proxy is not None and origin.scheme == "https":
                await self._tunnel(connection, origin)
            if origin.scheme == "https":
                await self._encrypt(connection, origin)
            if connection.is_closed():
                raise ConnectionResetError("the server closed the connection before the request")
            opened = True
            return connection
        except httpx.ProxyError:
            raise
        except TimeoutError:
            raise httpx.ConnectTimeout("not connected in time") from None
        except Exception as error:
            raise httpx.ConnectError(f"not connected: {error}") from error
        finally:
            if connection is not None and not opened:
                connection.abort()

    async def _connect(self, origin: Origin) -> Connection:
        async with asyncio.timeout(self._seconds):
            if _is_address(origin.host):
                return await _connected(origin.host, origin.port)
            return await _first_connected(await self._resolver.addresses(origin.host, origin.port))

    async def _encrypt(self, connection: Connection, origin: Origin) -> None:
        self._tls.set_alpn_protocols(["http/1.1"])  # the adapters speak no other protocol
        async with asyncio.timeout(self._seconds):
            await connection.encrypt(self._tls, origin.host)

    async def _tunnel(self, connection: Connection, origin: Origin) -> None:
        authority = origin.authority
        request = head_of("CONNECT", authority, [("Host", authority), *self._proxy_headers])
        answer = AnswerReader(0, has_body=False)
        try:
            await connection.ask(request, answer, connection.loop.time() + self._seconds)
        except httpx.TransportError as error:
            raise httpx.ProxyError("the proxy closed the connection, or did not answer in HTTP/1.1") from error
        if answer.status is None or not 200 <= answer.status < 300 or answer.has_left_overs:
            raise httpx.ProxyError(f"the proxy opened no tunnel: HTTP {answer.status}")


async def _connected(ip: str, port: int) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(loop), ip, port)
    return connection


async def _first_connected(addresses: Sequence[Address]) -> Connection:
    """The connection to the first address that answers. The next address is tried when one has failed, or has not answered for
    a moment.
    """
    waiting, attempts = list(addresses), set[asyncio.Task[Connection]]()
    error: BaseException | None = None
    try:
        while waiting or attempts:
            if waiting:
                address = waiting.pop(0)
                attempts.add(asyncio.create_task(_connected(address.ip, address.port)))
            delay = HAPPY_EYEBALLS_SECONDS if waiting else None
            ended, _ = await asyncio.wait(attempts, timeout=delay, return_when=asyncio.FIRST_COMPLETED)
            for attempt in ended:
                attempts.remove(attempt)
                error = attempt.exception()
                if error is None:
                    return attempt.result()
    finally:
        for attempt in attempts:
            attempt.cancel()
            attempt.add_done_callback(_close_unused)
    raise error or OSError("the host has no address")


def _close_unused(attempt: asyncio.Task[Connection]) -> None:
    with suppress(asyncio.CancelledError, OSError):
        attempt.result().abort()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
