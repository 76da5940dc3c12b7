"""Makes the request of an entry's payload, and checks its target. Pure: all attempts are equal, except for the trace."""

import base64
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import httpx

from dispatchers.adapters.http_client.request_writer import Echo, Origin, Outgoing, Target
from dispatchers.adapters.http_client.transport import HEADER_VALUE
from outbox.errors import ConfigurationError
from outbox.trace_headers import NAMES

METHODS: Final = ("POST", "PUT", "PATCH", "DELETE")
FIELDS: Final = ("method", "url", "headers", "json", "text", "base64", "content_type")
URL_TEXT: Final = re.compile(r"(?:[A-Za-z0-9\-._~:/?\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})*")  # RFC 3986, without fragments
HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
FRAMING: Final = ("host", "content-length", "transfer-encoding", "connection", "keep-alive", "te", "trailer", "upgrade")
OURS: Final = frozenset((*FRAMING, "expect", "accept-encoding", "content-type"))
"""Headers that are made for each request, or that would change how it is sent."""
TARGETS_REMEMBERED: Final = 256
AGENT: Final = {"user-agent": ("User-Agent", "sqlalchemy-outbox")}
MAX_DECODINGS: Final = 5  # no correct path is percent-encoded more often
OVERLONG: Final = re.compile(r"%(c0%(ae|af|dc)|c1%9c|e0%80%a[ef])", re.I)  # of `.`, `/` and a backslash: RFC 3629, 10
CREDENTIALS: Final = frozenset({"authorization", "proxy-authorization", "cookie"})


Header: TypeAlias = tuple[str, str]


