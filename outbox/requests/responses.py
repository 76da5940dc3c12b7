"""The stored answer of a request: its columns, which may be encrypted. Pure."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

from outbox.configuration import Configuration
from outbox.encryption import StoredField, is_sealed_json, open_json, required, seal_json
from outbox.entries.payload import encode_json
from outbox.errors import InvalidValue, NotSerializable

HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
HEADER_VALUE = re.compile(r"(?:[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?)?")  # RFC 9110, section 5.5
WITHOUT_CONTENT = frozenset({204, 304})  # RFC 9110, section 6.4.1: some servers abort an answer that has a body


class Headers(Mapping[str, str]):
    """The headers of a response, found by their names in any case.

    lines: each name with its value. Several lines may have one name; the mapping joins their values (RFC 9110, section 5.2).
    """

    __slots__ = ("lines",)

    def __init__(self, given: Mapping[str, str] | Iterable[tuple[str, str]] = ()) -> None:
        if isinstance(given, Headers):
            given = given.lines
        pairs: Any = given.items() if isinstance(given, Mapping) else given
        self.lines: tuple[tuple[str, str], ...] = tuple(pairs)

    def __getitem__(self, name: str) -> str:
        values = [value for known, value in self.lines if known.lower() == name.lower()]
        if not values:
            raise KeyError(name)
        return ", ".join(values)

    def __iter__(self) -> Iterator[str]:
        names: dict[str, str] = {}
        for name, _ in self.lines:
            names.setdefault(name.lower(), name)
        return iter(names.values())

    def __len__(self) -> int:
        return len({name.lower() for name, _ in self.lines})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return _by_lower_name(self) == _by_lower_name(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Headers({list(self.lines)})"


def _by_lower_name(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@dataclass(frozen=True, slots=True, init=False)
class Response:
    """A response to a request: the status, the body's bytes and the headers.

    headers: a mapping, in which names are found in any case. `headers.lines` has each line, such as several of Set-Cookie.
    """

    status: int
    body: bytes
    headers: Headers

    def __init__(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] | Iterable[tuple[str, str]] = ()
    ) -> None:
        for name, value in (("status", status), ("body", body), ("headers", Headers(headers))):
            object.__setattr__(self, name, value)

    def json(self) -> Any:
        """The body parsed as JSON."""
        return json.loads(self.body)


def response_to_keep(status: int, body: Any, headers: Mapping[str, str] | None, *, max_bytes: int) -> Response:
    """The response for the arguments of `claim.respond`. Raises `InvalidValue` and `NotSerializable`."""
    if not isinstance(status, int) or isinstance(status, bool) or not 200 <= status <= 599:
        raise InvalidValue("status", status, "must be an int from 200 to 599")
    kept = dict(headers or {})
    for name, value in kept.items():
        _check_header(name, value)
    data, content_type = _body(body, max_bytes)
    if data and status in WITHOUT_CONTENT:
        raise InvalidValue("status", status, "has no body: leave the body out, or answer with 200")
    if content_type and not any(name.lower() == "content-type" for name in kept):
        kept["Content-Type"] = content_type
    return Response(status, data, kept)


def state_with(response: Response) -> Literal["succeeded", "failed"]:
    """The state of a record with this response."""
    return "succeeded" if response.status < 400 else "failed"


def columns_with(configuration: Configuration, id: UUID, response: Response) -> dict[str, Any]:
    """The columns of the record with this id, if it has this response."""
    body, headers = stored_answer(configuration, id, response)
    return {"state": state_with(response), "status": response.status, "body": body, "headers": headers}


def stored_answer(configuration: Configuration, id: UUID, response: Response) -> tuple[bytes, str]:
    """The body and the headers as the record stores them. An answer without both, as of an inbox, is not encrypted."""
    headers, encryption = json.dumps(dict(response.headers)), configuration.encrypting
    if encryption is None or not (response.body or response.headers):
        return response.body, headers
    env = configuration.env
    sealed = seal_json(encryption, headers.encode(), StoredField(env, id, "", "response_headers")).decode()
    return encryption.seal(response.body, StoredField(env, id, "", "response_body")).encode(), sealed


def answer_of(configuration: Configuration, id: UUID, status: int, body: bytes, headers: str) -> Response:
    """The response that a record stores. Raises `CannotDecrypt` and `KeyServiceFailed`.

    The headers show whether the body is encrypted: they are JSON's object otherwise, and a body may have any bytes.
    """
    if not is_sealed_json(headers):
        return Response(status, body, json.loads(headers))
    env, encryption = configuration.env, required(configuration.encryption)
    opened = open_json(encryption, headers.encode(), StoredField(env, id, "", "response_headers"))
    whole = encryption.open(bytes(body).decode(errors="replace"), StoredField(env, id, "", "response_body"))
    return Response(status, whole, json.loads(opened))


def _body(body: Any, max_bytes: int) -> tuple[bytes, str | None]:
    match body:
        case None:
            return b"", None
        case bytes():
            data, content_type = body, "application/octet-stream"
        case str():
            data, content_type = _utf8(body), "text/plain; charset=utf-8"
        case _:
            return encode_json("response body", body, max_bytes), "application/json"
    if len(data) > max_bytes:
        raise NotSerializable(f"the response body has {len(data)} bytes, the maximum is {max_bytes}")
    return data, content_type


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise NotSerializable("the response body contains a lone surrogate, which UTF-8 cannot encode") from None


def _check_header(name: object, value: object) -> None:
    if not isinstance(name, str) or not isinstance(value, str):
        raise InvalidValue(
            "header", name, f"name and value must be str, not {type(name).__name__}, {type(value).__name__}"
        )
    if name.lower() == "set-cookie":
        raise InvalidValue("header", name, "is never stored: a replay would send one client's cookie to another")
    if any(char in name + value for char in "\r\n\0"):
        raise InvalidValue("header", name, "contains a line break or NUL")
    if not HEADER_NAME.fullmatch(name):
        raise InvalidValue("header", name, "must be a header's name: letters, digits and hyphens")
    if not HEADER_VALUE.fullmatch(value):
        rule = "contains a character that a header must not have, or begins or ends with a blank: percent-encode it"
        raise InvalidValue("header", name, rule)
