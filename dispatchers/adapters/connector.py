"""Opens connections: TCP, a tunnel through a proxy, TLS. Whatever fails here, no byte of the request has left."""

import asyncio
import ipaddress
import ssl
from base64 import b64encode
from typing import Final, NamedTuple

import httpx

from dispatchers.adapters.answer_reader import AnswerReader
from dispatchers.adapters.connection import Connection

HAPPY_EYEBALLS_SECONDS: Final = 0.25  # until the next address of a host is tried beside the first: RFC 8305, 5
PORTS: Final = {"http": 80, "https": 443}


class Origin(NamedTuple):
    """Where a connection leads. host: in ASCII, without the brackets of an IPv6 address."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: httpx.URL) -> "Origin":
        """Raises `httpx.UnsupportedProtocol`."""
        if url.scheme not in PORTS or not url.raw_host:
            raise httpx.UnsupportedProtocol("the URL must begin with http:// or https://, and name a host")
        return cls(url.scheme, url.raw_host.decode("ascii"), url.port or PORTS[url.scheme])

    @property
    def authority(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode("ascii")


class Connector:
    """Opens connections to any origin.

    seconds: what connecting, the tunnel and TLS may take each. tls: whom to trust, the proxy too. proxy: its URL, with
    credentials or without.
    """

    def __init__(self, *, seconds: float, tls: ssl.SSLContext, proxy: str | None) -> None:
        self._seconds = seconds
        self._tls = tls
        self._proxy: Origin | None = None
        self._proxy_headers = b""
        if proxy is not None:
            url = httpx.URL(proxy)
            self._proxy = Origin.of(url)
            if url.userinfo:
                credentials = b64encode(f"{url.username}:{url.password}".encode())
                self._proxy_headers = b"Proxy-Authorization: Basic " + credentials + b"\r\n"

    def target(self, url: httpx.URL, origin: Origin) -> tuple[bytes, bytes]:
        """How a request names its target, and its headers for the proxy: one of plain HTTP goes through no tunnel."""
        if self._proxy is None or origin.scheme == "https":
            return url.raw_path, b""
        return b"http://" + url.netloc + url.raw_path, self._proxy_headers

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
        request = b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (authority, authority, self._proxy_headers)
        answer = AnswerReader(0, head_only=True)
        try:
            async with asyncio.timeout(self._seconds):
                await connection.ask(request, answer)
        except httpx.TransportError as error:
            raise httpx.ProxyError("the proxy closed the connection, or answered in no HTTP/1.1") from error
        if answer.status is None or not 200 <= answer.status < 300 or answer.has_left_overs:
            raise httpx.ProxyError(f"the proxy opened no tunnel: HTTP {answer.status}")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
