"""A request as it leaves, framed by h11: nothing in a header begins another header, or another request."""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import h11
import httpx

PORTS: Final = {"http": 80, "https": 443}
OURS: Final = frozenset({"accept-encoding", "content-length", "host", "transfer-encoding"})
WITH_CONTENT: Final = frozenset({"POST", "PUT", "PATCH"})  # they say so where they have none: RFC 9110, 8.6
HEAD_BYTES_MAX: Final = 100 * 1024  # of an answer's head, of what is between two of its chunks, of its trailers


class Origin(NamedTuple):
    """Where a connection leads. host: in ASCII, without the brackets of an IPv6 address."""

    scheme: str
    host: str
    port: int

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Target(NamedTuple):
    """Where a request goes. host: as its header names it. path: with the query, percent-encoded."""

    url: httpx.URL
    origin: Origin
    host: str
    path: str

    @classmethod
    def of(cls, url: httpx.URL) -> "Target":
        """Raises `httpx.UnsupportedProtocol`."""
        if url.scheme not in PORTS or not url.raw_host:
            raise httpx.UnsupportedProtocol("the URL must begin with http:// or https://, and name a host")
        origin = Origin(url.scheme, url.raw_host.decode("ascii"), url.port or PORTS[url.scheme])
        return cls(url, origin, url.netloc.decode("ascii"), url.raw_path.decode("ascii"))


class Outgoing(NamedTuple):
    """A request to be sent. headers: those of HTTP itself are left out, and written with it."""

    method: str
    target: Target
    headers: Sequence[tuple[str, str]]
    content: bytes = b""

    @classmethod
    async def of(cls, request: httpx.Request) -> "Outgoing":
        """Raises `httpx.UnsupportedProtocol`."""
        content = await request.aread()
        target = Target.of(request.url)._replace(host=request.headers["Host"])
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw]
        return cls(request.method, target, [each for each in headers if each[0].lower() not in OURS], content)

    def for_httpx(self) -> httpx.Request:
        headers = [("Host", self.target.host), *self.headers, ("Accept-Encoding", "identity")]
        return httpx.Request(self.method, self.target.url, headers=headers, content=self.content or None)

    def written(self, http: h11.Connection, target: str, for_proxy: Iterable[tuple[str, str]]) -> bytes:
        """The bytes of it. target: as it is named to who reads it. for_proxy: headers beside its own.

        No compression is asked for, because a compressed answer can be a bomb.
        Raises `httpx.LocalProtocolError` for what cannot be sent; the text shows nothing of it.
        """
        headers = [("Host", self.target.host), *self.headers, *for_proxy, ("Accept-Encoding", "identity")]
        if self.content or self.method in WITH_CONTENT:
            headers.append(("Content-Length", str(len(self.content))))
        return framed(http, self.method, target, headers, self.content)


def new_exchange() -> h11.Connection:
    """What frames one request, and reads the answer to it."""
    return h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)


def framed(
    http: h11.Connection, method: str, target: str, headers: Iterable[tuple[str, str]], content: bytes = b""
) -> bytes:
    """A request of these headers alone. Raises `httpx.LocalProtocolError`, which shows nothing of it."""
    try:
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        head = h11.Request(method=method.encode("ascii"), target=target.encode("ascii"), headers=encoded)
        events = (head, h11.Data(data=content), h11.EndOfMessage()) if content else (head, h11.EndOfMessage())
        return b"".join([http.send(event) or b"" for event in events])
    except (h11.LocalProtocolError, UnicodeEncodeError):
        raise httpx.LocalProtocolError("a method, a URL or a header of the request cannot be sent") from None
