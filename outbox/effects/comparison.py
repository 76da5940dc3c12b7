"""Where a value differs from the one that was read back from its JSON. Pure.

Objects are compared by their fields, not by their own `==`, which may compare an id only, or the identity. Private attributes are
no part of a payload.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID

from outbox.effects.members import LOST

MAX_DEPTH = 200  # pydantic reads no JSON that is nested deeper
_PLAIN = frozenset({str, int, float, bool, type(None), bytes, Decimal, UUID, date})
"""Types without fields, whose `==` is Python's own. A container of them is compared as a whole."""


def difference(value: Any, read: Any) -> tuple[str, str] | None:
    """The first field in which they differ, with dots, and what is lost there; None if nothing is."""
    return next(_differences(value, read, "", MAX_DEPTH), None)


def _differences(value: Any, read: Any, field: str, depth: int) -> Iterator[tuple[str, str]]:
    if _is_same(value, read):
        return
    if depth == 0:
        yield field, "is nested too deeply to be compared"
        return
    kind: Any = type(value)
    names = _fields_of(kind)
    if names is not None and kind is not type(read) and not _is_generic_of(value, read):
        yield field, f"{_loss(value, read)}: use exactly the declared type"
    elif names is not None:
        for name in names:
            one, other = getattr(value, name, None), getattr(read, name, None)
            if not _is_same(one, other):
                yield from _differences(one, other, _below(field, name), depth - 1)
        one, other = _extra_of(value), _extra_of(read)
        if not _is_same(one, other):
            yield from _differences(one, other, field, depth - 1)
    elif isinstance(value, Mapping) and isinstance(read, Mapping) and value.keys() >= read.keys():
        for name in value:
            if name in read:
                yield from _differences(value[name], read[name], _below(field, "*"), depth - 1)
            else:
                yield _below(field, name if isinstance(name, str) and name.isidentifier() else "*"), LOST
    elif _is_sequence(value) and _is_sequence(read) and len(value) == len(read):
        for number, (one, other) in enumerate(zip(value, read, strict=True)):
            yield from _differences(one, other, _below(field, str(number)), depth - 1)
    elif not _equal(value, read):
        yield field, _loss(value, read)


def _loss(value: Any, read: Any) -> str:
    """What an unequal pair says without its values."""
    if type(value) is type(read):
        return f"another {type(value).__name__} would be read: JSON does not carry this one"
    return f"a {type(value).__name__} would be read as a {type(read).__name__}"


def _is_same(value: Any, read: Any) -> bool:
    """Whether they are equal and of the same plain types. The fast path: what is not the same may still be equal."""
    kind = type(value)
    if value is read or kind is not type(read):
        return value is read
    if kind not in (list, tuple, dict):
        return kind in _PLAIN and bool(value == read)
    ones, others = (value.values(), read.values()) if kind is dict else (value, read)
    kinds = list(map(type, ones))
    return _PLAIN.issuperset(kinds) and kinds == list(map(type, others)) and bool(value == read)


def _equal(value: Any, read: Any) -> bool:
    if isinstance(value, datetime) and isinstance(read, datetime) and value.tzinfo and read.tzinfo:
        # Python finds instants of two zones unequal in the hour that a clock change repeats.
        value, read = value.astimezone(UTC), read.astimezone(UTC)
    if isinstance(value, float) and isinstance(read, Decimal):
        return False  # 5.5 is equal and 0.1 is not: what works in a test would fail later
    try:
        return bool(value == read)
    except Exception:  # the app's own comparison
        return False


@lru_cache(maxsize=1000)
def _fields_of(kind: type[Any]) -> Sequence[str] | None:
    """The names of the fields of a model, a dataclass or a Struct; None for another type."""
    if dataclasses.is_dataclass(kind):
        return [each.name for each in dataclasses.fields(kind)]
    models = getattr(kind, "__pydantic_fields__", None)
    if isinstance(models, dict):
        return list(models)
    structs = getattr(kind, "__struct_fields__", None)
    return structs if isinstance(structs, tuple) else None


def _extra_of(value: Any) -> Any:
    """What a pydantic model with `extra="allow"` holds beside its fields."""
    return getattr(value, "__pydantic_extra__", None) or {}


def _is_generic_of(value: Any, read: Any) -> bool:
    """Whether one is an instance of a generic model, and the other of this model with its parameters: `Box` and `Box[int]`."""
    return _origin(value) is _origin(read)


def _origin(value: Any) -> Any:
    generic = getattr(type(value), "__pydantic_generic_metadata__", None) or {}
    return generic.get("origin") or type(value)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _below(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name