class Malformed(Exception):
    """No request can be made of this payload. The text has the field's name, never its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The allowed targets of requests, and the headers of each request.

    base_url: the beginning of every URL, without a slash at its end; empty if the payloads' URLs are absolute. It may be a
        secret, as with webhooks.
    by_name: the `headers`, by their names in lower case. taken: the headers that no entry may set, in lower case.
    """

    base_url: str = field(repr=False)
    origins: frozenset[Origin]
    by_name: Mapping[str, Header] = field(repr=False)
    key_header: str | None
    taken: frozenset[str]

    @classmethod
    def configured(
        cls, *, base_url: str | None, origins: Iterable[str], headers: Mapping[str, str], key_header: str | None
    ) -> "Service":
        """Raises `ConfigurationError` for settings with which no request could be made."""
        if key_header is not None:
            check_header("key_header", key_header, "key", OURS | CREDENTIALS, ConfigurationError)
        taken = OURS if key_header is None else OURS | {key_header.lower()}
        for name, value in headers.items():
            check_header("headers", name, value, taken, ConfigurationError)
        listed = tuple(origins)
        if bool(listed) == (base_url is not None):
            raise ConfigurationError(
                "HttpAdapter needs either base_url='https://...' or origins=['https://...'], and not both. With base_url, the"
                " urls of payloads are paths below it. With origins, they are absolute urls to one of these origins"
            )
        allowed = map(_origin, listed) if base_url is None else [_base(base_url)]
        return cls(
            origins=frozenset(allowed),
            base_url=(base_url or "").rstrip("/"),
            by_name=_by_name(headers),
            key_header=key_header,
            taken=taken | CREDENTIALS | frozenset(name.lower() for name in headers),
        )

    def request(self, payload: Any, *, key: str, passed_on: Mapping[str, str]) -> Outgoing:
        """The request of a payload. passed_on: the delivery's headers; all others have precedence.

        Raises `Malformed`.
        """
        fields = _fields(payload)
        content, content_type = _body(fields)
        own = self._own_headers(fields)
        key_header = None if self.key_header is None else (self.key_header, key)
        return self.made(
            _method(fields), fields.get("url", ""), content, content_type, own=own, key=key_header, passed_on=passed_on
        )

    def made(
        self,
        method: str,
        url: object,
        content: bytes,
        content_type: str | None,
        *,
        own: Mapping[str, str],
        key: Header | None,
        passed_on: Mapping[str, str],
    ) -> Outgoing:
        """The request of checked parts. own: the headers of this request alone. key: its header for the key, if it has one.

        Raises `Malformed` for the URL.
        """
        may_pass = self._may_pass(passed_on, own)
        headers = {**AGENT, **_by_name(may_pass), **_by_name(own), **self.by_name}
        if content_type is not None:
            headers["content-type"] = ("Content-Type", content_type)
        if key is not None:
            headers[key[0].lower()] = key
        echo = None if key is None else Echo(*key)
        return Outgoing(method, self._target(url), list(headers.values()), content, echo=echo)

    def reading(self, url: str, *, own: Mapping[str, str] | None = None, passed_on: Mapping[str, str]) -> Outgoing:
        """A GET of a URL below base_url, or at one of the origins, with the credentials and without a key.

        own: the headers of this request alone. Raises `Malformed`.
        """
        may_pass = self._may_pass(passed_on, own or {})
        headers = {**AGENT, **_by_name(may_pass), **_by_name(own or {}), **self.by_name}
        return Outgoing("GET", self._target(url, "the url of a status lookup"), list(headers.values()))

    @property
    def place(self) -> str:
        """The identity of the remote service, without parts that may be secret."""
        return f"{' '.join(sorted(map(str, self.origins)))} key in {self.key_header or 'no header'}"

    def _may_pass(self, headers: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
        """The headers of a delivery that can be sent. own: the payload's; they replace the whole trace or none of it."""
        if not headers:
            return {}
        has_trace = any(name.lower() in NAMES for name in (*own, *self.by_name))
        taken = self.taken.union(NAMES) if has_trace else self.taken
        return {name: value for name, value in headers.items() if _is_sendable(name, value, taken)}

    def _own_headers(self, fields: Mapping[str, Any]) -> dict[str, str]:
        headers = fields.get("headers", {})
        if not isinstance(headers, dict):
            raise Malformed("payload field 'headers' must be an object of names and texts")
        for name, value in headers.items():
            check_header("payload field 'headers'", name, value, self.taken, Malformed)
        return headers

    def _target(self, text: object, named: str = "payload field 'url'") -> Target:
        if not isinstance(text, str) or not URL_TEXT.fullmatch(text):
            raise Malformed(f"{named} must be text, percent-encoded, without a fragment")
        if self.base_url and text[:1] not in {"", "/", "?"}:
            raise Malformed(f"{named} must be a path below the adapter's base_url, such as '/contacts/7'")
        return _target(self.base_url, text, self.origins, named)


def _by_name(headers: Mapping[str, str]) -> dict[str, Header]:
    """The headers by their names in lower case, so that one replaces another of its name."""
    return {name.lower(): (name, value) for name, value in headers.items()}


def _is_sendable(name: object, value: object, taken: frozenset[str]) -> bool:
    try:
        check_header("headers", name, value, taken, Malformed)
    except Malformed:
        return False
    return True


@lru_cache(maxsize=TARGETS_REMEMBERED)
def _target(base_url: str, text: str, origins: frozenset[Origin], named: str) -> Target:
    """Cached, because parsing a URL takes longer than sending it."""
    if leads_upwards(text.partition("?")[0]):
        raise Malformed(f"{named} must not contain '.' or '..' between its slashes, in any encoding")
    try:
        target = Target.of(httpx.URL(base_url + text))
    except httpx.InvalidURL:
        raise Malformed(f"{named} is not a URL") from None
    except httpx.UnsupportedProtocol:
        target = None
    if target is None or target.url.userinfo or target.origin not in origins:
        raise Malformed(f"{named} must lead to {' or '.join(sorted(map(str, origins)))}")
    return target


def check_header(where: str, name: object, value: object, taken: frozenset[str], error: type[Exception]) -> None:
    """Raise `error` for a header that cannot be sent, or that may not be set here. Values are never shown."""
    if not isinstance(name, str) or not HEADER_NAME.fullmatch(name):
        raise error(f"{where}: a header's name must consist of letters, digits and -, without spaces")
    if name.lower() in taken:
        raise error(f"{where} must not set {name!r}: only the adapter sets this header")
    if not isinstance(value, str) or not HEADER_VALUE.fullmatch(value):
        raise error(f"{where}: the value of {name!r} must be printable ASCII, and must not begin or end with a space")


# --- the allowed targets


def leads_upwards(path: str) -> bool:
    """Whether a server may read a segment of the path as `.` or `..`.

    Some servers decode several times. Tomcat, and servers built on it, remove the text after a `;` in a segment before they
    search for dots. Others read a backslash as a slash, or bytes that are invalid in UTF-8 as a dot.
    """
    for _ in range(MAX_DECODINGS):
        segments = re.split(r"[/\\]", path)
        if any(segment.partition(";")[0].strip() in {".", ".."} for segment in segments) or OVERLONG.search(path):
            return True
        decoded = unquote(path)
        if decoded == path:
            return False
        path = decoded
    return True


def _origin(text: str) -> Origin:
    url = _checked_url("origins", text)
    if url.path != "/" or url.query:
        raise ConfigurationError(
            "origins: each is a scheme and a host, such as 'https://crm.example.com', without a path"
        )
    return Target.of(url).origin


def _base(text: str) -> Origin:
    url = _checked_url("base_url", text)
    if "?" in text or leads_upwards(text.partition("://")[2]):
        raise ConfigurationError("base_url must have no query, and no '.' or '..' between its slashes")
    return Target.of(url).origin


def _checked_url(name: str, text: str) -> httpx.URL:
    """`text` as a URL. No error shows it: webhooks' URLs are secrets, and others contain passwords by mistake."""
    if not isinstance(text, str) or not URL_TEXT.fullmatch(text) or not _leads_somewhere(text):
        raise ConfigurationError(f"{name} must be http:// or https:// and a host, percent-encoded (it is not shown)")
    url = httpx.URL(text)
    if url.userinfo:
        raise ConfigurationError(f"{name} must hold no credentials: give them as headers={{'Authorization': ...}}")
    return url


def _leads_somewhere(text: str) -> bool:
    try:
        url = httpx.URL(text)
        return url.scheme in {"http", "https"} and url.host.encode("idna") != b"" and 0 < (url.port or 1) < 65536
    except (httpx.InvalidURL, UnicodeError):
        return False


# --- the body


def _fields(payload: Any) -> dict[str, Any]:
    if not isinstance(payload, dict):
        raise Malformed("an HTTP payload must be an object such as {'url': '/contacts', 'json': {...}}")
    if unknown := payload.keys() - set(FIELDS):
        named = sorted(name for name in unknown if re.fullmatch(r"\w{1,40}", name))
        raise Malformed(
            f"an HTTP payload has the fields {', '.join(FIELDS)}; unknown: {', '.join(named) or '(not shown)'}"
        )
    return payload


def _method(fields: Mapping[str, Any]) -> str:
    method = fields.get("method", "POST")
    if method not in METHODS:
        raise Malformed(f"payload field 'method' must be one of {', '.join(METHODS)}: an outbox is for effects")
    return str(method)


# `json.dumps` with arguments makes an encoder at each call.
JSON: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _json(value: Any) -> bytes:
    return JSON.encode(value).encode()


def _base64(value: str) -> bytes:
    return base64.b64decode(value.encode("ascii").translate(None, b" \t\r\n"), validate=True)  # RFC 2045, 6.8


BODIES: Final[Mapping[str, tuple[Callable[[Any], bytes], str, str]]] = {
    "json": (_json, "application/json", "JSON that UTF-8 can encode"),
    "text": (str.encode, "text/plain; charset=utf-8", "text that UTF-8 can encode"),
    "base64": (
        _base64,
        "application/octet-stream",
        "text in the standard base64 alphabet, with padding, perhaps in lines",
    ),
}


def _body(fields: Mapping[str, Any]) -> tuple[bytes, str | None]:
    """The body's bytes and their content type; None without a body."""
    given = [name for name in BODIES if name in fields]
    if len(given) > 1:
        raise Malformed(f"payload fields {' and '.join(map(repr, given))} exclude each other: a request has one body")
    content_type = fields.get("content_type")
    if "content_type" in fields and not (
        given and isinstance(content_type, str) and HEADER_VALUE.fullmatch(content_type)
    ):
        raise Malformed("payload field 'content_type' must be printable ASCII, and needs a body")
    if not given:
        return b"", None
    encode, usual_type, wanted = BODIES[given[0]]
    try:
        return encode(fields[given[0]]), content_type or usual_type
    except (AttributeError, TypeError, ValueError, RecursionError):
        raise Malformed(f"payload field {given[0]!r} must be {wanted}") from None
