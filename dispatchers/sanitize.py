"""What an adapter answered, made fit to be stored: an answer that we cannot keep must not keep the entry from settling. Pure."""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

from dispatchers.delivery import (
    MAX_RESULT_BYTES,
    Absent,
    CannotTell,
    Deferred,
    Delivered,
    Finding,
    Found,
    InProgress,
    KeyConflict,
    Outcome,
    Rejected,
    Unknown,
)
from outbox.encryption import is_sealed

MAX_REASON_CHARS = 1000
JSON = json.JSONEncoder(allow_nan=False)  # `json.dumps` with an argument makes one at each call
MAX_SMALL_ITEMS = 8
MAX_SMALL_CHARS = 256  # of each name and text; JSON writes a character in at most 12 bytes
MAX_SMALL_NUMBER = 2**63  # Python writes no number of thousands of digits
_NOT_DELIVERED = (Rejected, KeyConflict, Deferred, InProgress, Unknown)
OUTCOMES = (Delivered, *_NOT_DELIVERED)


def storable(answer: object) -> Outcome:
    """`answer` as an outcome whose every field the database takes. What is no outcome says nothing: `Unknown`."""
    if isinstance(answer, Delivered):
        result = None if answer.result is None else _result(answer.result)
        return answer if result is answer.result else replace(answer, result=result)
    if not isinstance(answer, _NOT_DELIVERED):
        return Unknown(_no_answer(answer))
    if isinstance(answer, Rejected):
        return replace(answer, reason=_text(answer.reason), result=_result(answer.result))
    if isinstance(answer, KeyConflict):
        return KeyConflict(_text(answer.reason))
    after = answer.after if isinstance(answer.after, timedelta) else None
    if isinstance(answer, InProgress):
        return InProgress(after)
    return replace(answer, reason=_text(answer.reason), after=after)


def storable_finding(answer: object) -> Finding:
    """The finding without what cannot be stored; anything that is no finding becomes `CannotTell`."""
    if isinstance(answer, Found):
        return Found(_result(answer.result))
    if isinstance(answer, Absent):
        return answer
    if isinstance(answer, CannotTell):
        return CannotTell(_text(answer.reason))
    return CannotTell(_no_answer(answer))


def _no_answer(answer: object) -> str:
    """Why an object of another type says nothing. Its text may be a secret."""
    if answer is None:
        return "the adapter answered with None: is its `return` missing?"
    return f"the adapter answered with a {type(answer).__name__}"


def _result(result: Any) -> Any:
    """`result`, or what says why it is not kept: it happened nevertheless."""
    if type(result) is dict and _is_small(result):  # most results of brokers; to encode one takes four times as long
        return result
    if is_sealed(result):
        return {"unstorable": "a text that begins as an encrypted value does"}
    try:
        text = JSON.encode(result)
    except (TypeError, ValueError, RecursionError):
        return unstorable(type(result).__name__)
    return result if len(text) <= MAX_RESULT_BYTES else unstorable(f"{len(text)} bytes of JSON")


def unstorable(what: str) -> dict[str, str]:
    """What is stored in place of a result that cannot be stored."""
    return {"unstorable": what}


def is_unstorable(result: Any) -> bool:
    """Whether it is stored in the place of a result."""
    return isinstance(result, dict) and result.keys() == {"unstorable"}


def _is_small(result: dict[Any, Any]) -> bool:
    """Whether it is surely short enough, as it has only a few short texts and numbers."""
    if len(result) > MAX_SMALL_ITEMS:
        return False
    for name, value in result.items():
        if type(name) is not str or len(name) > MAX_SMALL_CHARS:
            return False
        if type(value) is str:
            if len(value) > MAX_SMALL_CHARS:
                return False
        elif type(value) is not int or not -MAX_SMALL_NUMBER <= value <= MAX_SMALL_NUMBER:
            return False
    return True


def _text(reason: object) -> str:
    """Text without what UTF-8 or PostgreSQL cannot hold."""
    text = reason if isinstance(reason, str) else f"({type(reason).__name__})"
    return text[:MAX_REASON_CHARS].replace("\0", "").encode(errors="replace").decode()
