"""The bytes of a request in HTTP/1.1, checked: nothing in a header begins another header, or another request."""

import re
from typing import Final

import httpx

OURS: Final = frozenset({b"accept-encoding", b"content-length", b"transfer-encoding"})
WITH_CONTENT: Final = frozenset({"POST", "PUT", "PATCH"})  # they say so where they have none: RFC 9110, 8.6
HEAD: Final = re.compile(
    rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ [\x21-\x7e]+ HTTP/1\.1\r\n"
    rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: [^\x00\x0a-\x0d]*\r\n)+\r\n"
)
"""Source: RFC 9112, 3 and 5."""


async def bytes_of(request: httpx.Request, target: bytes, for_proxy: bytes) -> bytes:
    """The request; no compression is asked for, because a compressed answer can be a bomb.

    target: as the request names it. for_proxy: lines of headers beside the request's own.

    Raises `httpx.LocalProtocolError` for what cannot be sent; the text shows nothing of it.
    """
    try:
        content = request.content
    except httpx.RequestNotRead:  # whoever made the request gave its body as a stream
        content = await request.aread()
    lines = [b"%b: %b\r\n" % (name, value) for name, value in request.headers.raw if name.lower() not in OURS]
    length = b"Content-Length: %d\r\n" % len(content) if content or request.method in WITH_CONTENT else b""
    method = request.method.encode("ascii", "replace")
    head = b"%b %b HTTP/1.1\r\n%b%bAccept-Encoding: identity\r\n%b\r\n" % (
        method,
        target,
        b"".join(lines),
        length,
        for_proxy,
    )
    if HEAD.fullmatch(head) is None:
        raise httpx.LocalProtocolError("a method, a URL or a header of the request cannot be sent", request=request)
    return head + content
