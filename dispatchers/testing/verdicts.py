"""The conformance suite's checks of an outcome and of a client's exceptions. Pure; needs no pytest."""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from types import UnionType
from typing import Any

from dispatchers.sanitize import OUTCOMES, storable


def flaw_of(outcome: Any) -> str | None:
    """Why the outcome cannot be stored and read back unchanged; None if it can."""
    if not isinstance(outcome, OUTCOMES):
        return f"the adapter must return an outcome of `dispatchers`, but it returned an object of type {type(outcome).__name__}"
    if (kept := storable(outcome)) != outcome:
        return f"{outcome!r} cannot be stored unchanged: the dispatcher would store {kept!r}"
    if not getattr(outcome, "reason", "-").strip():
        return f"{type(outcome).__name__} must have a reason, but its reason is empty"
    result = getattr(outcome, "result", None)
    if json.loads(json.dumps(result)) != result:
        return f"the result must be equal after it was written and read as JSON, but {result!r} is not"
    after = getattr(outcome, "after", None)
    if after is not None and after < timedelta(0):
        return f"{type(outcome).__name__} must not have a negative `after`, but it is {after}"
    return None


def leaks(what: str, texts: Sequence[str], places: Mapping[str, Any]) -> Iterator[str]:
    """The places that show one of `texts`. A place is reported with the text's number, never with the text."""
    for place, value in places.items():
        shown = list(_texts_in(value))
        for number, text in enumerate(texts):
            if any(text in each for each in shown):
                yield f"{place} shows {what} {number}, which must not be shown"


def descendants(base: type[Exception]) -> Iterator[type[Exception]]:
    """`base` and its public descendants in its top-level package."""
    package = base.__module__.partition(".")[0]
    if not base.__name__.startswith("_"):
        yield base
    for child in base.__subclasses__():
        if child.__module__.partition(".")[0] == package:
            yield from descendants(child)


def made_of(cls: type[Exception], text: str) -> Exception:
    """An instance of `cls` with `text` for each required argument. Raises `TypeError` if that is not possible."""
    try:
        parameters = list(inspect.signature(cls).parameters.values())
    except ValueError:  # written in C
        return cls(text)
    required = [each for each in parameters if each.default is each.empty]
    positional = [text for each in required if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    named = {each.name: text for each in required if each.kind is each.KEYWORD_ONLY}
    if not positional and any(each.kind is each.VAR_POSITIONAL for each in parameters):
        positional = [text]
    try:
        return cls(*positional, **named)
    except Exception as error:
        raise TypeError(
            f"{cls.__qualname__} cannot be created with texts as its arguments: override `exception` in your suite"
        ) from error


def names(expected: type[Any] | UnionType) -> str:
    """The class, or the classes of the union, in words."""
    classes = expected.__args__ if isinstance(expected, UnionType) else (expected,)
    return " or ".join(cls.__name__ for cls in classes)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from (str(name), *_texts_in(each))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts_in(each)
    else:
        yield str(value)
