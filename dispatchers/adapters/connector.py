"""Opens connections: TCP, a tunnel through a proxy, TLS. Whatever fails here, no byte of the request has left."""

import asyncio
import ipaddress
import ssl
from base64 import b64encode
from collections.abc import Sequence
from typing import Final

import httpx

from dispatchers.adapters.answer_reader import AnswerReader
from dispatchers.adapters.connection import Connection
from dispatchers.adapters.request_writer import Origin, Target, head_of

HAPPY_EYEBALLS_SECONDS: Final = 0.25  # until the next address of a host is tried beside the first: RFC 8305, 5


class Connector:
    """Opens connections to any origin.

    seconds: what connecting, the tunnel and TLS may take each. tls: whom to trust, the proxy too. proxy: its URL, with
    credentials or without.
    """

    def __init__(self, *, seconds: float, tls: ssl.SSLContext, proxy: str | None) -> None:
        self._seconds = seconds
        self._tls = tls
        self._proxy: Origin | None = None
        self._proxy_headers: list[tuple[str, str]] = []
        if proxy is not None:
            url = httpx.URL(proxy)
            self._proxy = Target.of(url).origin
            if url.userinfo:
                credentials = b64encode(f"{url.username}:{url.password}".encode()).decode()
                self._proxy_headers.append(("Proxy-Authorization", f"Basic {credentials}"))

    def named(self, target: Target) -> tuple[str, Sequence[tuple[str, str]]]:
        """How a request names its target, and its headers for the proxy: one of plain HTTP goes through no tunnel."""
        if self._proxy is None or target.origin.scheme == "https":
            return target.path, ()
        return f"http://{target.host}{target.path}", self._proxy_headers

    async def open(self, origin: Origin) -> Connection:
        """Raises: `httpx.ConnectError`, `httpx.ConnectTimeout` or `httpx.ProxyError`, whatever it was."""
        connection = Connection(asyncio.get_running_loop())
        opened = False
        try:
            await self._connect(connection, self._proxy or origin)
            if self._proxy is not None and self._proxy.scheme == "https":
                await self._encrypt(connection, self._proxy)
            if self._proxy is not None and origin.scheme == "https":
                await self._tunnel(connection, origin)
            if origin.scheme == "https":
                await self._encrypt(connection, origin)
            opened = True
        except httpx.ProxyError:
            raise
        except TimeoutError:
            raise httpx.ConnectTimeout("not connected in time") from None
        except Exception as error:
            raise httpx.ConnectError(f"not connected: {error}") from error
        finally:
            if not opened:
                connection.abort()
        return connection

    async def _connect(self, connection: Connection, origin: Origin) -> None:
        delay = None if _is_address(origin.host) else HAPPY_EYEBALLS_SECONDS
        async with asyncio.timeout(self._seconds):
            await connection.loop.create_connection(
                lambda: connection, origin.host, origin.port, happy_eyeballs_delay=delay
            )

    async def _encrypt(self, connection: Connection, origin: Origin) -> None:
        self._tls.set_alpn_protocols(["http/1.1"])  # no other is spoken here
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


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
