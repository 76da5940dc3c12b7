"""The permits of a destination that all its dispatchers share: which claim has taken how many, and for how long. Pure.

They are stored in the destination's row, by lease token. A claim takes them while that row is locked; they are released one by
one as its sends end, or all at once when its lease ends, which is the first sign that a dispatcher has crashed.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import NamedTuple
from uuid import UUID

NONE_LEFT: Mapping[UUID, int] = MappingProxyType({})


class Taken(NamedTuple):
    """What one claim has taken. token: its lease's. permits: how many of its sends may be in flight. until: its lease's end."""

    token: UUID
    permits: int
    until: datetime


def still_taken(taken: Iterable[Taken], now: datetime, left: Mapping[UUID, int] = NONE_LEFT) -> tuple[Taken, ...]:
    """Without what has come free. left: of how many sends of a claim it is known that they have not ended.

    A claim's permits only decrease: a late or repeated report takes none.
    """
    lasting = (each for each in taken if each.until > now)
    kept = (each._replace(permits=min(each.permits, left.get(each.token, each.permits))) for each in lasting)
    return tuple(each for each in kept if each.permits)


def as_record(taken: Iterable[Taken]) -> str | None:
    """The text of the destination's `permits_taken`: [lease token, permits, until] of each claim."""
    rows = [[each.token.hex, each.permits, each.until.isoformat()] for each in taken]
    return json.dumps(rows) if rows else None


def on_record(text: str | None) -> tuple[Taken, ...]:
    rows = json.loads(text) if text else ()
    return tuple(Taken(UUID(token), permits, datetime.fromisoformat(until)) for token, permits, until in rows)
