"""The codec of pydantic: models, dataclasses, TypedDicts, named tuples and plain types."""

import json
from typing import Any

from outbox.effects.members import LOST, lost_member
from outbox.effects.misfit import Misfit, without_values
from outbox.errors import ConfigurationError
from outbox.extras import missing

try:
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticUndefinedAnnotation
    from pydantic.version import version_short
except ModuleNotFoundError as error:
    raise missing("outbox.Effect", "typed", error) from error

if tuple(map(int, version_short().split("."))) < (2, 12):  # the first whose `validate_json` takes `extra`
    raise ImportError(
        f"outbox.Effect needs pydantic 2.12, not {version_short()}: pip install 'sqlalchemy-outbox[typed]'"
    )

MAX_PROBLEMS = 3
_HIDDEN = "*"

_LOST = ("extra_forbidden", "unexpected_keyword_argument")  # the second of dataclasses
_SAID = {
    "missing": "is required",
    **dict.fromkeys(_LOST, LOST),
    "value_error": "its validator refuses it",
    "assertion_error": "its validator refuses it",
    "json_invalid": "is not valid JSON",
}
"""Problems in our words. The texts of pydantic and of validators may show the value, so of all others only the name is shown."""


class PydanticCodec:
    """Reads strictly: the text "5" is no number. Aliases are written and read."""

    def __init__(self, effect: str, type_: Any) -> None:
        self._name = getattr(type_, "__name__", str(type_))
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(type_)
            self._adapter.rebuild(raise_errors=True)
        except PydanticUndefinedAnnotation as error:
            raise ConfigurationError(
                f"Effect({effect!r}): the name {error.name!r} in {self._name} is not defined yet: define it above the effect"
            ) from error
        except Exception as error:  # by the type: PydanticUserError, TypeError and others
            raise ConfigurationError(
                f"Effect({effect!r}): pydantic cannot write and read {self._name}: {_first_line(error)}"
            ) from error

    def dump(self, value: Any) -> Any:
        def dump() -> Any:
            return self._adapter.dump_python(value, mode="json", by_alias=True, warnings="none")

        return without_values(dump, "cannot be written as JSON")

    def load(self, text: bytes) -> Any:
        try:
            return self._adapter.validate_json(text, strict=True, extra="forbid")
        except ValidationError as error:
            misfit = self._misfit(error)
            may_be_kept = any(each["type"] in _LOST for each in _problems(error))
        except Exception as error:  # a validator may raise anything
            misfit, may_be_kept = Misfit("", f"its validator raised {type(error).__name__}"), False
        if may_be_kept and (kept := self._load_extra(text)) is not None:
            return kept[0]
        raise misfit

    def _load_extra(self, text: bytes) -> tuple[Any] | None:
        """The value of a type that keeps members which are no fields, as with `extra="allow"` or a computed field.

        None if one of them would be lost.
        """
        try:
            value = self._adapter.validate_json(text, strict=True)
            again = self._adapter.dump_python(value, mode="json", by_alias=True, warnings="none")
        except Exception:  # the first attempt has said what is wrong
            return None
        return (value,) if lost_member(json.loads(text), again) is None else None

    def _misfit(self, error: ValidationError) -> Misfit:
        shown, problems = self._names(), _problems(error)
        first = _place(problems[0], shown)
        texts = [_said(problems[0]["type"])]
        others = problems[1:MAX_PROBLEMS]
        texts += [f"{_place(each, shown) or 'the whole'}: {_said(each['type'])}" for each in others]
        if len(problems) > MAX_PROBLEMS:
            texts.append(f"and {len(problems) - MAX_PROBLEMS} more problems")
        return Misfit(first, "; ".join(texts))

    def _names(self) -> set[str]:
        """The names in the type's schema. Every other part of a place may be the key of a dict, and so personal data."""
        names: set[str] = set()
        for mode in ("validation", "serialization"):
            try:
                open_values: list[Any] = [self._adapter.json_schema(mode=mode)]
            except Exception:  # a type may have no JSON schema
                continue
            while open_values:
                found = open_values.pop()
                if isinstance(found, dict):
                    for name, value in found.items():
                        names.update(
                            value if name in ("properties", "$defs", "mapping") and isinstance(value, dict) else ()
                        )
                        open_values.append(value)
                elif isinstance(found, list):
                    open_values.extend(found)
        return names


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _problems(error: ValidationError) -> list[Any]:
    return list(error.errors(include_url=False, include_context=False, include_input=False))


def _place(problem: Any, shown: set[str]) -> str:
    parts = [part if isinstance(part, int) or part in shown else _HIDDEN for part in problem["loc"]]
    if problem["type"] in _LOST and isinstance(last := problem["loc"][-1], str) and last.isidentifier():
        parts[-1] = last
    return ".".join(map(str, parts))


def _said(kind: str) -> str:
    if kind.endswith("_type"):
        return f"must be a valid {kind.removesuffix('_type').replace('_', ' ')}"
    return _SAID.get(kind, f"is refused ({kind.replace('_', ' ')})")
