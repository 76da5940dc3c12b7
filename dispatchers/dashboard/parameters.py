"""The parameters of a view or an action, from an address, a form or a JSON object, as a dataclass.

The dataclass is the contract: its fields are what may be given, and the OpenAPI document describes them. A parameter that is
not among them is refused: a filter that is misspelt must not show everything.
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from dispatchers.admin.read.plain_values import Place, parse_ids, parse_since
from dispatchers.dashboard.failures import Failure
from dispatchers.dashboard.incoming import parse_json

T = TypeVar("T")

MAX_TEXT_CHARS = 1000
IDS = tuple[UUID, ...]
SINCE = {timedelta, datetime}


def parameter(description: str, default: Any = MISSING, **settings: Any) -> Any:
    """A field with its description. minimum, maximum: of a number. max_chars: of a text."""
    metadata = {"description": description, **settings}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """No parameters."""


def parse(kind: type[T], given: Mapping[str, Sequence[Any]], *, as_json: bool = False) -> T:
    """The dataclass, from each name's values: texts, or with `as_json` what a JSON object holds.

    Raises `Failure` with the wrong field.
    """
    hints = get_type_hints(kind)
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]  # of a dataclass
    for name in given:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise Failure(
                400, "unknown_parameter", f"there is no parameter {name!r} here; the parameters are: {listed}", name
            )
    values = {}
    for name, each in known.items():
        hint = hints[name]
        is_text = as_json and hint is Any  # else an empty field of a form is one without a value
        raw = [value for value in given.get(name, ()) if value is not None and (value != "" or is_text)]
        if raw:
            values[name] = _checked(name, hint, raw, each.metadata, as_json=as_json)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise Failure(422, "missing", f"{name} is required", name)
    return kind(**values)


def _checked(name: str, hint: Any, raw: Sequence[Any], limits: Mapping[str, Any], *, as_json: bool) -> Any:
    try:
        value = _converted(hint, raw, as_json=as_json)
    except (ValueError, TypeError, OverflowError) as error:
        raise Failure(422, "invalid", f"{name}: {error}", name) from None
    low, high = limits.get("minimum"), limits.get("maximum")
    if isinstance(value, int) and ((low is not None and value < low) or (high is not None and value > high)):
        raise Failure(422, "invalid", f"{name}: {value} is not between {low} and {high}", name)
    return value


def _converted(hint: Any, raw: Sequence[Any], *, as_json: bool) -> Any:
    if hint == IDS and len(raw) == 1 and isinstance(raw[0], str):
        return parse_ids(raw[0])
    if get_origin(hint) is tuple and get_args(hint)[1:] == (Ellipsis,):
        flat = [value for each in raw for value in (each if isinstance(each, list) else [each])]
        return tuple(_one(get_args(hint)[0], value) for value in flat)
    if len(raw) > 1:
        raise ValueError("it is given more than once")
    if hint is Any:
        return raw[0] if as_json else parse_json(raw[0])
    return _one(hint, raw[0])


def _one(hint: Any, value: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        parts = [each for each in get_args(hint) if each is not type(None)]
        return parse_since(_text(value)) if set(parts) == SINCE else _one(parts[0], value)
    if get_origin(hint) is Place:
        return Place.parse(_text(value), *get_args(hint))
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(f"{value!r} is not one of {', '.join(map(str, get_args(hint)))}")
        return value
    if hint is bool:
        return _boolean(value)
    if hint is str:
        return _text(value)
    if hint is UUID or hint is int:
        return _number_or_id(hint, value)
    raise TypeError(f"a parameter of the type {hint!r} cannot be read")


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("1", "true", "on", "yes"):
        return True
    if value in ("0", "false", "off", "no"):
        return False
    raise ValueError(f"{value!r} is neither true nor false")


def _number_or_id(hint: Any, value: Any) -> Any:
    try:
        return hint(value)
    except (ValueError, AttributeError):
        what = "an id" if hint is UUID else "a whole number"
        raise ValueError(f"{value!r} is not {what}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"must be a text, not {value!r}")
    if len(value) > MAX_TEXT_CHARS:
        raise ValueError(f"has {len(value)} characters; the maximum is {MAX_TEXT_CHARS}")
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{value!r} has a NUL character or a lone surrogate, which no key and no name has")
    return value
