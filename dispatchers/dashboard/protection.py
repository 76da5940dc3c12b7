"""What protects the dashboard in a browser: response headers, the check of a request's origin, and the CSRF token.

There is no session. The token is a random value in a cookie that must come back in the form or in a header: only a page of
this origin can read it from a form.
"""

import hmac
import ipaddress
import secrets
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from dispatchers.dashboard.failures import Failure

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
COOKIE = "outbox_csrf"
HEADER = "X-CSRF-Token"
FIELD = "csrf_token"
TOKEN_CHARS = 43  # 32 bytes in base64url

POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect", "font")),
        "img-src 'self' data:",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with `no-referrer` a browser sends `Origin: null` with a form
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


def with_headers(send: Send) -> Send:
    """`send`, adding the protecting headers to each response. What may differ between users is not stored by any cache."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return sending


def for_script(request: Request, answer: Response) -> Response:
    """A redirect of the host, as htmx follows it with the whole page: a browser hides redirects from scripts, and the login
    would be shown inside the page.
    """
    location = answer.headers.get("location")
    if location is None or request.headers.get("hx-request") != "true":
        return answer
    leading = Response(status_code=401, headers={"HX-Redirect": location}, background=answer.background)
    leading.raw_headers += [header for header in answer.raw_headers if header[0] == b"set-cookie"]
    return leading


class LocalHostsOnly:
    """Refuses a request for a foreign host name: a web page must not reach a dashboard on loopback by a name of its own."""

    def __init__(self, app: object) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_local(Headers(scope=scope).get("host", "")):
            await self._app(scope, receive, send)  # type: ignore[operator]
        else:
            refused = Response("This address serves only requests for localhost.\n", 421, media_type="text/plain")
            await refused(scope, receive, with_headers(send))


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine. A loopback address does: no page of another host has one as its own address."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:  # another name, or `[::1`
        return False


def require_same_origin(request: Request, trusted: Collection[str]) -> None:
    """Refuse a request that a page of another origin has caused. trusted: origins such as `https://ops.example.com`, for a proxy
    that changes the Host header.

    Only the host is compared, not the scheme: a proxy that ends TLS passes plain HTTP on. The browser compares the scheme too,
    in `Sec-Fetch-Site`, which it sends over TLS.
    """
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
    if origin in trusted or (site in ("same-origin", "none") and _is_own(origin, request.headers.get("host", ""))):
        return
    named = "" if origin is None else f", {origin!r},"
    raise Failure(403, "cross_origin", f"a page of another origin{named} sent this request: open the dashboard itself")


def _is_own(origin: str | None, host: str) -> bool:
    if origin is None:
        return True
    try:
        return bool(host) and urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # `http://[`
        return False


def is_without_cookies(request: Request) -> bool:
    """Whether the request authenticates by a header that no browser adds by itself; then it needs no CSRF token."""
    return request.headers.get("authorization", "").lower().startswith("bearer ")


def token_of(request: Request) -> str:
    """The CSRF token of the browser, or a new one for it."""
    token = request.cookies.get(COOKIE, "")
    return token if len(token) == TOKEN_CHARS and token.isascii() else secrets.token_urlsafe(32)


def keep_token(request: Request, response: Response, token: str) -> None:
    """Store the token in the browser, unless it is there."""
    if request.cookies.get(COOKIE) != token:
        response.set_cookie(
            COOKIE,
            token,
            path=request.scope.get("root_path") or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )


def require_token(request: Request, given: str | None) -> None:
    """Refuse a request whose form or header does not repeat the cookie."""
    expected = request.cookies.get(COOKIE, "")
    if len(expected) != TOKEN_CHARS or not hmac.compare_digest(expected.encode(), (given or "").encode()):
        raise Failure(
            403,
            "csrf",
            f"the form is too old or was not made by this dashboard: reload the page (a program sends the cookie {COOKIE!r}"
            f" and the header {HEADER!r}, or `Authorization: Bearer`)",
        )
