"""What is stored as JSON: payloads, options, response bodies. Pure."""

import json
from typing import Any

from outbox.errors import NotSerializable


def encode_json(name: str, value: Any, bytes_max: int) -> bytes:
    """JSON in UTF-8, members in the caller's order. Raises `NotSerializable`, which never shows the value."""
    try:
        data = _encode(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise NotSerializable(
            f"the {name} is not JSON: {_reason(error)}; write dates, decimals and ids as text or numbers"
        ) from None
    if len(data) > bytes_max:
        raise NotSerializable(
            f"the {name} has {len(data)} bytes of JSON, at most {bytes_max} are taken:"
            " store the large part elsewhere and enqueue a reference to it"
        )
    return data


# One encoder for all: `json.dumps` with options builds a new one at each call.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _reason(error: Exception) -> str:
    match error:
        case UnicodeEncodeError():
            return "it holds a lone surrogate, which UTF-8 cannot carry"
        case RecursionError():
            return "it is nested too deeply"
        case ValueError() if "Out of range float" in str(error):
            return "it holds NaN or an infinity"
        case ValueError() if "digits" in str(error):
            return "it holds an integer of more digits than Python writes"
        case ValueError():
            return "it holds itself"
    return str(error)
