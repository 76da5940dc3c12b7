"""The JSON Schema of a dataclass, as `dispatchers.admin.read.plain_values.plain` writes it. Pure."""

import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import date, datetime, timedelta
from enum import StrEnum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from dispatchers.admin.read.plain_values import Place

SIMPLE: Mapping[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    datetime: {"type": "string", "format": "date-time"},
    date: {"type": "string", "format": "date"},
    UUID: {"type": "string", "format": "uuid"},
    timedelta: {"type": "string", "description": "A span back from now, such as 15m, 2h or 7d."},
    Any: {},
    object: {},
}
IDS = {"type": "string", "description": "Entries, as the previous answer returned them."}
PLACE = {"type": "string", "description": "A position in a list, as the previous page returned it."}


class Schemas:
    """named: the schemas of the dataclasses so far, by the class's name."""

    def __init__(self) -> None:
        self.named: dict[str, dict[str, Any]] = {}

    def of(self, hint: Any) -> dict[str, Any]:
        """The schema of a type; a dataclass is referred to by its name."""
        if hint in SIMPLE:
            return dict(SIMPLE[hint])
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.of(each) for each in arguments]}
        if origin is Literal:
            return {"type": "string", "enum": list(arguments)}
        if hint == tuple[UUID, ...]:
            return dict(IDS)
        if origin is Place:
            return dict(PLACE)
        if origin is tuple and arguments[1:] != (Ellipsis,):
            return {"type": "array"}
        if origin in (list, tuple, Sequence, Collection):
            return {"type": "array", "items": self.of(arguments[0])}
        if origin in (dict, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            return {"type": "string", "enum": [str(each) for each in hint]}
        if is_dataclass(hint):
            return self._reference(hint)
        raise TypeError(f"the type {hint!r} has no JSON Schema: describe it in {__name__}")

    def _reference(self, kind: Any) -> dict[str, Any]:
        name = kind.__name__
        if name not in self.named:
            self.named[name] = {}  # it may refer to itself
            self.named[name] = self.object_of(kind)
        return {"$ref": f"#/components/schemas/{name}"}

    def object_of(self, kind: Any, *, without: Collection[str] = ()) -> dict[str, Any]:
        """The schema of a dataclass itself, without some of its fields."""
        hints = get_type_hints(kind)
        shown = [each for each in fields(kind) if each.name not in without]
        required = [each.name for each in shown if required_of(each)]
        properties = {each.name: self.of_field(each, hints[each.name]) for each in shown}
        return {"type": "object", "required": required, "properties": properties}

    def of_field(self, each: Field[Any], hint: Any) -> dict[str, Any]:
        """The schema of one field, with its description and limits."""
        schema = self.of(hint)
        for name, keyword in (("description", "description"), ("minimum", "minimum"), ("maximum", "maximum")):
            if name in each.metadata:
                schema[keyword] = each.metadata[name]
        return schema


def required_of(each: Field[Any]) -> bool:
    """Whether a dataclass's field has no default."""
    return each.default is MISSING and each.default_factory is MISSING
