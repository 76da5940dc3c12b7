"""Values that are stored as JSON: payloads, options, response bodies. Pure."""

import json
from typing import Any

from outbox.errors import NotSerializable


def encode_json(name: str, value: Any, max_bytes: int) -> bytes:
    """JSON in UTF-8, members in the caller's order. Raises `NotSerializable`, which never shows the value."""
    try:
        data = _encode(value).encode()
        _require_text_names(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotSerializable(
            f"the {name} is not JSON: {_reason(error)}; write dates, decimals and ids as text or numbers"
        ) from None
    if len(data) > max_bytes:
        raise NotSerializable(
            f"the {name} has {len(data)} bytes of JSON, and at most {max_bytes} are allowed:"
            " store the large part elsewhere and enqueue a reference to it"
        )
    return data


def _require_text_names(value: Any) -> None:
    """JSON's member names are text. The encoder would turn 1 into "1", and two members of one dict could become one.

    Called after the encoding, which has refused what holds itself.
    """
    open_values = [value]
    while open_values:
        match open_values.pop():
            case dict() as members:
                for name in members:
                    if not isinstance(name, str):
                        raise TypeError(f"a member's name is {type(name).__name__}, and must be text")
                open_values.extend(members.values())
            case list() | tuple() as items:
                open_values.extend(items)


# One encoder for all: `json.dumps` with options builds a new one at each call.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _reason(error: Exception) -> str:
    match error:
        case UnicodeEncodeError():
            return "it contains a lone surrogate, which UTF-8 cannot encode"
        case RecursionError():
            return "it is nested too deeply"
        case ValueError() if "Out of range float" in str(error):
            return "it contains NaN or an infinity"
        case ValueError() if "digits" in str(error):
            return "it contains an integer with more digits than Python writes"
        case ValueError():
            return "it contains itself"
    return str(error)
