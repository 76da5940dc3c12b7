"""What the conformance suite asks of an outcome and of a client's exceptions. Pure; needs no pytest."""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from dispatchers.sanitize import OUTCOMES, storable


def flaw_of(outcome: Any) -> str | None:
    """Why the outcome could not be stored and read as it is, or None if it can."""
    if not isinstance(outcome, OUTCOMES):
        return f"an answer of type {type(outcome).__name__} is no outcome"
    if (kept := storable(outcome)) != outcome:
        return f"{outcome!r} cannot be stored; kept would be {kept!r}"
    if not getattr(outcome, "reason", "-").strip():
        return f"{type(outcome).__name__} without a reason"
    result = getattr(outcome, "result", None)
    if json.loads(json.dumps(result)) != result:
        return f"its result reads otherwise than it was written: {result!r}"
    after = getattr(outcome, "after", None)
    if after is not None and after < timedelta(0):
        return f"{type(outcome).__name__} asks to come again {after} from now"
    return None


def leaks(what: str, texts: Sequence[str], places: Mapping[str, Any]) -> Iterator[str]:
    """Where one of `texts` is shown: by its number, never by itself."""
    for place, value in places.items():
        shown = list(_texts_in(value))
        for number, text in enumerate(texts):
            if any(text in each for each in shown):
                yield f"{place} shows {what} {number}"


def descendants(base: type[Exception]) -> Iterator[type[Exception]]:
    """`base` and its public descendants in its top-level package."""
    package = base.__module__.partition(".")[0]
    if not base.__name__.startswith("_"):
        yield base
    for child in base.__subclasses__():
        if child.__module__.partition(".")[0] == package:
            yield from descendants(child)


def made_of(cls: type[Exception], text: str) -> Exception:
    """A `cls` whose every required argument is `text`. Raises `TypeError` where that will not do."""
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
        raise TypeError(f"{cls.__qualname__} cannot be made of texts: override `exception` in your suite") from error


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from (str(name), *_texts_in(each))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts_in(each)
    else:
        yield str(value)
