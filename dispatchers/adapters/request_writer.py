"""A request as it leaves, in HTTP/1.1: nothing in a header begins another header, or another request."""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import httpx

PORTS: Final = {"http": 80, "https": 443}
OURS: Final = frozenset({"accept-encoding", "content-length", "host", "transfer-encoding"})
WITH_CONTENT: Final = frozenset({"POST", "PUT", "PATCH"})  # they say so where they have none: RFC 9110, 8.6
HEAD: Final = re.compile(
    r"[!#$%&'*+.^_`|~0-9A-Za-z-]+ [\x21-\x7e]+ HTTP/1\.1\r\n"
    r"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: [^\x00\x0a-\x0d]*\r\n)+\r\n"
)
"""Source: RFC 9112, 3 and 5."""


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

    def written(self, target: str, for_proxy: str) -> bytes:
        """The bytes of it. target: as it is named to who reads it. for_proxy: lines of headers beside its own.

        No compression is asked for, because a compressed answer can be a bomb.
        Raises `httpx.LocalProtocolError` for what cannot be sent; the text shows nothing of it.
        """
        headers = "".join([f"{name}: {value}\r\n" for name, value in self.headers])
        has_length = self.content or self.method in WITH_CONTENT
        length = f"Content-Length: {len(self.content)}\r\n" if has_length else ""
        head = (
            f"{self.method} {target} HTTP/1.1\r\nHost: {self.target.host}\r\n{headers}{for_proxy}"
            f"Accept-Encoding: identity\r\n{length}\r\n"
        )
        lines = 4 + len(self.headers) + for_proxy.count("\n") + bool(length)
        if HEAD.fullmatch(head) is None or head.count("\n") != lines:  # a value may be a header itself
            raise httpx.LocalProtocolError("a method, a URL or a header of the request cannot be sent")
        try:
            return head.encode("latin-1") + self.content
        except UnicodeEncodeError:
            raise httpx.LocalProtocolError("a header of the request cannot be sent") from None
