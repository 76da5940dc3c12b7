"""Why nothing was sent: a closed vocabulary for reasons, so that an operator knows what to repair. Pure.

An exception's own text is never shown, because it may quote a URL, credentials or a request.
"""

import errno
import re
import socket
import ssl
import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final


class Cause(StrEnum):
    """What has prevented a send. The table in docs/http.md explains each."""

    HOST_NOT_FOUND = "dns: host not found"
    NO_DNS = "dns: no answer from the name server"
    REFUSED = "connect: refused"
    TIMED_OUT = "connect: timed out"
    UNREACHABLE = "connect: host or network unreachable"
    NO_FILES = "connect: too many open files"
    CLOSED = "connect: closed by the other side"
    NOT_CONNECTED = "connect: failed"
    UNKNOWN_AUTHORITY = "tls: unknown authority"
    OTHER_HOST = "tls: host name does not match"
    EXPIRED = "tls: certificate expired"
    NOT_YET_VALID = "tls: certificate not yet valid"
    CERTIFICATE = "tls: certificate not accepted"
    CLIENT_CERTIFICATE = "tls: client certificate refused"
    NO_HTTP_1 = "tls: the server chose another protocol than HTTP/1.1"
    NO_TLS = "tls: handshake failed"
    TLS_TIMED_OUT = "tls: handshake timed out"
    LOGIN_WANTED = "proxy: 407, it wants a login"
    NO_TUNNEL = "proxy: it opened no tunnel"
    NO_USABLE_PROXY = "proxy: the environment's cannot be used"
    UNSUPPORTED_URL = "url: neither http:// nor https://, or without a host"


VIA_PROXY: Final = "proxy: "
WORDS: Final = frozenset([*Cause, *(VIA_PROXY + each for each in Cause if not each.startswith(VIA_PROXY))])
"""Every reason: those of the connection to a proxy begin with `proxy: `."""

_CERTIFICATES: Final = {  # X509_V_ERR_...: docs.openssl.org, X509_STORE_CTX_get_error
    **dict.fromkeys((2, 18, 19, 20, 21), Cause.UNKNOWN_AUTHORITY),
    **dict.fromkeys((62, 64), Cause.OTHER_HOST),
    9: Cause.NOT_YET_VALID,
    10: Cause.EXPIRED,
}
_ERRNOS: Final = {
    errno.ECONNREFUSED: Cause.REFUSED,
    errno.ETIMEDOUT: Cause.TIMED_OUT,
    **dict.fromkeys((errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL), Cause.UNREACHABLE),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), Cause.NO_FILES),
    **dict.fromkeys((errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE), Cause.CLOSED),
}


def nothing_sent(error: BaseException) -> str:
    """The reason of a send of which no byte has left."""
    return f"nothing was sent: {words_of(error)}"


def words_of(error: BaseException) -> str:
    """The words for an exception: its own if it has been given them, else those of what caused it."""
    chain = list(_chain(error))
    if (given := next((str(each) for each in chain if str(each) in WORDS), None)) is not None:
        return given
    return next((cause for each in reversed(chain) if (cause := _cause_of(each)) is not None), Cause.NOT_CONNECTED)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and what it was raised from. Not the context, which may be the error of another send."""
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        yield error
        error = error.__cause__


def _cause_of(error: BaseException) -> Cause | None:
    match error:
        case socket.gaierror():
            return Cause.NO_DNS if error.errno == socket.EAI_AGAIN else Cause.HOST_NOT_FOUND
        case UnicodeError():  # a name that DNS cannot have
            return Cause.HOST_NOT_FOUND
        case ssl.SSLCertVerificationError():
            return _CERTIFICATES.get(error.verify_code, Cause.CERTIFICATE)
        case ssl.SSLError():
            return Cause.NO_TLS
        case TimeoutError():
            return Cause.TIMED_OUT
        case OSError():
            return _ERRNOS.get(_number_of(error)) or (Cause.CLOSED if isinstance(error, ConnectionError) else None)
        case _:
            return _cause_in_httpx(error)


def _cause_in_httpx(error: BaseException) -> Cause | None:
    """Mail and brokers do without httpx. Where it is not imported, there is no error of it."""
    httpx: Any = sys.modules.get("httpx")
    if httpx is None:
        return None
    if isinstance(error, httpx.UnsupportedProtocol):
        return Cause.UNSUPPORTED_URL
    if isinstance(error, httpx.ProxyError):
        return Cause.NO_TUNNEL
    return Cause.TIMED_OUT if isinstance(error, (httpx.ConnectTimeout, httpx.PoolTimeout)) else None


def _number_of(error: OSError) -> int:
    """asyncio joins the errors of a host's addresses into one text, which has their numbers."""
    joined = re.search(r"\[Errno (\d+)\]", str(error))
    return error.errno or (int(joined[1]) if joined else 0)
