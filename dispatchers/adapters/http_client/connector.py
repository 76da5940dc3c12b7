"""Opens connections: TCP, a tunnel through a proxy, TLS. No byte of a request is sent before all of this has succeeded."""

import asyncio
import ipaddress
import ssl
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

import httpx

from dispatchers.adapters.causes import VIA_PROXY, Cause, words_of
from dispatchers.adapters.http_client.answer_reader import AnswerReader
from dispatchers.adapters.http_client.connection import Connection
from dispatchers.adapters.http_client.proxies import Proxies, Proxy
from dispatchers.adapters.http_client.request_writer import Origin, Target, head_of
from dispatchers.adapters.http_client.resolver import Address, Resolver
from outbox.errors import ConfigurationError

HAPPY_EYEBALLS_SECONDS: Final = 0.25  # until the next address of a host is also tried: RFC 8305, 5


class Connector:
    """Opens connections to any origin.

    seconds: the limit for each of connecting, the tunnel and TLS. tls: for the service and for the proxy. proxy: its URL, with
    or without credentials; None for the environment's.
    """

    def __init__(self, *, seconds: float, tls: ssl.SSLContext, proxy: str | None) -> None:
        self._seconds = seconds
        self._tls = tls
        self._resolver = Resolver()
        self._proxies = Proxies(proxy)

    def require(self, origins: Iterable[Origin]) -> None:
        """Raise `ConfigurationError` if the environment names a proxy for one of these that cannot be used."""
        for origin in origins:
            self._proxies.of(origin)

    def named(self, target: Target) -> tuple[str, Sequence[tuple[str, str]]]:
        """The target in the request line, and the headers for the proxy. Plain HTTP uses no tunnel, so the proxy reads both."""
        proxy = None if target.origin.scheme == "https" else self._proxy(target.origin)
        return (target.path, ()) if proxy is None else (f"http://{target.host}{target.path}", proxy.headers)

    async def open(self, origin: Origin) -> Connection:
        """Open a connection. Raises only `httpx.ConnectError`, `httpx.ConnectTimeout` and `httpx.ProxyError`, whose text is one
        of `causes.WORDS`.
        """
        proxy = self._proxy(origin)
        connection: Connection | None = None
        opened = False
        via = VIA_PROXY if proxy else ""
        try:
            connection = await self._connect(proxy.origin if proxy else origin)
            if proxy and proxy.origin.scheme == "https":
                await self._encrypt(connection, proxy.origin, VIA_PROXY)
            if proxy and origin.scheme == "https":
                await self._tunnel(connection, origin, proxy)
            via = ""
            if origin.scheme == "https":
                await self._encrypt(connection, origin)
            if connection.is_closed():
                raise ConnectionResetError("the server closed the connection before the request")
            opened = True
            return connection
        except httpx.TransportError:
            raise
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"{via}{Cause.TIMED_OUT}") from error
        except Exception as error:
            raise httpx.ConnectError(f"{via}{words_of(error)}") from error
        finally:
            if connection is not None and not opened:
                connection.abort()

    def _proxy(self, origin: Origin) -> Proxy | None:
        try:
            return self._proxies.of(origin)
        except ConfigurationError as error:  # of a service that `require` was not asked about
            raise httpx.ProxyError(Cause.NO_USABLE_PROXY) from error

    async def _connect(self, origin: Origin) -> Connection:
        async with asyncio.timeout(self._seconds):
            if _is_address(origin.host):
                return await _connected(origin.host, origin.port)
            return await _first_connected(await self._resolver.addresses(origin.host, origin.port))

    async def _encrypt(self, connection: Connection, origin: Origin, via: str = "") -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await connection.encrypt(self._tls, origin.host)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"{via}{Cause.TLS_TIMED_OUT}") from error
        except ConnectionError as error:
            raise httpx.ConnectError(f"{via}{Cause.NO_TLS}") from error
        if connection.protocol not in {None, "http/1.1", "http/1.0"}:
            raise httpx.ConnectError(f"{via}{Cause.NO_HTTP_1}")

    async def _tunnel(self, connection: Connection, origin: Origin, proxy: Proxy) -> None:
        authority = origin.authority
        request = head_of("CONNECT", authority, [("Host", authority), *proxy.headers])
        answer = AnswerReader(0, has_body=False)
        try:
            await connection.ask(request, answer, connection.loop.time() + self._seconds)
        except httpx.TransportError as error:
            raise httpx.ProxyError(Cause.NO_TUNNEL) from error
        if answer.status is None or not 200 <= answer.status < 300 or answer.has_left_overs:
            raise httpx.ProxyError(Cause.LOGIN_WANTED if answer.status == 407 else Cause.NO_TUNNEL)


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
