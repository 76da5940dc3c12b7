"""The bytes of a request in HTTP/1.1, checked: nothing in a header begins another header, or another request."""

import re
from typing import Final

import httpx

HEAD: Final = re.compile(
    rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ [\x21-\x7e]+ HTTP/1\.1\r\n"
    rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: [^\x00\x0a-\x0d]*\r\n)+\r\n"
)
"""Source: RFC 9112, 3 and 5."""


async def bytes_of(request: httpx.Request, target: bytes, for_proxy: bytes) -> bytes:
    """target: as the request names it. for_proxy: lines of headers that go before the request's own.

    Raises `httpx.LocalProtocolError` for what cannot be sent; the text shows nothing of it.
    """
    try:
        content = request.content
    except httpx.RequestNotRead:  # whoever made the request gave its body as a stream
        content = await request.aread()
    if "Transfer-Encoding" in request.headers:
        del request.headers["Transfer-Encoding"]
        request.headers["Content-Length"] = str(len(content))
    method = request.method.encode("ascii", "replace")
    headers = [b"%b: %b\r\n" % header for header in request.headers.raw]
    head = b"%b %b HTTP/1.1\r\n%b%b\r\n" % (method, target, for_proxy, b"".join(headers))
    if HEAD.fullmatch(head) is None:
        raise httpx.LocalProtocolError("a method, a URL or a header of the request cannot be sent", request=request)
    return head + content
