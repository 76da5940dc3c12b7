"""Members of stored JSON that a type does not know. Pure."""

from typing import Any, Final

LOST: Final = "is not a field of this type, so it would be lost"


def lost_member(stored: Any, again: Any) -> str | None:
    """The name of the first member of `stored` that `again` has not; None if it has all. Their values are not compared.

    stored: what was read. again: what was written from it.
    """
    if isinstance(stored, dict) and isinstance(again, dict):
        for name, value in stored.items():
            lost = lost_member(value, again[name]) if name in again else name
            if lost is not None:
                return str(lost)
    elif isinstance(stored, list) and isinstance(again, list) and len(stored) == len(again):
        return next(
            (lost for pair in zip(stored, again, strict=True) if (lost := lost_member(*pair)) is not None), None
        )
    return None
