"""Fingerprints of requests: equal requests have equal fingerprints, different requests have different ones. Pure."""

import hashlib
import hmac
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

from outbox.errors import InvalidValue, NotSerializable, RequestError

FINGERPRINT_VERSION = 1
"""Stored with each fingerprint; a change of the algorithm gets another number.

Two of different versions, older or newer, are not compared, and the stored answer is replayed: during a roll-out or a roll-back
a refusal would make honest clients take a new key and repeat the effect.
"""

KEYED_VERSION = 2
"""The version of a fingerprint that is keyed by a secret, as it is stored with encryption: `keyed_fingerprint`."""

Path: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must be equal in two requests with one key, for `content=`. Use `Fingerprint.raw` or `Fingerprint.json` to make one.

    method, route, content_type: further properties that distinguish requests. The route is the template
        (`/orders/{id}/refunds`), so a new host or query does not change it.
    digest: 32 bytes.
    """

    digest: bytes

    @classmethod
    def raw(cls, body: bytes, *, method: str = "", route: str = "", content_type: str = "") -> "Fingerprint":
        """The fingerprint of the body's bytes. Every byte counts."""
        if not isinstance(body, bytes | bytearray | memoryview):
            raise NotSerializable(
                f"Fingerprint.raw takes bytes, not {type(body).__name__}: use Fingerprint.json for JSON"
            )
        return cls(_digest("raw", bytes(body), (method, route, content_type)))

    @classmethod
    def json(
        cls, body: Any, *, leave_out: Iterable[str] = (), method: str = "", route: str = "", content_type: str = ""
    ) -> "Fingerprint":
        """The fingerprint of JSON in its canonical form (RFC 8785), for clients that write the same request in different bytes.

        body: `bytes` are parsed strictly; anything else is a parsed value.
        leave_out: JSON Pointers (RFC 6901) to what differs between retries: `/sent_at`, `/trace/id`, `/items/0/at`. Every
            other member counts, also one that the app does not know yet.
        Raises for a body that is not JSON, has a member twice, or contains NaN or an infinity: `RequestError` (400) if the
        body is `bytes`, which come from the client, else `NotSerializable`. Raises `InvalidValue` for a malformed pointer.

        A body of 1 MiB takes up to half a second. With an event loop, call this on a thread.
        """
        paths = frozenset(_path(pointer) for pointer in _listed(leave_out))
        endpoint = (method, route, content_type)
        if not isinstance(body, bytes | bytearray | memoryview):
            return cls(_digest("json", canonical_json(_without(body, paths)), endpoint))
        try:
            return cls(_digest("json", canonical_json(_without(_parsed(bytes(body)), paths)), endpoint))
        except NotSerializable as error:
            raise RequestError(str(error)) from None


def keyed_fingerprint(secret: bytes, kid: str, id: bytes, digest: bytes) -> bytes:
    """32 bytes: 4 that name the secret, and a MAC under it. Equal requests of two records have different ones, and who reads them
    can neither compare nor guess.

    id: the record's. digest: the request's fingerprint.
    """
    name = hashlib.sha256(b"obx/fingerprint-kid/v1\0" + kid.encode()).digest()[:4]
    return name + hmac.digest(secret, b"obx/fingerprint/v2\0" + id + digest, "sha256")[:28]


def fingerprint(content: Any) -> bytes:
    """32 bytes. `bytes` count as they are, a `Fingerprint` is one; anything else is JSON, in its canonical form (RFC 8785)."""
    match content:
        case Fingerprint():
            return content.digest
        case bytes() | bytearray() | memoryview():
            return Fingerprint.raw(bytes(content)).digest
    return _digest("json", canonical_json(content), ("", "", ""))


def _digest(form: str, content: bytes, endpoint: tuple[str, str, str]) -> bytes:
    if not any(endpoint):
        return hashlib.sha256(form.encode() + b"\0" + content).digest()
    # JSON holds no NUL byte: where the list ends is never in doubt.
    return hashlib.sha256(b"http\0" + canonical_json([form, *endpoint]) + b"\0" + content).digest()


# --- parsing


