"""How typed values become JSON data and back: by pydantic or by msgspec, whichever the type asks for.

A codec is checked against itself. What it writes is read back and compared, so a value that JSON cannot carry is refused where
it is enqueued: a subclass whose fields would be lost, a secret that would be masked, a text for a number.
"""

from importlib.util import find_spec
from typing import Any, Protocol, get_args, get_origin

from outbox.effects.comparison import difference
from outbox.effects.misfit import Misfit
from outbox.errors import ConfigurationError


class Codec(Protocol):
    """Writes and reads the values of one type. Both raise `Misfit`, without the value in its text or its cause."""

    def dump(self, value: Any) -> Any:
        """The value as JSON data: dicts, lists, texts, numbers, booleans and None."""
        ...

    def load(self, text: bytes) -> Any:
        """The value of the JSON text. A member that the type does not know is a misfit: it would be lost."""
        ...


def codec_of(effect: str, type_: Any) -> Codec:
    """The codec of a type. Raises `ConfigurationError` if no installed package can write and read it.

    A type with a `msgspec.Struct` in it: msgspec. Any other type: pydantic if it is installed, and otherwise msgspec.
    """
    if _names_struct(type_):
        return _msgspec_codec(effect, type_)
    if find_spec("pydantic") is not None:
        from outbox.effects.pydantic_codec import PydanticCodec

        return PydanticCodec(effect, type_)
    if find_spec("msgspec") is not None:
        return _msgspec_codec(effect, type_)
    raise ConfigurationError(
        f"Effect({effect!r}) needs the package 'pydantic' or 'msgspec': pip install 'sqlalchemy-outbox[typed]' or"
        " 'sqlalchemy-outbox[msgspec]'"
    )


def _msgspec_codec(effect: str, type_: Any) -> Codec:
    from outbox.effects.msgspec_codec import MsgspecCodec

    return MsgspecCodec(effect, type_)


def _names_struct(type_: Any) -> bool:
    """Whether it is a `msgspec.Struct`, or a list, union or other generic type of one."""
    if any(_names_struct(argument) for argument in get_args(type_)):
        return True
    bases = getattr(get_origin(type_) or type_, "__mro__", ())
    return any(base.__module__.partition(".")[0] == "msgspec" and base.__name__ == "Struct" for base in bases)


def require_readable(codec: Codec, value: Any, text: bytes) -> None:
    """Raise `Misfit` unless reading `text`, which was written for `value`, returns an equal value."""
    found = difference(value, codec.load(text))
    if found is not None:
        raise Misfit(*found)
