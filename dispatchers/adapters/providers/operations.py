"""An operation of a service: the request that it is, and what it says of keys if it differs from the rest of the service."""

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

from dispatchers.adapters.providers.auth import PLACEHOLDER
from dispatchers.adapters.providers.json_paths import PATH, is_set
from dispatchers.adapters.providers.key_places import BodyField, GraphQLArgument, KeyPlace, Mark, NoKey
from dispatchers.time_limits import Window
from outbox.errors import ConfigurationError

Method: TypeAlias = Literal["POST", "PUT", "PATCH", "DELETE"]
Content: TypeAlias = Literal["json", "form"]


class Unfit(Exception):
    """Why a payload can never be sent. The text names members, never their content."""


@dataclass(frozen=True)
class Operation:
    """One request of a service.

    path: below the profile's `base_url`, with its query. A `{name}` is a setting of the adapter, or else a member of the
        payload, which is sent in the path and not in the body.
    content: how the payload is sent: as JSON, or as a form, which has texts, numbers and lists of them.
    payload: what the service takes: "object", or "list" for a batch.
    key, window, result: where they differ from the profile's.
    pause: the least time between an attempt whose outcome is unknown and the next one, if the service asks for it.
    success: the status of a success. answer: an example of its JSON, with "{id}" where a new id is. Both are for the fake.
    """

    method: Method
    path: str
    _: KW_ONLY
    content: Content = "json"
    payload: Literal["object", "list"] = "object"
    key: KeyPlace | None = None
    window: Window = None
    result: tuple[str, ...] | None = None
    pause: timedelta | None = None
    success: int = 200
    answer: Any = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or (self.path and not self.path.startswith("/")):
            raise ConfigurationError(f"{self.method}({self.path!r}): the path must begin with a slash")
        if self.content not in ("json", "form") or self.payload not in ("object", "list"):
            raise ConfigurationError(
                f"{self.method}({self.path!r}): content is 'json' or 'form', payload 'object' or 'list', not"
                f" {self.content!r} and {self.payload!r}"
            )
        if self.payload == "list" and (self.content == "form" or PLACEHOLDER.search(self.path)):
            raise ConfigurationError(
                f"{self.method}({self.path!r}): a list is sent as JSON, and has no members for a path"
            )
        if self.pause is not None and (not isinstance(self.pause, timedelta) or self.pause <= timedelta(0)):
            raise ConfigurationError(f"{self.method}({self.path!r}): pause={self.pause!r} must be a positive timedelta")
        check_results(self.path, self.result or ())

    @property
    def placeholders(self) -> tuple[str, ...]:
        return tuple(PLACEHOLDER.findall(self.path))


Post = partial(Operation, "POST")
Put = partial(Operation, "PUT")
Patch = partial(Operation, "PATCH")
Delete = partial(Operation, "DELETE")


def check_results(owner: str, paths: tuple[str, ...]) -> None:
    for path in paths:
        if not PATH.fullmatch(path):
            raise ConfigurationError(f"{owner}: result {path!r} must be names joined by dots, such as 'data[].id'")


def misplaced(place: KeyPlace, operation: Operation) -> str | None:
    """Why a body of the operation cannot have this place; None if it can."""
    match place:
        case GraphQLArgument():
            is_nested = True
        case BodyField(path=path):
            is_nested = "." in path
        case NoKey(mark=Mark(path=path, value=value)):
            is_nested = "." in path or not isinstance(value, str)
        case _:
            return None
    if operation.payload == "list":
        return "has a list as its payload, which has no members for a key"
    return "is sent as a form, which has no nested members" if operation.content == "form" and is_nested else None


# --- the payload


def problem_of(payload: Any, operation: Operation, place: KeyPlace, ids: tuple[str, ...]) -> str | None:
    """Why this payload cannot be sent by `operation`; None if it can. ids: its members that the path takes."""
    if operation.payload == "list":
        return None if isinstance(payload, list | tuple) else f"must be a list, not {_kind(payload)}"
    if not isinstance(payload, dict):
        return f"must be an object, not {_kind(payload)}"
    for name in ids:
        if not _is_id(payload.get(name)):
            return f"needs {name!r}, the id that belongs in the URL, as a text or a number"
    if operation.content == "form" and (nested := [name for name, value in payload.items() if not _is_flat(value)]):
        return f"is sent as a form, so {nested[0]!r} must be a text, a number, a boolean or a list of these"
    return _clash(payload, place)


def _clash(payload: Mapping[str, Any], place: KeyPlace) -> str | None:
    match place:
        case GraphQLArgument(path=path):
            if not place.is_read_by(payload.get("query")):
                return f"has a 'query' without `{place.used_as}`, so the service would read no key"
            path = f"variables.{path}"
        case BodyField(path=path) | NoKey(mark=Mark(path=path)):
            if path.endswith("[]"):
                return (
                    None
                    if isinstance(payload.get(path[:-2], []), list | tuple)
                    else f"must have a list as {path[:-2]!r}"
                )
        case _:
            return None
    if "." not in path:
        return f"must not set {path!r}: the adapter puts the key there" if path in payload else None
    if is_set(payload, path):
        return f"must not set {path!r}: the adapter puts the key there"
    return _blocked(payload, path)


def _blocked(payload: Any, path: str) -> str | None:
    """The key's way through the payload must be made of objects."""
    names = path.split(".")
    for done, name in enumerate(names[:-1], 1):
        if name not in payload:
            return None
        payload = payload[name]
        if not isinstance(payload, dict):
            return f"must have an object as {'.'.join(names[:done])!r}"
    return None


def path_of(template: str, payload: dict[str, Any]) -> str:
    """The path with the payload's ids, which are taken out of the payload."""

    def taken(match: re.Match[str]) -> str:
        return quote(str(payload.pop(match[1])), safe="")

    return PLACEHOLDER.sub(taken, template)


def _is_id(value: object) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return True
    return isinstance(value, str) and value.strip() not in {"", ".", ".."}


def _is_flat(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(each, str | int | float) for each in value)
    return value is None or isinstance(value, str | int | float)


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )
