"""The identity of a message."""

from collections.abc import Iterable
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


def event_id_in(headers: Iterable[tuple[str, object]], header: str) -> str:
    """The producer's id, from the header of this name. Raises `InvalidValue` unless there is exactly one."""
    found = [value for name, value in headers if name == header]
    if len(found) > 1:
        raise InvalidValue("header", header, f"occurs {len(found)} times in the message: an event id must occur once")
    return event_id(next(iter(found), None), f"header {header!r}", "the producer must send it")


def place_name(field: str, found: object, way_out: str) -> str:
    """A name of the broker, which distinguishes its messages from another's. Raises `InvalidValue` for none."""
    if not isinstance(found, str) or not found:
        raise InvalidValue(field, found, f"must be a str that is not empty: {way_out}")
    return found


def joined(*names: str) -> str:
    """Names as one text that can be split again: `a:b` and `c` are not `a` and `b:c`."""
    return ":".join(name.replace("%", "%25").replace(":", "%3A") for name in names)
