"""The dashboard's protection in a browser: response headers, the check of a request's origin, and the CSRF token.

There is no session. The token is a random value in a cookie that must come back in the form or in a header: only a page of
this origin can read it from a form.
"""

import hmac
import ipaddress
import re
import secrets
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dispatchers.dashboard.failures import Failure
from outbox.errors import ConfigurationError

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


def path_of(scope: Scope) -> str:
    """The path below the prefix, which some servers leave in `path` and others do not."""
    path: str = scope["path"]
    prefix = scope.get("root_path", "").rstrip("/")
    return path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path


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


FORWARDED = ("forwarded", "via", "x-real-ip")


class LocalHostsOnly:
    """Protects a dashboard on loopback that has no sign-in. It refuses a request for a foreign host name, with which a web page
    would reach it by a name of its own, and a request that a proxy has passed on, which may come from anybody.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = _why_refused(Headers(scope=scope)) if scope["type"] == "http" else None
        if why is None:
            await self._app(scope, receive, send)
        else:
            status, text = why
            await PlainTextResponse(f"{text}\n", status)(scope, receive, with_headers(send))


def _why_refused(headers: Headers) -> tuple[int, str] | None:
    """The status and the text; None for a request of this machine."""
    passed_on = sorted(name for name in headers if name in FORWARDED or name.startswith("x-forwarded-"))
    if passed_on:
        return 403, (
            f"A proxy has passed this request on (it has the header {passed_on[0]}), and this dashboard has no sign-in:"
            " start `outbox web` with --users or --authenticate."
        )
    if not _is_local(headers.get("host", "")):
        return 421, "This address serves only requests for localhost."
    return None


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine. A loopback address does: no page of another host has one as its own address."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:  # another name, or `[::1`
        return False


def checked_origins(origins: Collection[str]) -> frozenset[str]:
    """The origins as a browser writes them. Raises `ConfigurationError` for what no browser sends as an origin."""
    if isinstance(origins, str):
        raise ConfigurationError(f"trusted_origins={origins!r}: give a list of origins, such as [{origins!r}]")
    return frozenset(map(_checked_origin, origins))


def _checked_origin(origin: str) -> str:
    if not re.fullmatch(r"https?://[^/?#@\s]+", origin, re.IGNORECASE):
        raise ConfigurationError(
            f"the trusted origin {origin!r} must be a scheme and a host, such as https://ops.example.com, without a path"
        )
    scheme, _, host = origin.lower().partition("://")
    return f"{scheme}://{host.removesuffix(':443' if scheme == 'https' else ':80')}"


def require_same_origin(request: Request, trusted: Collection[str]) -> None:
    """Refuse a request that a page of another origin has caused. trusted: origins such as `https://ops.example.com`, for a proxy
    that changes the Host header.

    Only the host is compared, not the scheme: a proxy that ends TLS passes plain HTTP on. The browser compares the scheme too,
    in `Sec-Fetch-Site`, which it sends over TLS.
    """
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
    host = request.headers.get("host", "")
    if origin in trusted or (site in ("same-origin", "none") and _is_own(origin, host)):
        return
    named = "" if origin is None else f", {origin!r},"
    text = f"a page of another origin{named} sent this request for the host {host!r}: open the dashboard itself"
    if origin not in (None, "null") and site in ("same-origin", "none"):
        text += (
            f". If {origin!r} is this dashboard, a proxy changes the Host header: name the origin with `outbox web"
            " --trusted-origin`, or in an app with trusted_origins="
        )
    raise Failure(403, "cross_origin", text)


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
