"""Paths to members of JSON: `data.id`, and `data[].id` for a member of each item of a list. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

PATH: Final = re.compile(r"[^.\[\]{}\s]+(\[\])?(\.[^.\[\]{}\s]+(\[\])?)*")

ANY: Final = "*"


class Blocked(Exception):
    """Something else is where a member must be written. The text names the member, never its content."""


def found(value: Any, path: str) -> Any:
    """What is at `path`; None if nothing is. With `[]` in the path: a list of what each item has there."""
    name, _, rest = path.partition(".")
    if name.endswith("[]"):
        items = value.get(name[:-2]) if isinstance(value, dict) else None
        if not isinstance(items, list):
            return None
        return [found(item, rest) if rest else item for item in items]
    inner = value.get(name) if isinstance(value, dict) else None
    return found(inner, rest) if rest else inner


def is_set(value: Any, path: str) -> bool:
    """Whether the member at `path` exists, in any item if the path goes through a list."""
    return any(True for _ in _at(value, path.split(".")))


def _at(value: Any, names: list[str]) -> Iterator[Any]:
    if not names:
        yield value
        return
    name = names[0].removesuffix("[]")
    if isinstance(value, dict) and name in value:
        inner = value[name]
        for each in inner if names[0].endswith("[]") and isinstance(inner, list) else [inner]:
            yield from _at(each, names[1:])


def put(value: dict[str, Any], path: str, content: Any) -> None:
    """Write `content` at `path`. Objects that are missing on the way are made; `[]` at the end appends to a list.

    Raises `Blocked` if something else than an object or a list is on the way.
    """
    *way, last = path.split(".")
    for done, name in enumerate(way, 1):
        value = value.setdefault(name, {})
        if not isinstance(value, dict):
            raise Blocked(f"{'.'.join(way[:done])!r} must be an object")
    if not last.endswith("[]"):
        value[last] = content
        return
    items = value.setdefault(last[:-2], [])
    if not isinstance(items, list):
        raise Blocked(f"{path[:-2]!r} must be a list")
    value[last[:-2]] = [*items, content]


def holds(value: Any, pattern: Any) -> bool:
    """Whether `value` has everything that `pattern` names: its members, and an item like each of its lists' items.

    The name "*" is that of any member.
    """
    match pattern:
        case Mapping():
            return isinstance(value, dict) and all(_has(value, name, each) for name, each in pattern.items())
        case list() | tuple():
            return isinstance(value, list) and all(any(holds(item, each) for item in value) for each in pattern)
        case _:
            return type(value) is type(pattern) and bool(value == pattern)


def _has(value: dict[str, Any], name: str, pattern: Any) -> bool:
    if name == ANY:
        return any(holds(each, pattern) for each in value.values())
    return name in value and holds(value[name], pattern)