def _parsed(body: bytes) -> Any:
    """The JSON in `body`. Raises for everything that two parsers might read differently."""
    try:
        return json.loads(
            body.decode(), object_pairs_hook=_members, parse_constant=_refuse_constant, parse_float=_fraction
        )
    except UnicodeDecodeError:
        raise NotSerializable("the request is not JSON: its bytes are not UTF-8") from None
    except json.JSONDecodeError as error:
        raise NotSerializable(f"the request is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise NotSerializable("the request is nested too deeply, or contains itself") from None
    except InvalidOperation:
        raise NotSerializable("the request contains a number whose exponent is too large") from None
    except ValueError as error:
        if isinstance(error, NotSerializable):
            raise
        raise NotSerializable("the request contains an integer with more digits than Python reads") from None


def _fraction(text: str) -> float | Decimal:
    """A float where that says all of the number, as it does of 15 digits: a Decimal of each takes ten times as long."""
    near = float(text)
    return near if len(text) <= 16 and 1e-300 < abs(near) < 1e300 else Decimal(text)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise NotSerializable(
            "the request has a duplicate member name: parsers disagree about which one counts, so it is refused"
        )
    return members


def _refuse_constant(name: str) -> Any:
    raise NotSerializable(f"{name} in the request is not a JSON number")


# --- leaving out


def _listed(pointers: Iterable[str]) -> Iterable[str]:
    if isinstance(pointers, str):
        raise InvalidValue("leave_out", pointers, "must be a list of JSON Pointers, not one str")
    return pointers


def _path(pointer: object) -> Path:
    """The names along a JSON Pointer. Source: RFC 6901, sections 3 and 4."""
    if not isinstance(pointer, str) or not pointer.startswith("/"):
        raise InvalidValue("leave_out", pointer, "must be a JSON Pointer (RFC 6901), e.g. '/sent_at' or '/trace/id'")
    if "~" in pointer.replace("~0", "").replace("~1", ""):
        raise InvalidValue("leave_out", pointer, "has a '~' that is not '~0' (for '~') or '~1' (for '/')")
    return tuple(name.replace("~1", "/").replace("~0", "~") for name in pointer[1:].split("/"))


def _without(value: Any, paths: frozenset[Path]) -> Any:
    """A copy of `value` without the members at `paths`; a path to nothing is ignored."""
    if not paths:
        return value
    match value:
        case str() | bytes() | bytearray() | memoryview() | array():
            return value
        case Mapping():
            return {name: _without(item, _below(paths, name)) for name, item in _items(value) if (name,) not in paths}
        case Sequence():
            return [_without(item, _below(paths, place)) for place, item in _numbered(value) if (place,) not in paths]
    return value


def _below(paths: frozenset[Path], name: str) -> frozenset[Path]:
    return frozenset(path[1:] for path in paths if len(path) > 1 and path[0] == name)


def _numbered(items: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    return ((str(place), item) for place, item in enumerate(items))


# --- the canonical form


def canonical_json(value: Any) -> bytes:
    """RFC 8785: members sorted by UTF-16 code units, numbers as ECMAScript writes them, no white space.

    Integers are written in full, also beyond 2**53, where the RFC would round them and two amounts could be equal; so are
    decimals that no float represents exactly.
    """
    try:
        return _canonical(value).encode()
    except UnicodeEncodeError:
        raise NotSerializable("the request contains a lone surrogate, which UTF-8 cannot encode") from None
    except ValueError as error:
        if isinstance(error, NotSerializable):
            raise
        raise NotSerializable("the request contains an integer with more digits than Python writes") from None
    except RecursionError:
        raise NotSerializable("the request is nested too deeply, or contains itself") from None


_text = json.JSONEncoder(ensure_ascii=False).encode


def _canonical(value: Any) -> str:
    kind = type(value)
    if kind is str:  # what most values are comes first: a request is canonicalised while its client waits
        return _text(value)
    if kind is int:
        return str(value)
    if kind is float:
        return _ecmascript_number(value)
    if kind is dict:
        return _object(value.items())
    if kind is list:
        return "[" + ",".join(map(_canonical, value)) + "]"
    return _canonical_of_another_type(value)


def _canonical_of_another_type(value: Any) -> str:
    match value:
        case None | True | False | str():
            return _text(value)
        case int():
            return str(int(value))
        case float():
            return _ecmascript_number(value)
        case Decimal():
            return _decimal(value)
        case bytes() | bytearray() | memoryview() | array():  # sequences of numbers, which no app means by them
            pass
        case Mapping():
            return _object(_items(value))
        case Sequence():
            return "[" + ",".join(map(_canonical, value)) + "]"
    raise NotSerializable(f"a {type(value).__name__} in the request is not a JSON value")


def _object(items: Iterable[tuple[Any, Any]]) -> str:
    members = sorted((_member_name(name), item) for name, item in items)
    return "{" + ",".join([f"{name[1]}:{_canonical(item)}" for name, item in members]) + "}"


def _items(mapping: Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """The members, with every value of a name. A form or a query may have several, and its `items` has only one of them."""
    every: Any = next((found for name in _EVERY_VALUE if (found := getattr(mapping, name, None))), None)
    return mapping.items() if every is None else ((name, list(every(name))) for name in set(mapping))


_EVERY_VALUE = ("getlist", "getall")  # Werkzeug, Django, Starlette; multidict, webob


def _member_name(name: Any) -> tuple[bytes, str]:
    if not isinstance(name, str):
        raise NotSerializable(f"the member name {name!r} in the request is not a str")
    return name.encode("utf-16-be", "surrogatepass"), _text(name)


def _decimal(number: Decimal) -> str:
    """The number as the equal float, if there is one, else in full: so two amounts that round to one float stay different."""
    if not number.is_finite():
        raise NotSerializable(f"{number} in the request is not a JSON number")
    near = float(number)
    if math.isfinite(near) and Decimal(repr(near)) == number:
        return _ecmascript_number(near)
    sign, digits, exponent = number.as_tuple()
    text = "".join(map(str, digits)).lstrip("0")
    shortest = text.rstrip("0")
    return f"{'-' if sign else ''}{shortest}e{int(exponent) + len(text) - len(shortest)}"


def _ecmascript_number(number: float) -> str:
    if not math.isfinite(number):
        raise NotSerializable(f"{number!r} in the request is not a JSON number")
    if number == 0:
        return "0"
    text = float.__repr__(number)
    if "e" not in text:  # between 1e-4 and 1e16 both write the same digits
        return text.removesuffix(".0")
    sign = "-" if number < 0 else ""
    mantissa, _, exponent = f"{abs(number)!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = "" if fraction == "0" else fraction
    digits = (whole + fraction).lstrip("0")
    # The value is 0.digits times ten to the point: the form in which ECMA-262, Number::toString, distinguishes its cases.
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    if len(digits) <= point <= 21:
        return sign + digits + "0" * (point - len(digits))
    if 0 < point <= 21:
        return sign + digits[:point] + "." + digits[point:]
    if -6 < point <= 0:
        return sign + "0." + "0" * -point + digits
    scale = f"e{point - 1:+d}"
    return sign + digits[0] + ("." + digits[1:] if len(digits) > 1 else "") + scale
