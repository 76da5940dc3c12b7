"""The codec of msgspec: Structs, and dataclasses, TypedDicts and plain types where pydantic is not installed."""

import json
import re
from typing import Any

from outbox.effects.members import LOST, lost_member
from outbox.effects.misfit import Misfit, without_values
from outbox.errors import ConfigurationError
from outbox.extras import missing

try:
    import msgspec
except ModuleNotFoundError as error:
    raise missing("outbox.Effect", "msgspec", error) from error

_SHOWABLE = re.compile(r"Expected `[^`]*`(, got `[^`]*`)?|Object missing required field `[^`]*`")
"""The problems that name types and fields only. Others, such as those of a validator, may show the value."""


class MsgspecCodec:
    """Reads strictly: the text "5" is no number. Renamed fields are written and read under their new names."""

    def __init__(self, effect: str, type_: Any) -> None:
        try:
            self._decoder: Any = msgspec.json.Decoder(type_, strict=True)
        except Exception as error:  # TypeError, NameError and others, by the type
            name = getattr(type_, "__name__", str(type_))
            raise ConfigurationError(f"Effect({effect!r}): msgspec cannot write and read {name}: {error}") from error

    def dump(self, value: Any) -> Any:
        return without_values(lambda: msgspec.to_builtins(value, str_keys=True), "cannot be written as JSON")

    def load(self, text: bytes) -> Any:
        try:
            value = self._decoder.decode(text)
        except msgspec.ValidationError as error:
            misfit = _misfit(str(error))
        except Exception as error:  # a text that is no JSON, or what `__post_init__` raises
            misfit = Misfit("", f"cannot be read ({type(error).__name__})")
        else:
            lost = lost_member(json.loads(text), self.dump(value))
            if lost is None:
                return value
            misfit = Misfit(lost, LOST)
        raise misfit


def _misfit(text: str) -> Misfit:
    problem, _, place = text.partition(" - at `")
    field = place.rstrip("`").removeprefix("$").removeprefix(".").replace("[...]", ".*")
    field = re.sub(r"\[(\d+)\]", r".\1", field).lstrip(".")
    return Misfit(field, problem if _SHOWABLE.fullmatch(problem) else "its validator refuses it")
