"""Writes a request so that no value of a header can begin another header or another request."""

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import httpx

from outbox.errors import ConfigurationError

PORTS: Final = {"http": 80, "https": 443}
OURS: Final = frozenset({"accept-encoding", "content-length", "host", "transfer-encoding"})
WITH_CONTENT: Final = frozenset(
    {"POST", "PUT", "PATCH"}
)  # these send Content-Length: 0 if they have no content: RFC 9110, 8.6
WITHOUT_ANSWERED_BODY: Final = frozenset({"HEAD", "CONNECT"})
HEAD: Final = re.compile(
    r"[!#$%&'*+.^_`|~0-9A-Za-z-]+ [\x21-\x7e]+ HTTP/1\.1\r\n"
    r"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: (?:[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?\r\n)*"
)
"""A valid request line with headers. Source: RFC 9110, 5.5 and 5.6.2; RFC 9112, 3."""


class Origin(NamedTuple):
    """The server of a connection. host: in ASCII, without the brackets of an IPv6 address."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority.removesuffix(f':{PORTS[self.scheme]}')}"

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Target(NamedTuple):
    """The target of a request. host: for the header Host. path: with the query, percent-encoded."""

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


def origin_of(url: str) -> Origin:
    """Raises `ConfigurationError`, which does not show the URL."""
    try:
        return Target.of(httpx.URL(url)).origin
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigurationError("the service's URL is malformed (it is not shown)") from error


class Echo(NamedTuple):
    """The key's header in an answer. is_sure: the service certainly repeats it in each success."""

    header: str
    key: str
    is_sure: bool = False


class Outgoing(NamedTuple):
    """A request to be sent. headers: without those of HTTP itself, which `written` adds.

    is_last: the request asks the server to close the connection. echo: for a service that may repeat the request's key in its
    answer.
    """

    method: str
    target: Target
    headers: Sequence[tuple[str, str]]
    content: bytes = b""
    is_last: bool = False
    echo: Echo | None = None

    @classmethod
    async def of(cls, request: httpx.Request) -> "Outgoing":
        """Raises `httpx.UnsupportedProtocol`."""
        content = await request.aread()
        target = Target.of(request.url)._replace(host=request.headers["Host"])
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw]
        is_last = "close" in request.headers.get("Connection", "").lower()
        return cls(request.method, target, [each for each in headers if each[0].lower() not in OURS], content, is_last)

    def for_httpx(self) -> httpx.Request:
        headers = [("Host", self.target.host), *self.headers, ("Accept-Encoding", "identity")]
        return httpx.Request(self.method, self.target.url, headers=headers, content=self.content or None)

    def written(self, target: str, for_proxy: Iterable[tuple[str, str]]) -> bytes:
        """The bytes of the request. target: for the request line. for_proxy: additional headers.

        The request asks for no compression, because a compressed answer can be a bomb.
        Raises `httpx.LocalProtocolError` for a request that cannot be sent; its text shows nothing of the request.
        """
        headers = [("Host", self.target.host), *self.headers, *for_proxy, ("Accept-Encoding", "identity")]
        if self.content or self.method in WITH_CONTENT:
            headers.append(("Content-Length", str(len(self.content))))
        return head_of(self.method, target, headers) + self.content


def head_of(method: str, target: str, headers: Sequence[tuple[str, str]]) -> bytes:
    """A request's head with exactly these headers. Raises `httpx.LocalProtocolError`, whose text shows none of them."""
    lines = f"{method} {target} HTTP/1.1\r\n" + "".join([f"{name}: {value}\r\n" for name, value in headers])
    # Every line is a header, and there are as many lines as headers, so no header contains another one.
    if HEAD.fullmatch(lines) is None or lines.count("\n") != len(headers) + 1:
        raise httpx.LocalProtocolError("a method, a URL or a header of the request cannot be sent")
    return f"{lines}\r\n".encode("latin-1")
