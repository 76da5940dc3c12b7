"""The identity of a message."""

from typing import TypedDict

from outbox.errors import InvalidValue


class MessageIdentity(TypedDict):
    """The two arguments of `outbox.inbox` that a message decides: unpack it into the call with `**`."""

    scope: str
    message_id: str


def event_id(found: object, place: str, way_out: str) -> str:
    """The producer's id of an event, as text. Raises `InvalidValue` if `place` in the message holds none."""
    if isinstance(found, bytes):
        try:
            found = found.decode()
        except UnicodeDecodeError:
            raise InvalidValue(place, found, "is not UTF-8") from None
    if not isinstance(found, str) or not found:
        raise InvalidValue(place, found, f"is missing or empty: {way_out}")
    return found


def place_name(field: str, found: object, way_out: str) -> str:
    """A name of the broker, which distinguishes its messages from another's. Raises `InvalidValue` for none."""
    if not isinstance(found, str) or not found:
        raise InvalidValue(field, found, f"must be a str that is not empty: {way_out}")
    return found


def joined(*names: str) -> str:
    """Names as one text that can be split again: `a:b` and `c` are not `a` and `b:c`."""
    return ":".join(name.replace("%", "%25").replace(":", "%3A") for name in names)
