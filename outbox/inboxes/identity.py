"""What tells one message from every other."""

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
            raise InvalidValue(place, found, "is no UTF-8") from None
    if not isinstance(found, str) or not found:
        raise InvalidValue(place, found, f"is missing or empty: {way_out}")
    return found
