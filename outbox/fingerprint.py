"""What identifies a request's content: equal requests have equal fingerprints, others do not. Pure."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from outbox.errors import NotSerializable

FINGERPRINT_VERSION = 1
"""Stored with each fingerprint; a change of the algorithm gets another number."""


def fingerprint(request: Any) -> bytes:
    """32 bytes. `bytes` count as they are; anything else is JSON, in its canonical form (RFC 8785)."""
    if isinstance(request, bytes | bytearray | memoryview):
        return hashlib.sha256(b"raw\0" + bytes(request)).digest()
    return hashlib.sha256(b"json\0" + canonical_json(request)).digest()


def canonical_json(value: Any) -> bytes:
    """RFC 8785: members sorted by UTF-16 code units, numbers as ECMAScript writes them, no white space.

    Integers are written in full, also beyond 2**53, where the RFC would round them and two amounts could look alike.
    """
    try:
        return _canonical(value).encode()
    except UnicodeEncodeError:
        raise NotSerializable("the request holds a lone surrogate, which UTF-8 cannot carry") from None
    except ValueError as error:
        if isinstance(error, NotSerializable):
            raise
        raise NotSerializable("the request holds an integer of more digits than Python writes") from None
    except RecursionError:
        raise NotSerializable("the request is nested too deeply, or holds itself") from None


def _canonical(value: Any) -> str:
    match value:
        case None | True | False | str():
            return json.dumps(value, ensure_ascii=False)
        case int():
            return str(int(value))
        case float():
            return _ecmascript_number(value)
        case Mapping():
            members = sorted((_member_name(name), item) for name, item in value.items())
            return "{" + ",".join(f"{name[1]}:{_canonical(item)}" for name, item in members) + "}"
        case Sequence():
            return "[" + ",".join(_canonical(item) for item in value) + "]"
    raise NotSerializable(f"a {type(value).__name__} in the request is no JSON value")


def _member_name(name: Any) -> tuple[bytes, str]:
    if not isinstance(name, str):
        raise NotSerializable(f"the member name {name!r} in the request is no str")
    return name.encode("utf-16-be", "surrogatepass"), json.dumps(name, ensure_ascii=False)


def _ecmascript_number(number: float) -> str:
    if not math.isfinite(number):
        raise NotSerializable(f"{number!r} in the request is no JSON number")
    if number == 0:
        return "0"
    sign = "-" if number < 0 else ""
    mantissa, _, exponent = f"{abs(number)!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = "" if fraction == "0" else fraction
    digits = (whole + fraction).lstrip("0")
    # The value is 0.digits times ten to the point: the form in which ECMA-262, Number::toString, tells its cases apart.
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
